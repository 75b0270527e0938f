"""Activations to 8 bits at run time, one scale a token, as compressed-tensors does it for W8A8 checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

_HALF_RANGE = 127.5  # codes span -128 .. 127


def quantize_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] → int8 codes [M, K] and float32 scales [M, 1]: x ≈ codes · scale, scale = max |x| / 127.5."""
    values = x.float()
    # a token of zeros has scale 0, which no code may be divided by
    scale = (values.abs().amax(dim=1, keepdim=True) / _HALF_RANGE).clamp_min(torch.finfo(torch.float32).tiny)
    return (values / scale).round_().clamp_(-128, 127).to(torch.int8), scale
