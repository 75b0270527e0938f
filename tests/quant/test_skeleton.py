"""A checkpoint that is not what its config says is refused in one line, before work begins."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qtool.quant.calibration import BlockWalker, CalibrationSet
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.documents import load_tokenizer
from qtool.quant.errors import QtoolError
from qtool.quant.pipeline import quantize
from qtool.quant.scheme import QuantScheme
from qtool.quant.skeleton import check_tensors

DOWN, NORM = "model.layers.1.mlp.down_proj.weight", "model.layers.1.input_layernorm.weight"
TOKENS = torch.randint(1, 300, (2, 16), generator=torch.Generator().manual_seed(0))
CALIBRATION = CalibrationSet(TOKENS, "random tokens", "7" * 64)
Tensors = dict[str, Tensor]


def changed(source: Path, target: Path, change: Callable[[Tensors], Any], **config: Any) -> Path:
    """A copy of a model folder with other tensors, and other fields of its config."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    document = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(document | config))
    return target


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(DOWN), f"1 tensors that config.json asks for are missing, first {DOWN}"),
        (lambda t: t.pop(NORM), f"first {NORM}"),
        (lambda t: t.pop("model.norm.weight"), r"first model\.norm\.weight"),
        (lambda t: t.pop("lm_head.weight"), r"first lm_head\.weight"),
        (lambda t: t.update({NORM: torch.ones(65)}), rf"{NORM} has shape \(65,\), config.json says \(64,\)"),
        (lambda t: t.update({DOWN: torch.ones(64, 128, dtype=torch.int32)}), f"{DOWN} is int32"),
        (lambda t: t.update({DOWN: torch.ones(64, 128).to(torch.float8_e4m3fn)}), f"{DOWN} is float8_e4m3fn"),
    ],
)
def test_tensors_that_are_missing_or_others(
    tiny_model: Any, tmp_path: Path, change: Callable[[Tensors], Any], says: str, method: str
) -> None:
    folder = changed(tiny_model("llama"), tmp_path / "model", change)
    with pytest.raises(QtoolError, match=says):
        quantize(folder, tmp_path / "out", scheme=QuantScheme(4, 32), method=method, calibration=CALIBRATION)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"attention_bias": True}, r"8 tensors .* first model\.layers\.0\.self_attn\.q_proj\.bias"),
        ({"hidden_act": "nosuch"}, r"config\.json: transformers makes no model of it \(KeyError: 'nosuch'\)"),
        ({"rms_norm_eps": "x"}, "transformers makes no model of it .*rms_norm_eps"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads is '2', expected a positive integer"),
        ({"head_dim": 0}, "head_dim is 0, expected a positive integer"),
    ],
)
def test_a_config_that_is_none(tiny_model: Any, tmp_path: Path, config: dict[str, Any], says: str) -> None:
    folder = changed(tiny_model("llama"), tmp_path / "model", lambda tensors: None, **config)
    with pytest.raises(QtoolError, match=says):
        quantize(folder, tmp_path / "out", scheme=QuantScheme(4, 32), method="rtn")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_whole_models_pass(tiny_model: Any, family: str, tied: bool) -> None:
    with Checkpoint(tiny_model(family, tie_word_embeddings=tied)) as checkpoint:
        check_tensors(checkpoint)


def test_a_token_without_an_embedding(tiny_model: Any) -> None:
    with (
        Checkpoint(tiny_model("llama")) as checkpoint,
        pytest.raises(QtoolError, match="gives token 320, and the embedding has 320 rows"),
    ):
        BlockWalker(checkpoint, torch.tensor([[1, 320]]))


@pytest.mark.parametrize("seed", [-1, 1 << 63])
def test_a_seed_that_is_none(tiny_model: Any, tmp_path: Path, seed: int) -> None:
    with pytest.raises(QtoolError, match=f"seed {seed} is not from 0"):
        quantize(tiny_model("llama"), tmp_path / "out", scheme=QuantScheme(4, 32), method="rotation+rtn", seed=seed)


@pytest.mark.parametrize("content", ['{"version": "1.0"', "{}", "[]"])
def test_a_damaged_tokenizer(tiny_model: Any, tmp_path: Path, content: str) -> None:
    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(QtoolError, match="no tokenizer that loads"):
        load_tokenizer(folder)
