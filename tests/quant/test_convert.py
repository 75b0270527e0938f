"""Conversions between formats: every dequantized weight stays what it was, and what cannot stay is refused by name."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from qtool.quant.calibration import CalibrationSet
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.convert import convert
from qtool.quant.errors import QtoolError
from qtool.quant.formats import FormatName, open_reader
from qtool.quant.pipeline import quantize
from qtool.quant.scheme import QuantPlan, QuantScheme
from qtool.quant.structure import linear_shapes

FORMATS: tuple[FormatName, ...] = ("compressed-tensors", "gptq", "awq")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Layer → dequantized weight, as our readers see it; 16-bit tensors by their own names."""
    found: dict[str, torch.Tensor] = {}
    with Checkpoint(folder) as checkpoint:
        reader = open_reader(checkpoint)
        assert reader is not None
        for layer in linear_shapes(checkpoint):
            found[layer] = (
                reader.read(layer).dequantize() if reader.scheme(layer) else checkpoint.tensor(f"{layer}.weight")
            )
        found |= {n: checkpoint.tensor(n) for n in checkpoint.names() if "norm" in n or "embed" in n or "lm_head" in n}
    return found


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@pytest.fixture(scope="module")
def model(tiny_model: Any) -> Path:
    return tiny_model("llama", hidden_size=64, intermediate_size=128)


@pytest.mark.parametrize(("source", "target"), list(permutations(FORMATS, 2)))
@pytest.mark.parametrize("symmetric", [True, False])
def test_there_and_back(model: Path, tmp_path: Path, source: FormatName, target: FormatName, symmetric: bool) -> None:
    first, second, third = (tmp_path / n for n in ("first", "second", "third"))
    quantize(model, first, scheme=QuantScheme(4, 32, symmetric), method="rtn", grid="signed", format=source)
    report = convert(first, second, format=target)
    assert (report.source_format, report.format) == (source, target)
    assert same(weights(first), weights(second))
    convert(second, third, format=source)
    assert same(weights(first), weights(third))
    record = json.loads((second / "qtool.json").read_text())
    assert record["method"] == "rtn"
    assert record["converted_from"]["format"] == source


def test_symmetric_layers_among_asymmetric_ones_get_their_zero_points(model: Path, tmp_path: Path) -> None:
    with Checkpoint(model) as checkpoint:
        shapes = linear_shapes(checkpoint)
    plan = QuantPlan({n: QuantScheme(4, 32, "o_proj" in n) for n in shapes})
    mixed, uniform = tmp_path / "mixed", tmp_path / "uniform"
    quantize(model, mixed, plan=plan, method="rtn")
    convert(mixed, uniform, format="awq")
    assert same(weights(mixed), weights(uniform))


def test_what_a_format_cannot_hold_is_refused(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(QtoolError, match="is a 16-bit model"):
        convert(model, out, format="gptq")
    eight = tmp_path / "eight"
    quantize(model, eight, scheme=QuantScheme(8), method="rtn")
    with pytest.raises(QtoolError, match=r"layer model\.layers\.0.*awq format stores 4-bit"):
        convert(eight, out, format="awq")
    with Checkpoint(model) as checkpoint:
        names = list(linear_shapes(checkpoint))
    mixed = tmp_path / "mixed"
    some = QuantPlan({n: None if "down_proj" in n else QuantScheme(4, 32) for n in names})
    quantize(model, mixed, plan=some, method="rtn")
    with pytest.raises(QtoolError, match="one bit width and group size"):
        convert(mixed, out, format="gptq")
    with pytest.raises(QtoolError, match="unknown format 'gguf'"):
        convert(eight, out, format="gguf")  # type: ignore[arg-type]
    with pytest.raises(QtoolError, match="exists already"):
        convert(eight, mixed, format="gptq")
    assert not out.exists()


def test_a_quantized_head_goes_over_or_is_refused(model: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    quantize(model, source, scheme=QuantScheme(4, 32), head=QuantScheme(8), method="rtn")
    with pytest.raises(QtoolError, match=r"quantized head \(lm_head\) is not written in the gptq format"):
        convert(source, out, format="gptq")
    convert(source, out, format="compressed-tensors")
    assert (out / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, out)]
    assert configs[0] == configs[1]


def test_an_int8_kv_cache_goes_over_or_is_refused(model: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    tokens = torch.randint(1, 300, (2, 32), generator=torch.Generator().manual_seed(0))
    data = CalibrationSet(tokens, "random", "8" * 64)
    quantize(model, source, scheme=QuantScheme(4, 32), method="rtn", kv_cache="int8", calibration=data)
    with pytest.raises(QtoolError, match="the awq format cannot say that the KV cache is int8"):
        convert(source, out, format="awq")
    convert(source, out, format="compressed-tensors")
    assert (out / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, out)]
    assert configs[0] == configs[1]


FIXTURES = [
    ("gptqmodel-w4g64-asym", "gptq"),  # version 1 → 2
    ("gptqmodel-w4g64-asym", "compressed-tensors"),
    ("gptqmodel-w4g64-asym-v2", "awq"),
    ("autogptq-w4g64-asym-descact", "gptq"),
    ("autoawq-w4g64-gemm", "compressed-tensors"),
    ("gptqmodel-awq-w4g64", "gptq"),
    ("llmcompressor-w4a16-g64-asym-gptq", "awq"),
    ("llmcompressor-w8a16-g128-sym-gptq", "gptq"),
]


@pytest.mark.parametrize(("name", "target"), FIXTURES)
def test_peers_checkpoints(shared: Path, tmp_path: Path, name: str, target: FormatName) -> None:
    source = shared / "fixtures" / name
    convert(source, tmp_path / "out", format=target)
    assert same(weights(source), weights(tmp_path / "out"))


def test_act_order_stays_in_gptq(shared: Path, tmp_path: Path) -> None:
    source = shared / "fixtures" / "autogptq-w4g64-asym-descact"
    with pytest.raises(QtoolError, match=r"layer model\.layers\.0.*g_idx"):
        convert(source, tmp_path / "out", format="awq")
    assert not (tmp_path / "out").exists()
    convert(source, tmp_path / "gptq", format="gptq")
    config = json.loads((tmp_path / "gptq" / "config.json").read_text())["quantization_config"]
    assert config["desc_act"] is True
    assert config["checkpoint_format"] == "gptq_v2"
    with safe_open(tmp_path / "gptq" / "model.safetensors", "pt") as file:
        g_idx = file.get_tensor("model.layers.0.self_attn.q_proj.g_idx")
    assert not torch.equal(g_idx, torch.arange(len(g_idx), dtype=torch.int32) // 64)
