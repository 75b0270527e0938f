"""Numbers as PTX rounds them, in numpy."""

from __future__ import annotations

import numpy as np

from ptx.memory import Words


def bf16_bits(x: Words) -> Words:
    """float32 or float64 to the nearest bfloat16, ties to even: uint16."""
    x = np.asarray(x)
    single = x.astype(np.float32)
    bits = single.view(np.uint32).copy()
    if x.dtype == np.float64:  # to odd first, or a value would be rounded twice
        back = single.astype(np.float64)
        even = (bits & 1) == 0
        away, toward = np.abs(back) > np.abs(x), np.abs(back) < np.abs(x)
        bits = np.where(even & away, bits - 1, np.where(even & toward, bits + 1, bits)).astype(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(single), np.uint16(0x7FFF), rounded)


def bf16_values(bits: Words) -> Words:
    """uint16 as bfloat16: float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def halves(words: Words) -> Words:
    """uint32 [...] to uint16 [..., 2], the low half first."""
    return np.ascontiguousarray(words).view(np.uint16).reshape(*words.shape, 2)


def joined(pairs: Words) -> Words:
    """uint16 [..., 2] to uint32 [...]."""
    return np.ascontiguousarray(pairs).view(np.uint32)[..., 0]


def values(bits: Words, kind: str) -> Words:
    """uint16 as `f16` or `bf16`: float64."""
    return (bits.view(np.float16) if kind == "f16" else bf16_values(bits)).astype(np.float64)


def rounded(x: Words, kind: str) -> Words:
    """float32 or float64 to the nearest `f16` or `bf16`: uint16."""
    return np.asarray(x).astype(np.float16).view(np.uint16) if kind == "f16" else bf16_bits(x)
