"""The choice among measured candidates, with measurements made up."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from qtool.quant.scheme import QuantScheme
from qtool.runtime.kernels.cuda import timing, tuning
from qtool.runtime.kernels.cuda.choice import Choice
from qtool.runtime.kernels.cuda.stream import StreamConfig
from qtool.runtime.kernels.cuda.tuning import Timing
from qtool.runtime.kernels.interface import LinearSpec

FAST, CLOSE, SLOW, WRONG = (StreamConfig(tiles, 4) for tiles in (1, 2, 3, 4))


def test_close_candidates_are_measured_again_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(work: list[Choice], calls: int, settle: float, rounds: int) -> list[float]:
        assert (work, calls, settle, rounds) == ([FAST, CLOSE], 100, 0.0, 5)
        return [10.2, 10.1]

    monkeypatch.setattr(tuning, "product", lambda rounds, x, spec, choice, out: choice)
    monkeypatch.setattr(tuning, "in_turns", again)
    first = [
        Timing(WRONG, 5.0, 1.0, "wrong"),
        Timing(SLOW, 11.0, 0.0),
        Timing(CLOSE, 10.4, 0.0),
        Timing(FAST, 10.0, 0.0),
    ]
    empty = torch.empty(0)
    spec = LinearSpec(64, 128, QuantScheme(4, 128))
    found = tuning._measure_close_ones_again(first, [], empty, spec, empty)
    assert [(t.choice, t.microseconds) for t in found] == [(CLOSE, 10.1), (FAST, 10.2), (SLOW, 11.0), (WRONG, 5.0)]


def test_where_nothing_works_nothing_is_measured_again() -> None:
    failed = [Timing(FAST, math.inf, math.nan, "failed"), Timing(SLOW, 9.0, 1.0, "wrong")]
    empty = torch.empty(0)
    spec = LinearSpec(64, 128, QuantScheme(4, 128))
    assert tuning._measure_close_ones_again(failed, [], empty, spec, empty) == failed[::-1]


def test_kinds_of_work_take_turns_and_medians_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """One lucky measurement does not decide."""
    milliseconds = {"a": [10.2, 9.0, 10.3, 10.2, 10.4], "b": [10.1, 10.0, 10.1, 12.0, 10.1]}
    measured: list[str] = []

    def median(replay: Callable[[], str], repeats: int) -> float:
        measured.append(replay())
        return milliseconds[measured[-1]].pop(0)

    monkeypatch.setattr(timing, "_capture", lambda call, calls: SimpleNamespace(replay=lambda: call(0)))
    monkeypatch.setattr(timing, "_median_milliseconds", median)
    assert timing.in_turns([lambda i: "a", lambda i: "b"], 10, rounds=5) == pytest.approx([1020, 1010])
    assert measured == ["a", "b"] * 5
