"""Schemes by layer beside schemes by fused group."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from qtool.quant.calibration import CalibrationSet
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.pipeline import quantize
from qtool.quant.structure import ModelStructure, fused_groups, linear_shapes, structure_of
from qtool.sensitivity.allocate import Limits, allocate, describe
from qtool.sensitivity.candidates import candidate_groups, parse_candidates
from qtool.sensitivity.probe import analyze, outline
from qtool.sensitivity.record import Sensitivity

SCHEMES = ("w8", "w4g32")
TOKENS = torch.randint(1, 257, (6, 40), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def folder(tiny_model: Any) -> Path:
    made: Path = tiny_model("llama")
    return made


def analyzed(folder: Path, granularity: str, metric: str) -> Sensitivity:
    calibration = CalibrationSet(TOKENS, "random tokens", "c" * 64)
    return analyze(
        folder, schemes=SCHEMES, metric=metric, granularity=granularity, calibration=calibration, device="cpu"
    )


def test_every_layer_is_a_group_of_its_own(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        names = [g.members for g in outline(checkpoint, SCHEMES, "layer").groups]
        assert names == [(layer,) for layer in linear_shapes(checkpoint)]
        structure = structure_of(checkpoint.config)
        with pytest.raises(QtoolError, match="--granularity row: use one of group, layer"):
            candidate_groups(structure, linear_shapes(checkpoint), parse_candidates(SCHEMES), "row")


def test_experts_of_one_projection_stay_together(folder: Path) -> None:
    experts = tuple(f"mlp.experts.{e}.{p}" for e in range(2) for p in ("gate_proj", "up_proj"))
    structure = structure_of_folder(folder)
    group = replace(structure.groups[0], kind="gate_up", members=experts)
    shapes = {f"{structure.block_name(0)}.{name}": (64, 64) for name in experts}
    parts = candidate_groups(
        replace(structure, groups=(group,), num_blocks=1), shapes, parse_candidates(SCHEMES), "layer"
    )
    assert [(g.kind, [m.split(".")[-2] for m in g.members]) for g in parts] == [
        ("gate_proj", ["0", "1"]),
        ("up_proj", ["0", "1"]),
    ]


def test_the_weights_of_a_group_are_those_of_its_layers(folder: Path) -> None:
    """‖ΔW‖² adds up; both are relative to ‖W‖², which the members of a group share out."""
    group, layer = (analyzed(folder, granularity, "output") for granularity in ("group", "layer"))
    single = {g.name: g.damage for g in layer.groups}
    for g in group.groups:
        if len(g.members) == 1:
            assert single[f"model.layers.{g.block}.{g.members[0].rpartition('.')[2]}"] == pytest.approx(g.damage)
        else:
            parts = [single[f"model.layers.{g.block}.{m.rpartition('.')[2]}"]["w4g32"] for m in g.members]
            assert min(parts) <= g.damage["w4g32"] <= max(parts)


def test_a_plan_by_layer_becomes_an_artifact(folder: Path, tmp_path: Path) -> None:
    found = analyzed(folder, "layer", "fisher")
    plan = allocate(found, Limits(avg_bits=6.0)).plan
    report = quantize(folder, tmp_path / "out", plan=plan, method="rtn", device="cpu")
    assert {name: record.scheme for name, record in report.layers.items()} == {
        name: scheme.name for name, scheme in plan.layers.items() if scheme is not None
    }
    assert any("vLLM" in note for note in report.notes) == any(
        len({plan[m] for m in names}) > 1 for names in fused_groups(structure_of_folder(folder))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planned_bytes_are_those_of_the_artifact(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """Layers that stay as they are take what the checkpoint stores: four bytes a weight in float32."""
    AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(tmp_path / "m")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path / "m")
    calibration = CalibrationSet(TOKENS, "random tokens", "c" * 64)
    found = analyze(tmp_path / "m", schemes=("fp16", *SCHEMES), metric="weight", calibration=calibration, device="cpu")
    plan = describe(found, ["fp16", "w4g32", "w8", "fp16"] * 2)
    quantize(tmp_path / "m", tmp_path / "out", plan=plan.plan, method="rtn", device="cpu")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    true = sum(t.nbytes for name, t in stored.items() if not name.endswith("weight_shape"))
    assert plan.total_bytes == true
    assert plan.average_bits == pytest.approx(8 * plan.linear_bytes / sum(r * c for r, c in found.shapes.values()))


def structure_of_folder(folder: Path) -> ModelStructure:
    with Checkpoint(folder) as checkpoint:
        return structure_of(checkpoint.config)
