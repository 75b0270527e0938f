"""One layer's paged keys and values: in the activations' dtype, or int8 codes with scales (quant/kv_numerics.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from qtool.quant.kv_numerics import SCALE_DTYPE, from_codes, to_codes, token_scales

KVMode = Literal["float", "int8", "int8-static"]
"""In the activations' dtype; int8 with a scale per token and head; int8 with the artifact's own scales."""


@dataclass(frozen=True)
class KVCache:
    """Keys, then values, of one layer.

    Attributes:
        values: [num_blocks, block_size, 2 * num_kv_heads, head_dim], in the activations' dtype or int8.
        scales: of int8 values, [num_blocks, 2 * num_kv_heads, block_size] bfloat16, written with the values (a kernel
            reads those of one head at once); or static, float32, the same for every slot (strides of 0). None: the
            values are no codes.
    """

    values: Tensor
    scales: Tensor | None = None

    @property
    def static(self) -> bool:
        """The scales are fixed: writing a token leaves them as they are."""
        return self.scales is not None and self.scales.stride(2) == 0

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + (0 if self.scales is None or self.static else self.scales.nbytes)

    def write(self, kv: Tensor, slots: Tensor) -> Tensor:
        """Put keys and values [num_tokens, 2 * num_kv_heads, head_dim] into `slots` [num_tokens].

        Returns them as attention will read them from the cache: `kv` itself, or what is left of it after rounding.
        """
        if self.scales is None:
            _flat(self.values).index_copy_(0, slots, kv)
            return kv
        if self.static:
            scales = self.scales[:1, :, 0]  # [1, 2 * num_kv_heads]
        else:
            scales = token_scales(kv)
            self._put_scales(slots, scales)
        codes = to_codes(kv, scales)
        _flat(self.values).index_copy_(0, slots, codes)
        return from_codes(codes, scales, kv.dtype)

    def gather(self, block_ids: Tensor, rows: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values, each [rows, num_kv_heads, length, head_dim] in `dtype`, of whole blocks cut to `length`.

        `block_ids` is [rows * blocks per row].
        """
        kv = self.values.index_select(0, block_ids)
        if self.scales is not None:
            scales = self.scales[:1, :, :1] if self.static else self.scales.index_select(0, block_ids)
            kv = from_codes(kv, scales.transpose(1, 2), dtype)
        kv = kv.view(rows, -1, *kv.shape[2:])[:, :length].transpose(1, 2)
        heads = kv.shape[1] // 2
        return kv[:, :heads], kv[:, heads:]

    def erase(self, slots: Tensor) -> None:
        """Zero `slots`: NaN that was written there would spoil whoever gets the block next, masked or not."""
        _flat(self.values)[slots] = 0
        if self.scales is not None and not self.static:
            self._put_scales(slots, self.scales.new_zeros(len(slots), self.scales.shape[1]))

    def _put_scales(self, slots: Tensor, scales: Tensor) -> None:
        assert self.scales is not None
        size = self.values.shape[1]
        self.scales.transpose(1, 2)[slots // size, slots % size] = scales


def _flat(paged: Tensor) -> Tensor:
    return paged.view(-1, *paged.shape[2:])


def kv_bytes_per_token(heads: int, head_dim: int, dtype: torch.dtype, mode: KVMode) -> int:
    """Bytes of one token's keys and values, `heads` counting both, in one layer; scales included."""
    if mode == "float":
        return heads * head_dim * dtype.itemsize
    return heads * (head_dim + (SCALE_DTYPE.itemsize if mode == "int8" else 0))


def make_kv_cache(
    num_blocks: int,
    block_size: int,
    heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    mode: KVMode,
    device: torch.device,
    static_scales: Tensor | None = None,
) -> KVCache:
    """An empty cache of one layer; `heads` counts keys and values, `static_scales` [heads] are for `int8-static`."""
    slots = (num_blocks, block_size, heads)
    if mode == "float":
        return KVCache(_zeros((*slots, head_dim), dtype, device))
    codes = _zeros((*slots, head_dim), torch.int8, device)
    by_head = (num_blocks, heads, block_size)
    if mode == "int8":
        return KVCache(codes, _zeros(by_head, SCALE_DTYPE, device))
    assert static_scales is not None
    # rounded as the others are, so that a token is read back with the very scale that its codes were made with
    return KVCache(codes, static_scales.to(device, SCALE_DTYPE).float()[:, None].expand(by_head))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not garbage: masked slots are multiplied by zero, and NaN times zero is NaN.

    On a CPU they come from numpy, whose zeros take no memory until they are written.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
