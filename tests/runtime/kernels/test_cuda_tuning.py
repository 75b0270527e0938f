"""The choice among measured candidates, with measurements made up."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from qtool.quant.errors import QtoolError
from qtool.quant.scheme import QuantScheme
from qtool.runtime.kernels.cuda import timing, tuning
from qtool.runtime.kernels.cuda.choice import Choice
from qtool.runtime.kernels.cuda.stream import StreamConfig
from qtool.runtime.kernels.cuda.tuning import Timing
from qtool.runtime.kernels.interface import LinearSpec

FAST, CLOSE, SLOW, WRONG = (StreamConfig(tiles, 4) for tiles in (1, 2, 3, 4))


def test_all_candidates_that_are_right_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(work: list[Choice], calls: int, settle: float, rounds: int) -> list[float]:
        assert (work, calls, settle, rounds) == ([SLOW, CLOSE, FAST], 100, 0.0, 3)
        return [11.0, 10.2, 10.1]

    monkeypatch.setattr(tuning, "product", lambda rounds, x, spec, choice, out: choice)
    monkeypatch.setattr(tuning, "in_turns", measured)
    checked = [Timing(WRONG, math.inf, 1.0, "wrong"), *(Timing(choice, 0.0, 0.0) for choice in (SLOW, CLOSE, FAST))]
    found = tuning._measure(checked, [], torch.empty(0), LinearSpec(64, 128, QuantScheme(4, 128)), torch.empty(0))
    assert [(t.choice, t.microseconds) for t in found] == [(FAST, 10.1), (CLOSE, 10.2), (SLOW, 11.0), (WRONG, math.inf)]


def test_where_nothing_works_nothing_is_measured() -> None:
    failed = [Timing(FAST, math.inf, math.nan, "failed"), Timing(SLOW, math.inf, 1.0, "wrong")]
    spec = LinearSpec(64, 128, QuantScheme(4, 128))
    assert tuning._measure(failed, [], torch.empty(0), spec, torch.empty(0)) == failed


def test_a_candidate_that_fails_or_is_wrong_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    out, want = torch.empty(2, 3), torch.ones(2, 3)

    def product(rounds: object, x: object, spec: object, choice: Choice, out: torch.Tensor) -> Callable[[int], object]:
        def call(i: int) -> object:
            if choice == SLOW:
                raise QtoolError("does not compile")
            return out.fill_(1.0 if choice == FAST else 2.0) if choice != CLOSE else None  # CLOSE leaves all as it was

        return call

    monkeypatch.setattr(tuning, "product", product)
    spec = LinearSpec(64, 128, QuantScheme(4, 128))
    found = {choice: tuning._check([], out, spec, choice, out, want) for choice in (FAST, CLOSE, SLOW, WRONG)}
    assert found[FAST] == Timing(FAST, 0.0, 0.0)
    assert found[SLOW].problem == "does not compile"
    assert found[WRONG].problem == "relative difference 1"
    assert found[CLOSE].problem == "relative difference nan"


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


def test_what_has_to_settle_never_meets_a_device_that_has_cooled(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[object] = []
    monkeypatch.setattr(timing, "_capture", lambda call, calls: call(0))
    monkeypatch.setattr(timing, "_replay", lambda graph, seconds: replayed.append(graph))
    monkeypatch.setattr(timing, "_median_milliseconds", lambda replay, repeats: 1.0)
    first, last = SimpleNamespace(replay=None), SimpleNamespace(replay=None)
    timing.in_turns([lambda i: first, lambda i: last], 10, settle=0.1, rounds=2)
    assert [graph is last for graph in replayed] == [True, False, True, False, True]
    assert [timing.settling(tokens) > 0 for tokens in (1, 127, 128, 2048)] == [False, False, True, True]
