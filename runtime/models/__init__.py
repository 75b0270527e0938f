"""Decoder families. A new one is a function config.json → DecoderConfig, and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from qtool.quant.errors import QtoolError
from qtool.runtime.models.decoder import DecoderConfig
from qtool.runtime.models.llama import llama_config
from qtool.runtime.models.mistral import mistral_config
from qtool.runtime.models.qwen import qwen2_config, qwen3_config
from qtool.runtime.models.rope import check_rope

FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], DecoderConfig]] = {
    "llama": llama_config,
    "mistral": mistral_config,
    "qwen2": qwen2_config,
    "qwen3": qwen3_config,
}


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """config.json → DecoderConfig. Raises QtoolError for a family, a setting or a rope scaling not supported."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise QtoolError(
            f"config.json: model_type {family!r} is not supported by the runtime (supported: {', '.join(FAMILIES)})"
        )
    check_rope(config)
    found = FAMILIES[family](config)
    if found.num_heads % found.num_kv_heads:
        raise QtoolError(
            f"config.json: {found.num_heads} attention heads cannot share {found.num_kv_heads} key-value heads evenly"
        )
    if found.head_dim % 2:
        raise QtoolError(f"config.json: the head size must be even for rotary positions, got {found.head_dim}")
    return found
