"""The layer that was broken by hand is named, and no other."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from qtool.evalsets.weight_distance import (
    LayerDistance,
    Suspect,
    layer_distances,
    suspect_notes,
    suspects,
    with_distances,
)

BROKEN = "model.layers.1.mlp.down_proj"


def _changed(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    weights[f"{BROKEN}.weight"] = weights[f"{BROKEN}.weight"].flip(0).contiguous()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_distances_are_those_of_the_tensors(tiny: Path, tiny_noisy: Path, tmp_path: Path) -> None:
    base, noisy = (load_file(f / "model.safetensors") for f in (tiny, tiny_noisy))
    found = layer_distances(tiny, tiny_noisy)
    assert len(found) == 14
    for name, layer in found.items():
        a, b = base[f"{name}.weight"].double(), noisy[f"{name}.weight"].double()
        assert layer.distance == pytest.approx(((a - b).norm() / a.norm()).item(), rel=1e-5)
    assert suspects(found) == ()  # all are equally noisy

    (blamed,) = suspects(layer_distances(tiny, _changed(tiny, tmp_path / "broken")))
    flipped = base[f"{BROKEN}.weight"].flip(0)
    want = ((flipped - base[f"{BROKEN}.weight"]).norm() / flipped.norm()).item()
    assert (blamed.layer, blamed.scheme, blamed.usual) == (BROKEN, "float32", 0.0)
    assert blamed.distance == pytest.approx(want, rel=1e-5)
    assert BROKEN in suspect_notes([blamed])[0]


def test_schemes_are_judged_apart_and_transformed_models_not_at_all() -> None:
    w4 = {f"a{i}": LayerDistance("w4g64", 0.1 + 0.002 * i) for i in range(6)}
    w8 = {f"b{i}": LayerDistance("w8", 0.006) for i in range(6)}
    assert suspects({**w4, **w8}) == ()
    broken = {**w4, **w8, "b3": LayerDistance("w8", 0.1), "a2": LayerDistance("w4g64", math.nan)}
    assert [s.layer for s in suspects(broken)] == ["a2", "b3"]
    assert suspects({f"c{i}": LayerDistance("w4g64", 1.4) for i in range(5)} | {"d": LayerDistance("w4g64", 9.0)}) == ()
    assert suspects({}) == ()


def test_an_unreadable_checkpoint_gives_no_distances(tiny: Path, tmp_path: Path) -> None:
    assert layer_distances(tiny, tmp_path) == {}


def test_records_and_distances_are_joined() -> None:
    joined = with_distances({"a": {"scheme": "w8", "relative_error": 0.1}}, {"b": LayerDistance("bfloat16", 0.5)})
    assert joined == {"a": {"scheme": "w8", "relative_error": 0.1}, "b": {"scheme": "bfloat16", "distance": 0.5}}


def test_many_are_cut_short() -> None:
    many = [Suspect(f"l{i}", "w8", 1.0, 0.01) for i in range(9)]
    assert len(suspect_notes(many)) == 6
