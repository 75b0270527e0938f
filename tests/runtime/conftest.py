"""Tiny random models of every family, saved as Hugging Face folders with a byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

TinyModel = Callable[..., Path]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte (ids 1 to 256), id 0 being the end of a sequence."""
    vocab = {"<eos>": 0} | {c: i + 1 for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """tiny_model(model_type, **config) → folder of a random float32 model; the same arguments give the same folder."""
    made: dict[str, Path] = {}

    def make(model_type: str = "llama", **changes: Any) -> Path:
        key = repr((model_type, sorted(changes.items(), key=lambda kv: kv[0])))
        if key not in made:
            settings = {
                "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
                "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "eos_token_id": 0, "bos_token_id": None,
                "pad_token_id": None, "initializer_range": 0.15,
            } | changes  # fmt: skip
            torch.manual_seed(11)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings), dtype=torch.float32)
            with torch.no_grad():  # norms and biases start at ones and zeros: make them matter
                for name, weight in model.named_parameters():
                    if weight.ndim == 1:
                        weight.add_(torch.randn_like(weight) * 0.1)
                    assert weight.isfinite().all(), name
            folder = tmp_path_factory.mktemp(model_type)
            model.save_pretrained(folder)
            byte_tokenizer().save_pretrained(folder)
            made[key] = folder
        return made[key]

    return make
