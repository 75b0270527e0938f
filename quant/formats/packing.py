"""Codes of 4 or 8 bits in int32 words, low bits first: the one storage trick that all three formats share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from qtool.quant.errors import QtoolError


def pack(codes: Tensor, bits: int) -> Tensor:
    """[..., K] uint8 → [..., ⌈K·bits/32⌉] int32; element i lies at bit i·bits. The last word is filled with zeros."""
    per_word = 32 // bits
    codes = pad(codes, (0, -codes.shape[-1] % per_word))
    if bits == 4:
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    # flat first: a dimension of size 1 may carry any stride, and torch before 2.13 then refuses the view
    return codes.reshape(-1).view(torch.int32).view(*codes.shape[:-1], codes.shape[-1] // 4)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """[..., W] int32 → [..., count] uint8: the inverse of pack(). Raises QtoolError where the words are none."""
    if words.dtype != torch.int32:
        raise QtoolError(f"packed codes must be int32, found {words.dtype}: fetch the checkpoint again")
    data = words.contiguous().view(torch.uint8)
    if bits == 4:
        data = torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)
    return data[..., :count].contiguous()
