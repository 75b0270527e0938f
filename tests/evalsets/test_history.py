"""Runs that are kept: the trend, the last pass, and histories that cannot be used."""

from __future__ import annotations

import json
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qtool.cli.main import run
from qtool.evalsets.compare import Comparison, compare
from qtool.evalsets.history import FILE, History, series_of
from qtool.evalsets.report import html
from qtool.evalsets.statistics import Verdict
from qtool.quant.errors import QtoolError


@pytest.fixture(scope="module")
def result(tiny: Path, tiny_noisy: Path, fake_served: Any) -> Comparison:
    return compare(tiny, tiny_noisy, windows=2, context=64, generations=0, tasks=[], serve=fake_served)


def _passed(result: Comparison, folder: Path) -> Comparison:
    """The result as if `folder`, a copy of its base, had been the candidate and passed."""
    facts = replace(result.candidate, name=str(folder), fingerprint=result.base.fingerprint)
    return replace(result, verdict=Verdict.PASS, candidate=facts)


def test_a_series_is_read_back_in_order_and_drawn(result: Comparison, tmp_path: Path) -> None:
    runs = History(tmp_path / "runs")
    broken = replace(result.metrics[1], loss=float("nan"))
    worse = replace(result, metrics=(result.metrics[0], broken), started="2001-01-01T00:00:00+00:00")
    for one in (worse, result):
        runs.add(one)
    other = {**result.settings, "text": {**result.settings["text"], "context": 32}}
    runs.add(replace(result, settings=other))
    past = History(tmp_path / "runs").series(series_of(result))
    assert [p.started for p in past] == [worse.started, result.started]
    assert past[0].losses["perplexity"] is None
    kl = result.metrics[0]
    assert past[1].losses["mean token KL"] == pytest.approx(kl.loss / kl.threshold)
    page = html([result], ["qtool"], past)
    assert "<h2>Trend</h2>" in page
    assert "2001-01-01" in page
    assert "<h2>Trend</h2>" not in html([result], ["qtool"], past[:1])


def test_limits_and_candidates_may_differ_in_a_series_but_not_the_base(result: Comparison) -> None:
    same = replace(result, candidate=replace(result.candidate, fingerprint="0" * 64))
    assert series_of(same) == series_of(result)
    assert series_of(replace(result, base=same.candidate)) != series_of(result)


def test_the_last_pass(result: Comparison, tiny: Path, tmp_path: Path) -> None:
    runs = History(tmp_path / "runs")
    runs.add(result)  # FAIL
    with pytest.raises(QtoolError, match="has passed yet"):
        runs.last_pass()
    first, second = (shutil.copytree(tiny, tmp_path / name) for name in ("first", "second"))
    runs.add(_passed(result, first))
    assert runs.last_pass() == str(first)
    runs.add(_passed(result, second), against="last-pass")
    assert runs.last_pass() == str(first)
    weights = first / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(QtoolError, match="was changed after it passed"):
        runs.last_pass()
    shutil.rmtree(first)
    with pytest.raises(QtoolError, match="cannot be opened"):
        runs.last_pass()


def test_histories_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QtoolError, match="is a file"):
        History(tmp_path / "file")
    (tmp_path / FILE).write_text("not a database, but long enough to be looked at" * 30)
    with pytest.raises(QtoolError, match="cannot be used as a history"):
        History(tmp_path)
    (tmp_path / FILE).unlink()
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("PRAGMA user_version = 7")
    with pytest.raises(QtoolError, match="version 7, this"):
        History(tmp_path)


def test_against_the_last_pass_by_the_command_line(
    tiny: Path, tiny_noisy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [
        "--windows",
        "2",
        "--context",
        "64",
        "--tasks",
        "none",
        "--generations",
        "0",
        "--dtype",
        "float32",
        "--no-cache",
    ]
    common = [*small, "--device", "cpu", "--out", str(tmp_path / "out"), "--history", str(tmp_path / "runs"), "--quiet"]
    assert run(["compare", str(tiny), str(tiny), *common]) == 0
    assert run(["compare", str(tiny_noisy), *common, "--against", "last-pass"]) == 1
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["base"]["name"] == str(tiny)
    capsys.readouterr()
    assert run(["compare", str(tiny_noisy), *small, "--against", "last-pass"]) == 3
    assert run(["compare", str(tiny_noisy), *small]) == 3
    assert run(["compare", str(tiny_noisy), *common, "--against", "yesterday"]) == 3
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 3
    assert "--history DIR" in errors[0]
    assert "BASE QUANT" in errors[1]
    assert "only last-pass is known" in errors[2]
