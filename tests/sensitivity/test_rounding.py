"""Candidates and plans rounded by GPTQ, against artifacts of the quantizer itself; transformers evaluates, in float64.

GPTQ is calibrated on the first half of the sequences and measured on the rest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from qtool.quant.calibration import CalibrationSet
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.formats import open_reader
from qtool.quant.pipeline import quantize
from qtool.quant.scheme import QuantPlan
from qtool.sensitivity.allocate import describe
from qtool.sensitivity.probe import analyze
from qtool.sensitivity.record import GroupSensitivity, Sensitivity
from qtool.sensitivity.verify import joint_kl

SCHEMES = ("fp16", "w8", "w4g32")
TOKENS = torch.randint(1, 257, (8, 40), generator=torch.Generator().manual_seed(5))
HELD, MEASURED = TOKENS[:4], TOKENS[4:]
MANY = torch.randint(1, 257, (64, 40), generator=torch.Generator().manual_seed(6))  # enough for Hessians


@pytest.fixture(scope="module")
def folder(tiny_model: Any) -> Path:
    made: Path = tiny_model("llama")
    return made


def analyzed(folder: Path, metric: str, rounding: str = "gptq", tokens: torch.Tensor = TOKENS) -> Sensitivity:
    calibration = CalibrationSet(tokens, "random tokens", "c" * 64)
    return analyze(folder, schemes=SCHEMES, metric=metric, rounding=rounding, calibration=calibration, device="cpu")


@pytest.fixture(scope="module")
def by_kl(folder: Path) -> Sensitivity:
    return analyzed(folder, "kl")


@torch.no_grad()
def artifact_kl(folder: Path, out: Path, plan: QuantPlan) -> float:
    """KL on MEASURED of the artifact that the quantizer makes on HELD."""
    quantize(folder, out, plan=plan, method="gptq", calibration=CalibrationSet(HELD, "random", "d" * 64), device="cpu")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    log_p = model(MEASURED).logits.log_softmax(-1)
    with Checkpoint(out) as checkpoint:
        reader = open_reader(checkpoint)
        assert reader is not None
        for name, scheme in plan.layers.items():
            if scheme is not None:
                model.get_submodule(name).weight.copy_(reader.read(name).dequantize())
    log_q = model(MEASURED).logits.log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def test_a_plan_measures_as_its_artifact(folder: Path, by_kl: Sensitivity, tmp_path: Path) -> None:
    plans = [describe(by_kl, names).plan for names in (["w4g32"] * 8, ["w8", "w4g32", "fp16", "w4g32"] * 2)]
    with Checkpoint(folder) as checkpoint:
        got = joint_kl(checkpoint, TOKENS, plans, rounding="gptq", device=torch.device("cpu"))
    for i, (plan, kl) in enumerate(zip(plans, got, strict=True)):
        assert kl == pytest.approx(artifact_kl(folder, tmp_path / str(i), plan), rel=0.02)


@pytest.mark.parametrize("index", [0, 3, 5])
def test_a_group_alone_measures_as_its_artifact(folder: Path, by_kl: Sensitivity, tmp_path: Path, index: int) -> None:
    names = ["fp16"] * len(by_kl.groups)
    names[index] = "w4g32"
    want = artifact_kl(folder, tmp_path / "one", describe(by_kl, names).plan)
    assert by_kl.groups[index].damage["w4g32"] == pytest.approx(want, rel=0.02)


def total(groups: tuple[GroupSensitivity, ...], scheme: str) -> float:
    return sum(g.damage[scheme] for g in groups)


def test_gptq_damages_the_output_less_than_nearest_rounding(folder: Path) -> None:
    nearest, ours = (analyzed(folder, "output", name, MANY) for name in ("rtn", "gptq"))
    assert (ours.rounding, nearest.rounding) == ("gptq", "rtn")
    assert total(ours.groups, "w4g32") < total(nearest.groups, "w4g32")


def test_the_fisher_metric_sees_what_gptq_saves(folder: Path) -> None:
    """The measured KL in sum, within what one random vector a position can tell."""
    fisher, kl = (analyzed(folder, metric, tokens=MANY) for metric in ("fisher", "kl"))
    assert fisher.forward_passes == pytest.approx(3)  # half of the batches go forward twice, half go back too
    for scheme in ("w8", "w4g32"):
        assert total(fisher.groups, scheme) == pytest.approx(total(kl.groups, scheme), rel=0.35)


def test_what_cannot_be_rounded_so_is_refused(folder: Path) -> None:
    one = CalibrationSet(TOKENS[:1], "random tokens", "c" * 64)
    with pytest.raises(QtoolError, match="give two or more"):
        analyze(folder, schemes=SCHEMES, rounding="gptq", calibration=one)
    with pytest.raises(QtoolError, match="--rounding magic: use one of rtn, gptq"):
        analyze(folder, schemes=SCHEMES, rounding="magic")
    with pytest.raises(QtoolError, match="--metric weight has none"):
        analyze(folder, schemes=SCHEMES, metric="weight", rounding="gptq")
