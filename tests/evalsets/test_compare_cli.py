"""`qtool compare` through the command line and our own runtime: exit status, outputs, refusals."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from xml.etree import ElementTree

import pytest

from qtool.cli.main import run
from qtool.evalsets.history import FILE, History
from qtool.quant.errors import QtoolError

SMALL = ["--windows", "2", "--context", "64", "--tasks", "none", "--dtype", "float32", "--device", "cpu", "--no-cache"]
SMALL += ["--generations", "2"]


def test_same_model_passes_and_a_damaged_one_fails(
    tiny: Path, tiny_noisy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(["compare", str(tiny), str(tiny), *SMALL, "--out", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["verdict"] == "PASS"
    assert printed["divergence"]["kl"]["max"] < 1e-6
    assert Path(printed["report"]).is_file()
    assert json.loads(Path(printed["json"]).read_text())["metrics"] == printed["metrics"]

    assert run(["compare", str(tiny), str(tiny_noisy), *SMALL, "--out", str(out)]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_too_few_windows_for_a_narrow_limit_are_inconclusive(tiny: Path, tiny_noisy: Path, tmp_path: Path) -> None:
    """Limits far above what the noise does, but the interval of perplexity over two windows reaches beyond: exit 2."""
    first = tmp_path / "first"
    run(["compare", str(tiny), str(tiny_noisy), *SMALL, "--out", str(first)])
    kl, ppl = json.loads((first / "compare.json").read_text())["metrics"]
    between = (kl["loss"] + kl["interval"]["high"]) / 2  # above the estimate, below its bound
    loose = str(100 * ppl["interval"]["high"] + 1)
    limits = ["--max-kl", str(between), "--max-ppl-increase", loose]
    assert run(["compare", str(tiny), str(tiny_noisy), *SMALL, *limits, "--out", str(tmp_path / "second")]) == 2


def test_a_history_that_fails_at_the_end_takes_no_report_away(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    History(tmp_path / "runs")
    with closing(sqlite3.connect(tmp_path / "runs" / FILE)) as db:
        db.execute("DROP TABLE metric")
    out = tmp_path / "out"
    assert run(["compare", str(tiny), str(tiny), *SMALL, "--out", str(out), "--history", str(tmp_path / "runs")]) == 3
    assert "cannot be used as a history" in " ".join(capsys.readouterr().err.split())
    assert json.loads((out / "compare.json").read_text())["verdict"] == "PASS"


def test_a_report_that_cannot_be_written_takes_no_verdict_away(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise QtoolError(f"{path}: cannot be written (No space left on device)")

    monkeypatch.setattr("qtool.evalsets.report.write_text", full)
    assert run(["compare", str(tiny), str(tiny), *SMALL, "--out", str(tmp_path / "out")]) == 3
    printed = capsys.readouterr()
    assert "Every metric is within its limit" in printed.out
    assert "cannot be written (No space left on device)" in printed.err


def test_several_candidates_and_files_for_ci(
    tiny: Path, tiny_noisy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The failed one comes last, and its status is the run's; a gate that lets it pass says so."""
    files = ["--junit", str(tmp_path / "j.xml"), "--markdown", str(tmp_path / "m.md")]
    models = ["compare", str(tiny), str(tiny_noisy), str(tiny)]
    assert run([*models, *SMALL, "--out", str(tmp_path / "out"), "--json", *files]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert [(r["candidate"], r["verdict"]) for r in printed["ranking"]] == [
        (str(tiny), "PASS"),
        (str(tiny_noisy), "FAIL"),
    ]
    assert [s.get("failures") for s in ElementTree.parse(tmp_path / "j.xml").getroot()] == ["2", "0"]
    assert "2 candidates" in (tmp_path / "m.md").read_text(encoding="utf-8")

    gate = tmp_path / "gate.toml"
    gate.write_text("[kl]\nmax = 1000\n[perplexity]\ncounts = false\n")
    assert run([*models, *SMALL, "--out", str(tmp_path / "out"), "--gate", str(gate)]) == 0


def test_refusals_are_one_line(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"context": "a", "choices": ["b", "c"], "answer": 2}\n')
    truncated = shutil.copytree(tiny, tmp_path / "truncated")
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    for arguments, message in (
        ([str(tiny), str(tmp_path / "none")], "no such folder"),
        ([str(tiny), str(truncated)], "truncated or damaged"),
        ([str(tiny), str(tiny), "--tasks", str(bad)], "bad.jsonl, line 1: answer 2 is outside the choices"),
        ([str(tiny), str(tiny), "--gate", str(bad)], "bad.jsonl: not valid TOML"),
        ([str(tiny), str(tiny), "--junit", str(tmp_path / "no" / "j.xml")], "does not exist"),
        ([str(tiny), str(tiny), "--max-drop", "-1"], "--max-drop must be a positive number"),
        ([str(tiny), str(tiny), "--out", str(bad)], "is a file"),
        ([str(tiny), str(tiny), "--context", "500"], "takes 128 tokens at most"),
    ):
        assert run(["compare", "--quiet", *arguments[:2], *_out(arguments, tmp_path)]) == 3
        error = capsys.readouterr().err.strip().splitlines()
        assert len(error) == 1, error
        assert message in error[0]
    assert not (tmp_path / "out").exists()


def _out(arguments: list[str], folder: Path) -> list[str]:
    rest = arguments[2:]
    return rest if "--out" in rest else [*rest, "--out", str(folder / "out")]
