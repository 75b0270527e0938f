"""Llama 2 and 3.x, SmolLM2; and what the other families share with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qtool.quant.errors import QtoolError
from qtool.runtime.models.decoder import DecoderConfig


def llama_config(config: Mapping[str, Any]) -> DecoderConfig:
    """config.json of a Llama → DecoderConfig. Raises QtoolError for a setting that is missing or not supported."""
    try:
        heads = int(config["num_attention_heads"])
        layers = int(config["num_hidden_layers"])
        if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise QtoolError(f"config.json: hidden_act {act!r} is not supported (supported: silu)")
        return DecoderConfig(
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            rms_norm_eps=float(config["rms_norm_eps"]),
            max_position_embeddings=int(config["max_position_embeddings"]),
            tied_head=bool(config.get("tie_word_embeddings", False)),
            windows=(None,) * layers,
            qkv_bias=bool(config.get("attention_bias", False)),
            o_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
        )
    except KeyError as error:
        raise QtoolError(f"config.json: {error.args[0]!r} is missing") from None
