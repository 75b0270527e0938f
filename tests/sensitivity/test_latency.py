"""What a plan's groups cost in time: the table's own numbers, for products as the runtime fuses them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qtool.runtime.kernels import measure
from qtool.runtime.kernels.measure import LinearCase, LinearTime, save_times
from qtool.sensitivity.allocate import Limits, allocate
from qtool.sensitivity.latency import group_latency
from qtool.sensitivity.record import GroupSensitivity, Sensitivity

CPU = torch.device("cpu")
Q_PROJ, K_PROJ, O_PROJ = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.self_attn.k_proj",
    "model.layers.0.self_attn.o_proj",
)
FOUND = Sensitivity(
    model="m",
    fingerprint="0" * 64,
    metric="kl",
    rounding="rtn",
    calibration={},
    forward_passes=1.0,
    shapes={Q_PROJ: (64, 128), K_PROJ: (32, 128), O_PROJ: (128, 64)},
    weight_error={},
    float_bytes=2,
    other_bytes=0,
    groups=(
        GroupSensitivity("qk", 0, "qk", (Q_PROJ, K_PROJ), {"w8": 0.1, "w4g32": 0.4}),
        GroupSensitivity("o", 0, "o", (O_PROJ,), {"w8": 0.2, "w4g32": 0.3}),
    ),
)


def test_times_are_those_of_the_fused_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path))
    monkeypatch.setattr(measure, "measure_linears", lambda *_: pytest.fail("the table has them all"))
    microseconds = {
        (96, 128, "fp16"): 9.0, (96, 128, "w8"): 5.0, (96, 128, "w4g32"): 3.0,
        (128, 64, "fp16"): 8.0, (128, 64, "w8"): 4.0, (128, 64, "w4g32"): 6.0,
    }  # fmt: skip
    save_times([LinearTime(LinearCase(*case, tokens=2), "k", t, 1.0) for case, t in microseconds.items()], CPU)
    latency = group_latency(FOUND, CPU, tokens=2)
    assert latency["qk"] == pytest.approx({"fp16": 0.009, "w8": 0.005, "w4g32": 0.003})
    assert latency["o"] == pytest.approx({"fp16": 0.008, "w8": 0.004, "w4g32": 0.006})
    got = allocate(FOUND, Limits(max_latency_ms=0.008), latency=latency)  # w8 for o is better and faster than w4g32
    assert got.latency_ms == pytest.approx(0.007)
    assert (got.plan[Q_PROJ], got.plan[O_PROJ]) == (got.plan[K_PROJ], got.plan[O_PROJ])
    assert got.damage == pytest.approx(0.6)
    assert got.plan[O_PROJ] is not None
    assert got.plan[O_PROJ].name == "w8"
