"""Every family against transformers on tiny random weights: logits and greedy tokens; whole, chunked, decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from qtool.quant.errors import QtoolError
from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.llm import LLM
from qtool.runtime.models import decoder_config
from qtool.runtime.models.rope import rotation_table

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
                                   "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
                                   "original_max_position_embeddings": 64}}),
    ("mistral", {"sliding_window": 24}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    ("qwen3", {"head_dim": 32}),
]  # fmt: skip


def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def random_ids(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(1, 320, (length,), generator=generator).tolist()
    return ids


@pytest.mark.parametrize(("family", "settings"), FAMILIES, ids=lambda v: v if isinstance(v, str) else "")
def test_logits_and_tokens_agree_with_transformers(tiny_model: Any, family: str, settings: dict[str, Any]) -> None:
    folder = tiny_model(family, **settings)
    model = reference(folder)
    prompts = [random_ids(n, seed=n) for n in (1, 7, 40, 65, 90)]
    with torch.no_grad():
        wanted_logits = [model(torch.tensor([p])).logits[0] for p in prompts]
        wanted = [
            model.generate(torch.tensor([p]), max_new_tokens=20, do_sample=False, eos_token_id=None)[0].tolist()
            for p in prompts
        ]
    greedy = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    for budget in (512, 16):  # whole prompts, and chunks of at most 16 tokens mixed with decodes
        llm = LLM(folder, device="cpu", max_num_batched_tokens=budget, max_num_seqs=8)
        for got, want in zip(llm.prompt_logits(prompts), wanted_logits, strict=True):
            assert (got - want).abs().max() < 1e-4
        outputs = llm.generate(prompts, greedy)
        assert [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs] == wanted


def test_a_rotation_turns_by_its_position_wherever_it_stands() -> None:
    """A long table is made piece by piece: [cos, cos] and [-sin, sin] of position x base^(-2i/dim)."""
    length, dim = 140_000, 8
    config = {"max_position_embeddings": length, "rope_theta": 100.0}
    cos, sin = rotation_table(config, dim, length, torch.float32, torch.device("cpu"))
    assert cos.shape == sin.shape == (length, dim)
    for position in (0, 1, 65_535, 65_536, 131_072, length - 1):
        angles = position * 100.0 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        tolerance = 1e-6 + position * 2e-7  # float32 frequencies and angles
        assert (cos[position] - torch.cat((angles.cos(), angles.cos()))).abs().max() < tolerance
        assert (sin[position] - torch.cat((-angles.sin(), angles.sin()))).abs().max() < tolerance


def test_an_unknown_family_is_refused_by_name() -> None:
    with pytest.raises(QtoolError, match=r"'mamba' is not supported.*llama"):
        decoder_config({"model_type": "mamba"})


def test_an_unknown_rope_scaling_is_refused() -> None:
    with pytest.raises(QtoolError, match="'longrope' is not supported"):
        decoder_config({"model_type": "llama", "rope_scaling": {"rope_type": "longrope"}})


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(QtoolError, match="'num_attention_heads' is missing"):
        decoder_config({"model_type": "llama"})


LLAMA = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip
ROPE_LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 1,
               "original_max_position_embeddings": 64}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_attention_heads": "4"}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "4 attention heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_hidden_layers": [2]}, "num_hidden_layers"),
        ({"hidden_size": float("inf")}, "hidden_size"),
        ({"head_dim": 15}, "even"),
        ({"head_dim": 0}, "head_dim"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_scaling": ["linear"]}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "4"}}, "factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4, "beta_fast": 0}}, "beta_fast"),
        ({"rope_parameters": ROPE_LLAMA3}, "low_freq_factor"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": -3}, "sliding_window"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["linear_attention"] * 2}, "layer_types"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": "1"}, "max_window_layers"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_settings_that_cannot_be_meant_are_named(changes: dict[str, Any], named: str) -> None:
    assert decoder_config(LLAMA).head_dim == 16
    with pytest.raises(QtoolError, match=rf"^config\.json: .*{named}"):
        decoder_config(LLAMA | changes)
