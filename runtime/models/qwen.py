"""Qwen2, Qwen2.5 and Qwen3: Llama with biased q, k, v (2, 2.5) or normed queries and keys (3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qtool.quant.errors import QtoolError
from qtool.runtime.models.decoder import DecoderConfig
from qtool.runtime.models.llama import llama_config
from qtool.runtime.models.settings import flag, positive_int

KINDS = ("full_attention", "sliding_attention")


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """The window applies from layer `max_window_layers` on, or as `layer_types` lists it."""
    config = {"sliding_window": 4096, **config}
    if not flag(config, "use_sliding_window") or config["sliding_window"] is None:
        return (None,) * layers
    window = positive_int(config, "sliding_window")
    if kinds := config.get("layer_types"):
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in KINDS for kind in kinds):
            raise QtoolError(f"config.json: 'layer_types' must list {layers} times one of {', '.join(KINDS)}")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = config.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise QtoolError(f"config.json: 'max_window_layers' must be an integer, got {first!r}")
    return tuple(window if i >= first else None for i in range(layers))


def qwen2_config(config: Mapping[str, Any]) -> DecoderConfig:
    base = llama_config(config)
    return replace(base, windows=_windows(config, base.num_layers), qkv_bias=True, o_bias=False, mlp_bias=False)


def qwen3_config(config: Mapping[str, Any]) -> DecoderConfig:
    base = llama_config({"head_dim": 128, **config})
    return replace(base, windows=_windows(config, base.num_layers), mlp_bias=False, qk_norm=True)
