"""The methods with several stages on a tiny model: closer to it than GPTQ, the same every time, stored exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from qtool.quant.artifact import RUN_RECORD
from qtool.quant.blockwise import Settings, quantize_block
from qtool.quant.calibration import BlockWalker, CalibrationSet
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.formats import open_reader
from qtool.quant.method import parse_method
from qtool.quant.pipeline import quantize
from qtool.quant.scheme import QuantScheme
from qtool.quant.structure import linear_shapes

TOKENS = torch.randint(0, 128, (16, 32), generator=torch.Generator().manual_seed(0))
CALIBRATION = CalibrationSet(TOKENS, "random tokens", "1" * 64)
SCHEME = QuantScheme(4, 32, symmetric=False)


def run(source: Path, out: Path, method: str, *, memory: int | None = None) -> Any:
    return quantize(source, out, scheme=SCHEME, method=method, calibration=CALIBRATION, activation_memory=memory)


def logit_error(source: Path, artifact: Path) -> float:
    """Distance of the artifact's logits from the model's on the calibration tokens."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        base = model(TOKENS).logits
    with Checkpoint(artifact) as checkpoint:
        reader = open_reader(checkpoint)
        assert reader is not None
        state = {n: checkpoint.tensor(n).float() for n in model.state_dict() if n in checkpoint}
        state |= {f"{layer}.weight": reader.read(layer).dequantize() for layer in linear_shapes(checkpoint)}
    model.load_state_dict(state, strict=False)
    with torch.no_grad():
        return float((model(TOKENS).logits - base).norm())


def test_stages_add_up(tiny_llama: Path, tmp_path: Path) -> None:
    errors = {}
    for method in ("awq", "gptq", "awq+gptq", "rounding", "awq+rounding"):
        report = run(tiny_llama, tmp_path / method, method)
        errors[method] = logit_error(tiny_llama, tmp_path / method)
        records = report.layers.values()
        stages = parse_method(method)
        assert any(r.awq_ratio is not None for r in records) == (stages.scale == "awq")
        assert all((r.damping is not None) == stages.compensate for r in records)
        assert all((r.block_loss_ratio is not None) == stages.search for r in records)
        if stages.search:
            assert all(0 < r.block_loss_ratio < 1 for r in records)
            assert any(r.changed_codes > 0 for r in records)
    assert errors["rounding"] < 0.95 * errors["gptq"]
    assert errors["awq+rounding"] < 0.95 * errors["awq+gptq"]
    assert errors["awq+gptq"] < errors["awq"]


def test_the_same_run_gives_the_same_bytes_and_its_record(tiny_llama: Path, tmp_path: Path) -> None:
    for name, memory in (("a", None), ("b", 0)):  # what is held aside in memory, or on disk
        run(tiny_llama, tmp_path / name, "awq+rounding", memory=memory)
    for path in sorted((tmp_path / "a").iterdir()):
        if path.name != RUN_RECORD:  # times
            assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    record = json.loads((tmp_path / "a" / "qtool.json").read_text())
    assert record["method"] == "awq+rounding"
    assert record["search"]["iters"] == 50


def test_what_is_stored_is_what_was_searched(tiny_llama: Path, tmp_path: Path) -> None:
    run(tiny_llama, tmp_path / "out", "rounding")
    chosen = Settings(method="rounding", grid="mse", scale_dtype=torch.bfloat16, head_dim=16)
    with Checkpoint(tiny_llama) as source, Checkpoint(tmp_path / "out") as artifact:
        walker = BlockWalker(source, TOKENS)
        block = next(iter(walker))
        with torch.no_grad():
            targets = [block.run(states) for states in block.inputs]
        result = quantize_block(block, walker.structure, dict.fromkeys(block.linears, SCHEME), chosen, targets)
        reader = open_reader(artifact)
        assert reader is not None
        for name, weight in result.weights.items():
            assert torch.equal(reader.read(name).dequantize(), weight.dequantize())
            assert torch.equal(block.linears[name].weight.data, weight.dequantize())


def test_wrong_arguments_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(QtoolError, match=r"method 'gptq\+awq': awq comes before gptq"):
        run(tiny_llama, tmp_path / "out", "gptq+awq")
    with pytest.raises(QtoolError, match="0 iterations of the rounding search"):
        quantize(tiny_llama, tmp_path / "out", scheme=SCHEME, method="rounding", iters=0)
