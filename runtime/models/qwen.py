"""Qwen2, Qwen2.5 and Qwen3: Llama with biased q, k, v (2, 2.5) or normed queries and keys (3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qtool.runtime.models.decoder import DecoderConfig
from qtool.runtime.models.llama import llama_config


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """The window applies from layer `max_window_layers` on, or as `layer_types` lists it."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    if window is None:
        return (None,) * layers
    if kinds := config.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = int(config.get("max_window_layers", 28))
    return tuple(window if i >= first else None for i in range(layers))


def qwen2_config(config: Mapping[str, Any]) -> DecoderConfig:
    base = llama_config(config)
    return replace(base, windows=_windows(config, base.num_layers), qkv_bias=True, o_bias=False, mlp_bias=False)


def qwen3_config(config: Mapping[str, Any]) -> DecoderConfig:
    base = llama_config({"head_dim": 128, **config})
    return replace(base, windows=_windows(config, base.num_layers), mlp_bias=False, qk_norm=True)
