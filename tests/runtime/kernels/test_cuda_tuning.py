"""The choice among measured candidates, with measurements made up."""

from __future__ import annotations

import math

import pytest
import torch

from qtool.quant.scheme import QuantScheme
from qtool.runtime.kernels.cuda import tuning
from qtool.runtime.kernels.cuda.choice import Choice
from qtool.runtime.kernels.cuda.stream import StreamConfig
from qtool.runtime.kernels.cuda.tuning import Timing
from qtool.runtime.kernels.interface import LinearSpec

FAST, CLOSE, SLOW, WRONG = (StreamConfig(tiles, 4) for tiles in (1, 2, 3, 4))


def test_close_candidates_are_measured_again_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of five decides: one lucky measurement does not."""
    later: dict[Choice, list[float]] = {FAST: [10.2, 9.0, 10.3, 10.2, 10.4], CLOSE: [10.1, 10.0, 10.1, 12.0, 10.1]}
    measured: list[Choice] = []

    def measure(rounds: object, x: object, spec: object, choice: Choice, out: object) -> float:
        measured.append(choice)
        return later[choice].pop(0)

    monkeypatch.setattr(tuning, "product_microseconds", measure)
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
    assert measured == [FAST, CLOSE] * 5


def test_where_nothing_works_nothing_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "product_microseconds", None)
    failed = [Timing(FAST, math.inf, math.nan, "failed"), Timing(SLOW, 9.0, 1.0, "wrong")]
    empty = torch.empty(0)
    spec = LinearSpec(64, 128, QuantScheme(4, 128))
    assert tuning._measure_close_ones_again(failed, [], empty, spec, empty) == failed[::-1]
