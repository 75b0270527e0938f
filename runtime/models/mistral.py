"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qtool.runtime.models.decoder import DecoderConfig
from qtool.runtime.models.llama import llama_config
from qtool.runtime.models.settings import positive_int


def mistral_config(config: Mapping[str, Any]) -> DecoderConfig:
    base = llama_config(config)
    config = {"sliding_window": 4096, **config}
    window = None if config["sliding_window"] is None else positive_int(config, "sliding_window")
    return replace(base, windows=(window,) * base.num_layers, qkv_bias=False, o_bias=False, mlp_bias=False)
