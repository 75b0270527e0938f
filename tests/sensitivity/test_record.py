"""sensitivity.json: what no analysis can have written is refused in one line that names the file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qtool.quant.errors import QtoolError
from qtool.sensitivity.allocate import Limits, allocate
from qtool.sensitivity.record import GroupSensitivity, Sensitivity

FOUND = Sensitivity(
    model="m",
    fingerprint="ab" * 32,
    metric="weight",
    rounding="rtn",
    calibration={"source": "text", "num_sequences": 1, "seq_len": 8, "fingerprint": "0"},
    forward_passes=0.0,
    shapes={"model.layers.0.o": (64, 64)},
    weight_error={"model.layers.0.o": {"w8": 0.01}},
    float_bytes=2,
    other_bytes=100,
    groups=(GroupSensitivity("model.layers.0.o", 0, "o", ("model.layers.0.o",), {"w8": 0.01, "w4g64": 0.1}),),
)
GROUP = json.loads(FOUND.to_json())["groups"][0]


def test_a_record_is_read_back_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(FOUND.to_json())
    assert Sensitivity.load(tmp_path / "s.json") == FOUND


@pytest.mark.parametrize(
    "change",
    [
        {"groups": [], "layers": {}},
        {"fingerprint": 5},
        {"calibration": 3},
        {"calibration": {}},
        {"metric": "magic"},
        {"rounding": "magic"},
        {"format": 99},
        {"model": ["m"]},
        {"forward_passes": float("nan")},
        *({"other_bytes": size} for size in (float("inf"), -1)),
        *({"calibration": {"source": "t", "num_sequences": n, "seq_len": 8}} for n in ("4", 4.5, 0)),
        *({"layers": {"model.layers.0.o": {"shape": s, "weight_error": {}}}} for s in ([-64, 64], [float("inf"), 64])),
        *({"groups": [GROUP | {"members": m}]} for m in ([], ["model.layers.0.o"] * 2, ["model.layers.1.o"])),
        {"groups": [GROUP, GROUP | {"members": []}]},
        {"groups": [GROUP | {"block": -1}]},
        {"groups": [GROUP | {"block": float("inf")}]},
        *(
            {"damage": d}
            for d in (
                {},
                {"fp16": 1.0},
                {"w8a8": 1.0},
                {"W8": 1.0},
                {"w8": float("nan")},
                {"w8": -1.0},
                {"bogus": 1.0},
                {"w4g40": 1.0},
                {"w8": "x"},
            )
        ),
    ],
    ids=str,
)
def test_a_damaged_record_is_refused_by_name(tmp_path: Path, change: dict[str, Any]) -> None:
    document = json.loads(FOUND.to_json())
    if "damage" in change:
        document["groups"][0]["damage"] = change["damage"]
    else:
        document |= change
    (tmp_path / "s.json").write_text(json.dumps(document))
    with pytest.raises(QtoolError, match=r"s\.json: "):
        Sensitivity.load(tmp_path / "s.json")


def test_damages_that_sum_to_no_number_are_refused(tmp_path: Path) -> None:
    two = {f"model.layers.{i}.o": (64, 64) for i in range(2)}
    groups = tuple(GroupSensitivity(name, i, "o", (name,), {"w8": 1e308}) for i, name in enumerate(two))
    errors = {name: {"w8": 0.01} for name in two}
    (tmp_path / "s.json").write_text(replace(FOUND, shapes=two, weight_error=errors, groups=groups).to_json())
    with pytest.raises(QtoolError, match="the sum of its damages"):
        Sensitivity.load(tmp_path / "s.json")


@pytest.mark.parametrize("bits", [float("nan"), float("inf"), 1e308])
def test_a_budget_that_is_no_number_is_refused(bits: float) -> None:
    with pytest.raises(QtoolError, match="--avg-bits"):
        allocate(FOUND, Limits(avg_bits=bits))
