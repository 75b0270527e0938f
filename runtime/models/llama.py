"""Llama 2 and 3.x, SmolLM2; and what the other families share with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qtool.quant.errors import QtoolError
from qtool.runtime.models.decoder import DecoderConfig
from qtool.runtime.models.settings import flag, positive_int, positive_number


def llama_config(config: Mapping[str, Any]) -> DecoderConfig:
    """config.json of a Llama → DecoderConfig. Raises QtoolError for a setting that is missing or not supported."""
    heads = positive_int(config, "num_attention_heads")
    hidden = positive_int(config, "hidden_size")
    layers = positive_int(config, "num_hidden_layers")
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise QtoolError(f"config.json: hidden_act {act!r} is not supported (supported: silu)")
    return DecoderConfig(
        vocab_size=positive_int(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive_int(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=positive_int(config, "num_key_value_heads", heads),
        head_dim=positive_int(config, "head_dim", hidden // heads),
        rms_norm_eps=positive_number(config, "rms_norm_eps"),
        max_position_embeddings=positive_int(config, "max_position_embeddings"),
        tied_head=flag(config, "tie_word_embeddings"),
        windows=(None,) * layers,
        qkv_bias=flag(config, "attention_bias"),
        o_bias=flag(config, "attention_bias"),
        mlp_bias=flag(config, "mlp_bias"),
    )
