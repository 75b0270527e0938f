"""Structure against what transformers itself builds for each family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.fingerprint import model_fingerprint
from qtool.quant.structure import SUPPORTED, fused_groups, linear_shapes, structure_of


def save_tiny(folder: Path, family: str, *, tied: bool = False, seed: int = 0) -> Path:
    config = AutoConfig.for_model(
        family,
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", SUPPORTED)
def test_linears_are_those_that_transformers_builds(tmp_path: Path, family: str) -> None:
    folder = save_tiny(tmp_path / "m", family)
    model = AutoModelForCausalLM.from_pretrained(folder)
    want = {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    with Checkpoint(folder) as checkpoint:
        shapes = linear_shapes(checkpoint)
        structure = structure_of(checkpoint.config)
    assert shapes == want
    assert sorted(name for group in fused_groups(structure) for name in group) == sorted(want)
    for attribute in (structure.embed, structure.norm, structure.head):
        assert model.get_submodule(attribute) is not None
    for group in structure.groups:
        model.get_submodule(f"{structure.block_name(1)}.{group.source}")
        model.get_submodule(f"{structure.block_name(1)}.{group.consumer}")


def test_more_blocks_than_tensors_are_refused_and_not_counted(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m", "llama")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 10**12}))
    with pytest.raises(QtoolError, match=r"num_hidden_layers 1000000000000, .* only 21 tensors"):
        Checkpoint(folder)


def test_unsupported_architecture_is_named() -> None:
    with pytest.raises(QtoolError, match=r"'mamba' is not supported.*llama, mistral, qwen2, qwen3"):
        structure_of({"model_type": "mamba"})
    with pytest.raises(QtoolError, match="num_hidden_layers is None"):
        structure_of({"model_type": "llama"})


def test_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with (
        Checkpoint(folder) as checkpoint,
        pytest.raises(QtoolError, match=r"gate_proj.weight has shape \(48, 32\), config.json says \(64, 32\)"),
    ):
        linear_shapes(checkpoint)


def test_fingerprint_follows_content_not_place(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "a", "llama")
    other = save_tiny(tmp_path / "b", "llama", seed=1)
    same = save_tiny(tmp_path / "c", "llama")

    def fingerprint(path: Path) -> str:
        with Checkpoint(path) as checkpoint:
            return model_fingerprint(checkpoint)

    assert fingerprint(folder) == fingerprint(same) != fingerprint(other)
    weights = load_file(same / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] += 1e-3
    save_file(weights, same / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(folder) != fingerprint(same)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_mixtures_of_experts_are_refused_by_name(family: str) -> None:
    config = json.loads(AutoConfig.for_model(family).to_json_string(use_diff=False))
    with pytest.raises(QtoolError, match=rf"architecture '{family}' \(a mixture of experts\) is not supported"):
        structure_of(config)
