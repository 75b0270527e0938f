"""qtool compress as a user runs it: budgets that grow until the gate passes, stages that are kept, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qtool.cli.main import run
from qtool.quant.artifact import read_record
from qtool.sensitivity import compress as loop

TEXT = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs; how vexing! "


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT * 120)
    return path


@pytest.fixture
def words(tiny_model: Any, text: Path, tmp_path: Path) -> list[str]:
    """A command whose first budget is the least possible one."""
    model = str(tiny_model("llama", tie_word_embeddings=True))
    return [
        "compress", model, "--avg-bits", "4.5", "--out", str(tmp_path / "m"),
        "--schemes", "fp16,w8,w4g32", "--method", "rtn", "--data", str(text), "--samples", "4", "--seq-len", "64",
        "--text", str(text), "--windows", "4", "--context", "64", "--tasks", "none", "--device", "cpu",
    ]  # fmt: skip


def qtool(capsys: pytest.CaptureFixture[str], words: list[str], status: int = 0) -> Any:
    capsys.readouterr()
    assert run([*words, "--json", "--quiet"]) == status, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def count(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each stage really runs."""
    counts = dict.fromkeys(("analyze", "quantize", "compare"), 0)

    def counted(name: str) -> Any:
        original = getattr(loop, name)

        def call(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return original(*args, **options)

        return call

    for name in counts:
        monkeypatch.setattr(loop, name, counted(name))
    return counts


def test_the_budget_grows_until_the_gate_passes(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = count(monkeypatch)
    gate = ["--gate", "1000%", "--gate-kl", "0.05", "--relax", "40%"]  # w4g32 everywhere has more than that
    done = qtool(capsys, [*words, *gate])
    assert done["verdict"] == "PASS"
    assert len(done["steps"]) > 1
    assert {step["verdict"] for step in done["steps"][:-1]} <= {"FAIL", "INCONCLUSIVE"}
    bits = [step["average_bits"] for step in done["steps"]]
    assert bits == sorted(set(bits))
    assert bits[0] == 4.5
    made = read_record(tmp_path / "m")
    assert made["average_bits"] == pytest.approx(bits[-1])
    assert (tmp_path / "m-report" / "report.html").is_file()
    assert not list(tmp_path.glob(".m*"))  # no candidate is left
    assert counts["analyze"] == 1
    assert counts["quantize"] == len(done["steps"])

    before = dict(counts)
    assert qtool(capsys, [*words, *gate])["steps"] == done["steps"]  # the same command again: nothing is done
    assert counts == before

    assert run([*words, *gate, "--max-steps", "11", "--quiet"]) == 3  # another wish does not replace it unasked
    assert "exists already" in capsys.readouterr().err
    loose = qtool(capsys, [*words, "--gate", "1000%", "--gate-kl", "50", "--force"])  # and finds the analysis made
    assert (loose["verdict"], len(loose["steps"]), counts["analyze"]) == ("PASS", 1, 1)
    assert read_record(tmp_path / "m")["average_bits"] == 4.5


def test_a_gate_that_nothing_passes(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = qtool(capsys, [*words, "--gate-kl", "1e-9", "--max-steps", "2"], status=1)
    assert done["verdict"] == "FAIL"
    assert done["out"] is None
    assert len(done["steps"]) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "m-report"]


def test_a_killed_run_goes_on(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gate.toml").write_text("kl.max = 50\nperplexity.max_increase = 1000\naccuracy.max_drop = 100\n")
    gate = ["--gate", str(tmp_path / "gate.toml")]
    with monkeypatch.context() as patched:
        patched.setattr(loop, "compare", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run([*words, *gate, "--quiet"]) == 130
    assert not (tmp_path / "m").exists()
    counts = count(monkeypatch)
    assert qtool(capsys, [*words, *gate])["verdict"] == "PASS"
    assert counts == {"analyze": 0, "quantize": 0, "compare": 1}


LOOSE = ["--gate", "1000%", "--gate-kl", "50"]


def test_a_folder_that_appears_meanwhile_is_left_as_it_is(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "m" / "theirs"
    original = loop.compare

    def meanwhile(*args: Any, **options: Any) -> Any:
        theirs.parent.mkdir()
        theirs.write_text("precious")
        return original(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "compare", meanwhile)
        assert run([*words, *LOOSE, "--quiet"]) == 3
    assert "appeared while this run was at work" in capsys.readouterr().err
    assert theirs.read_text() == "precious"
    theirs.unlink()
    theirs.parent.rmdir()
    counts = count(monkeypatch)
    assert qtool(capsys, [*words, *LOOSE])["verdict"] == "PASS"  # nothing of the work is lost
    assert counts == {"analyze": 0, "quantize": 0, "compare": 0}


def test_one_run_at_a_time_makes_a_folder(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = loop.compare
    statuses = []

    def meanwhile(*args: Any, **options: Any) -> Any:
        statuses.append(run([*words, *LOOSE, "--seed", "1", "--quiet"]))
        return original(*args, **options)

    monkeypatch.setattr(loop, "compare", meanwhile)
    assert run([*words, *LOOSE, "--quiet"]) == 0
    assert statuses == [3]
    assert "another run is making it" in capsys.readouterr().err
    assert (tmp_path / "m" / "config.json").is_file()


def test_inconclusive_takes_more_windows_and_is_no_pass(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = qtool(capsys, [*words, "--gate", "1000%", "--gate-kl", "50"])
    report = json.loads((tmp_path / "m-report" / "compare.json").read_text())
    (kl,) = (m for m in report["metrics"] if m["kind"] == "kl")
    between = (kl["loss"] + kl["interval"]["high"]) / 2  # its mean is within, the bound of its mean is not
    assert first["steps"][0]["windows"] == 4
    counts = count(monkeypatch)
    gate = ["--gate", "1000%", "--gate-kl", f"{between}", "--max-steps", "1", "--max-windows", "16", "--force"]
    status = run([*words, *gate, "--json", "--quiet"])
    done = json.loads(capsys.readouterr().out)
    assert counts["compare"] >= 2
    assert done["steps"][0]["windows"] > 4
    assert status == {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 2}[done["verdict"]]
    assert (tmp_path / "m").exists()  # the former artifact is replaced by a PASS alone
    none = ["--gate", "1000%", "--gate-kl", f"{between}", "--max-steps", "1", "--max-windows", "4", "--force"]
    assert qtool(capsys, [*words, *none], status=2)["out"] is None


def test_bytes_and_time_are_budgets_too(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = words.index("--avg-bits")
    rest = [*words[:at], *words[at + 2 :], "--gate", "1000%", "--gate-kl", "50"]
    sized = qtool(capsys, [*rest, "--max-bytes", "150KB", "--max-latency-ms", "1000"])
    assert sized["steps"][0]["total_bytes"] <= 150_000
    assert 0 < sized["steps"][0]["latency_ms"] <= 1000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--gate", "much"], "--gate 'much': write a percentage such as 2%"),
        (["--gate", "0%"], "--gate '0%': write a percentage"),
        (["--gate", __file__], "not valid TOML"),
        (["--tasks", "grammer"], "grammer: no such file"),
        (["--relax", "0.01%"], "--relax 0.0001"),
        (["--schemes", "w8"], "name at least two"),
        (["--method", "magic"], "unknown method 'magic'"),
        (["--avg-bits", "3"], "--avg-bits 3: the least possible"),
        (["--keep", "layers.77"], "matches none"),
        (["--seq-len", "1"], "at least 1 sequence of 2 tokens"),
        (["--text", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--windows", "1"], "--windows 1: at least 2"),
        (["--seed", "-1"], "seed -1 is not from 0"),
    ],
)
def test_what_cannot_be_is_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: list[str], message: str
) -> None:
    assert run([*words, *changes, "--quiet"]) == 3
    assert message in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []  # refused before any work


def test_no_budget_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    at = words.index("--avg-bits")
    assert run([*words[:at], *words[at + 2 :], "--quiet"]) == 3
    assert "no budget" in capsys.readouterr().err
