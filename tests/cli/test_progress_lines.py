"""Progress where stderr is no terminal: seldom, and with the time that is left."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from qtool.cli import common


def test_lines_tell_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 60.0, 300.0, 420.0])
    monkeypatch.setattr(common.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    report = common._line_progress(Console(file=out, width=80))
    for done in (1, 2, 3, 6, 7):
        report("quantize", done, 7)
    # 2 blocks in a minute leave 4 for 2 minutes; 5 blocks in 5 minutes leave 1 for one
    assert out.getvalue().splitlines() == [
        "quantize: 1/7",
        "quantize: 3/7, 2 min left",
        "quantize: 6/7, 60 s left",
        "quantize: 7/7",
    ]


def test_durations() -> None:
    assert [common.duration(s) for s in (0.4, 99, 150, 5999, 11100)] == [
        "0 s",
        "99 s",
        "2 min",
        "1 h 40 min",
        "3 h 05 min",
    ]
