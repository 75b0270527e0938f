"""Keys and values as symmetric int8 codes: value = code * scale, codes from -127 to 127.

A scale belongs to a head: a token's own (dynamic; the grid of vLLM's `int8_per_token_head`), or the same for all tokens
(static, from calibration).
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_CODE = 127
# As wide in range as float32; its rounding moves a code of 127 by a quarter, which rounding to codes absorbs.
SCALE_DTYPE = torch.bfloat16


def token_scales(kv: Tensor) -> Tensor:
    """Vectors [..., head_dim] → a scale for each, [...], so that the largest magnitude becomes the largest code."""
    largest = kv.abs().amax(dim=-1).float()
    return (largest / MAX_CODE).to(SCALE_DTYPE).clamp_min_(torch.finfo(SCALE_DTYPE).tiny)


def to_codes(kv: Tensor, scales: Tensor) -> Tensor:
    """[..., head_dim] by scales that broadcast to [...] → int8 codes; what lies beyond the codes is clipped."""
    # in float32: a bfloat16 quotient near 127 is off by a quarter before it is rounded
    return (kv.float() / scales.float()[..., None]).round_().clamp_(-MAX_CODE, MAX_CODE).to(torch.int8)


def from_codes(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes [..., head_dim] by scales that broadcast to [...] → values in `dtype`."""
    return codes.to(dtype).mul_(scales.to(dtype)[..., None])
