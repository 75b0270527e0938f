"""Rotary position embedding: inverse frequencies under every scaling that the supported families use.

RoPE: Su et al. 2021 (arXiv 2104.09864). Linear: Chen et al. 2023 (arXiv 2306.15595). Dynamic NTK: public proposals by
bloc97 and emozilla. YaRN: Peng et al. 2023 (arXiv 2309.00071). llama3: Llama 3.1 release. Conventions are those of
transformers (`modeling_rope_utils.py`), so that a config means the same in both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qtool.quant.errors import QtoolError
from qtool.runtime.models.settings import positive_number

SUPPORTED = ("default", "linear", "dynamic", "llama3", "yarn")
YARN_OPTIONS = (
    "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
)  # fmt: skip


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope settings of a config.json, old style (`rope_theta`, `rope_scaling`) or new (`rope_parameters`)."""
    merged = {"rope_theta": config.get("rope_theta", 10000.0), "rope_type": "default"}
    for name in ("rope_scaling", "rope_parameters"):
        settings = config.get(name) or {}
        if not isinstance(settings, Mapping):
            raise QtoolError(f"config.json: {name!r} must be an object, got {settings!r}")
        merged |= settings
    if "type" in merged and "rope_type" not in (config.get("rope_scaling") or {}):
        merged["rope_type"] = merged["type"]
    return merged


def check_rope(config: Mapping[str, Any]) -> None:
    """Raise QtoolError for a rope scaling that is not supported, or that lacks a setting."""
    rope = rope_parameters(config)
    kind = rope["rope_type"]
    if kind not in SUPPORTED:
        raise QtoolError(f"config.json: rope type {kind!r} is not supported (supported: {', '.join(SUPPORTED)})")
    needs = {
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("factor",),
    }.get(kind, ())
    if missing := [n for n in needs if n not in rope]:
        raise QtoolError(f"config.json: rope type {kind!r} needs {missing[0]!r} in its rope settings")
    for name in ("rope_theta", *needs):
        positive_number(rope, name)
    for name in YARN_OPTIONS if kind == "yarn" else ():
        positive_number(rope, name, default=1.0)
    if kind in ("dynamic", "yarn") and rope["rope_theta"] <= 1:
        raise QtoolError(f"config.json: rope type {kind!r} needs a rope_theta above 1, got {rope['rope_theta']}")
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise QtoolError("config.json: rope type 'llama3' needs a low_freq_factor below its high_freq_factor")


def inverse_frequencies(config: Mapping[str, Any], head_dim: int, length: int) -> tuple[Tensor, float]:
    """([head_dim / 2] float32, attention factor by which cos and sin are multiplied) for contexts up to `length`.

    `length` matters for dynamic NTK alone, whose base grows with the longest context in use; here it is the engine's
    own limit, fixed for all requests, so that a token's key never depends on what else is running.
    """
    rope = rope_parameters(config)
    kind, base = rope["rope_type"], float(rope["rope_theta"])
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    trained = int(config["max_position_embeddings"])
    if kind == "dynamic":
        stretch = rope["factor"] * max(length, trained) / trained - (rope["factor"] - 1)
        base *= stretch ** (head_dim / (head_dim - 2))
    inverse = torch.pow(base, steps).reciprocal()
    if kind == "linear":
        return inverse / float(rope["factor"]), 1.0
    if kind == "llama3":
        return _llama3(inverse, rope), 1.0
    if kind == "yarn":
        return _yarn(inverse, rope, base, head_dim, trained)
    return inverse, 1.0


def _llama3(inverse: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended linearly."""
    low, high, factor = (float(rope[n]) for n in ("low_freq_factor", "high_freq_factor", "factor"))
    turns = inverse * float(rope["original_max_position_embeddings"]) / (2 * math.pi)  # over the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * inverse + (1 - keep) * inverse / factor


def _yarn(inverse: Tensor, rope: Mapping[str, Any], base: float, head_dim: int, trained: int) -> tuple[Tensor, float]:
    """Dimensions that turn often keep their frequency, those that turn seldom are interpolated; a ramp between."""
    original = rope.get("original_max_position_embeddings") or trained
    factor = rope.get("factor") or trained / original

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = dimension_of(rope.get("beta_fast") or 32)
    high = dimension_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    interpolate = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    scaled = inverse / factor * interpolate + inverse * (1 - interpolate)

    def magnitude(scale: float, mscale: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0

    attention = rope.get("attention_factor")
    if attention is None:
        mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = magnitude(factor, mscale) / magnitude(factor, all_dim) if mscale and all_dim else magnitude(factor)
    return scaled, float(attention)


_POSITIONS_AT_ONCE = 1 << 16  # in float32


def rotation_table(
    config: Mapping[str, Any], head_dim: int, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and signed sin of every position: two [length, head_dim] tensors in `dtype`.

    rotate(x) = x * cos + roll(x, head_dim / 2) * sin, the first half of `sin` being negated; halves as in Llama.
    """
    inverse, factor = inverse_frequencies(config, head_dim, length)
    cos, sin = torch.empty(2, length, head_dim, dtype=dtype, device=device)
    for first in range(0, length, _POSITIONS_AT_ONCE):
        rows = slice(first, min(first + _POSITIONS_AT_ONCE, length))
        angles = torch.outer(torch.arange(rows.start, rows.stop, dtype=torch.float32), inverse)  # [.., head_dim / 2]
        c, s = angles.cos() * factor, angles.sin() * factor
        cos[rows] = torch.cat((c, c), dim=1).to(device, dtype)
        sin[rows] = torch.cat((-s, s), dim=1).to(device, dtype)
    return cos, sin
