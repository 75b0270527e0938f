"""Quantizing on a GPU against the same on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qtool.quant.algorithms.gptq import gptq
from qtool.quant.algorithms.hessian import Hessian, invert
from qtool.quant.calibration import CalibrationSet
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.formats import open_reader
from qtool.quant.numerics import find_grid
from qtool.quant.pipeline import quantize
from qtool.quant.scheme import QuantScheme
from qtool.quant.structure import linear_shapes

pytestmark = pytest.mark.gpu

CALIBRATION = CalibrationSet(
    torch.randint(0, 128, (16, 48), generator=torch.Generator().manual_seed(0)), "random tokens", "0" * 64
)


def values(folder: Path) -> dict[str, torch.Tensor]:
    """Dequantized weights: of a zero point that may round either way codes differ, and values do not."""
    with Checkpoint(folder) as checkpoint:
        reader = open_reader(checkpoint)
        assert reader is not None
        return {name: reader.read(name).dequantize() for name in linear_shapes(checkpoint)}


@pytest.mark.parametrize("name", ["w4g32", "w4g32-asym"])
@pytest.mark.parametrize("method", ["rtn", "gptq", "awq", "awq+gptq", "rounding"])
def test_errors_are_those_of_the_cpu(tiny_llama: Path, tmp_path: Path, method: str, name: str) -> None:
    """A bf16 model: on the GPU the walk multiplies in bf16, on the CPU in float32."""
    reports = {}
    for device in ("cpu", "cuda"):
        reports[device] = quantize(
            tiny_llama,
            tmp_path / device,
            scheme=QuantScheme.parse(name),
            method=method,
            calibration=CALIBRATION,
            device=device,
        )
    for layer, want in reports["cpu"].layers.items():
        got = reports["cuda"].layers[layer]
        if "awq" not in method:  # near-equal ratios may change places, and other weights are then rounded
            assert got.rtn_error == pytest.approx(want.rtn_error, rel=0.05), layer
            assert got.relative_error == pytest.approx(want.relative_error, rel=0.15), layer
    mean = {d: sum(r.relative_error for r in report.layers.values()) for d, report in reports.items()}
    assert mean["cuda"] == pytest.approx(mean["cpu"], rel=0.05)
    if method == "rtn":
        found = values(tmp_path / "cuda")
        for layer, wanted in values(tmp_path / "cpu").items():
            assert share_equal(found[layer], wanted) > 0.99, layer


def share_equal(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Share of values that are the same but for the last bit of a bfloat16 scale (a GPU divides by constants through
    their reciprocals).
    """
    return float(torch.isclose(found, wanted, rtol=0.01, atol=0.0).float().mean())


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_weights_of_a_float32_model_are_those_of_the_cpu(tiny_model: Any, tmp_path: Path, method: str) -> None:
    """All in float32: weights differ where a sum's last bits tip a tie, and in what follows from it."""
    for device in ("cpu", "cuda"):
        quantize(
            tiny_model(),
            tmp_path / device,
            scheme=QuantScheme(4, 32),
            method=method,
            calibration=CALIBRATION,
            device=device,
        )
    found = values(tmp_path / "cuda")
    for layer, wanted in values(tmp_path / "cpu").items():
        assert share_equal(found[layer], wanted) > (0.999 if ".0.self_attn.q" in layer else 0.97), layer


def test_the_same_run_gives_the_same_bytes(tiny_llama: Path, tmp_path: Path) -> None:
    for out in ("one", "two"):
        quantize(
            tiny_llama,
            tmp_path / out,
            scheme=QuantScheme(4, 32),
            method="awq+gptq",
            calibration=CALIBRATION,
            device="cuda",
        )
    one, two = ((tmp_path / out / "model.safetensors").read_bytes() for out in ("one", "two"))
    assert one == two


@pytest.mark.parametrize("name", ["w4g128", "w4g128-asym", "w8"])
def test_the_fused_kernel_gives_the_loops_codes_at_full_size(name: str) -> None:
    scheme = QuantScheme.parse(name)
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(4096, 1024, generator=generator, device="cuda")
    x += x[:, :1] * torch.rand(1024, generator=generator, device="cuda")
    weight = torch.randn(700, 1024, generator=generator, device="cuda")
    running = Hessian(1024, "cuda")
    running.add(x)
    factor, grid = invert(running.matrix()), find_grid(weight, scheme, "mse")
    fused = gptq(weight, factor, grid, scheme).codes
    # float64 goes through the torch loop
    exact = invert(running.matrix().double())
    loop = gptq(weight.double(), exact, grid, scheme).codes
    assert torch.equal(factor.order, exact.order)
    assert float((fused == loop).float().mean()) > 0.995


def test_hessian_of_16_bit_inputs_is_exact_to_float32() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(3000, 2500, generator=generator, device="cuda").to(torch.bfloat16)
    running = Hessian(2500, "cuda")
    for part in x.split(1100):
        running.add(part)
    want = 2 * x.double().T @ x.double() / 3000
    got = running.matrix().double()
    assert float((got - want).norm() / want.norm()) < 1e-5
    factor = invert(running.matrix())  # of H over its own mean diagonal
    scaled = want / want.diagonal().mean() + 0.01 * torch.eye(2500, dtype=torch.float64, device="cuda")
    inverse = torch.linalg.inv(scaled[factor.order][:, factor.order])
    upper = factor.upper.double()
    assert torch.equal(upper, upper.triu())
    assert float((upper.T @ upper - inverse).norm() / inverse.norm()) < 1e-3


def test_the_command_line_quantizes_on_a_gpu(
    tiny_model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from qtool.cli.main import run

    out = tmp_path / "out"
    arguments = ["--w-bit", "4", "--group", "32", "--method", "awq+gptq", "--device", "cuda", "--samples", "4"]
    assert run(["quantize", str(tiny_model()), "--out", str(out), *arguments, "--seq-len", "128", "-q", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert all(0 < layer["relative_error"] <= layer["rtn_error"] for layer in report["layers"].values())
    assert set(values(out)) == set(report["layers"])
