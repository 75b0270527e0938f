"""Candidates that compute NaN or infinity, served by our own runtime: a report that fails them and says where, for
every kind of question; a base that does is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from lm_eval.tasks import TaskManager
from safetensors.torch import load_file, save_file

from qtool.cli.main import run
from qtool.evalsets import exports, task_runs
from qtool.evalsets.compare import Comparison, compare, compare_all
from qtool.evalsets.gate import Thresholds, judge_all, task_metric
from qtool.evalsets.harness import QtoolLM, serve
from qtool.evalsets.not_finite import NotFinite
from qtool.evalsets.parting import generate_greedy, text_prompts
from qtool.evalsets.report import html, write_report
from qtool.evalsets.statistics import Verdict
from qtool.evalsets.windows import text_windows
from qtool.quant.documents import load_tokenizer
from qtool.quant.errors import QtoolError

Weights = dict[str, torch.Tensor]
EMBEDDING = "model.embed_tokens.weight"
WINDOWS, CONTEXT = 3, 64


def _changed(base: Path, folder: Path, change: Callable[[Weights], None]) -> Path:
    shutil.copytree(base, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _spoil_a_layer(weights: Weights) -> None:
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.nan


def _spoil(token: int) -> Callable[[Weights], None]:
    """What reads this token computes NaN from there on."""

    def change(weights: Weights) -> None:
        weights[EMBEDDING][token] = torch.nan

    return change


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One ~ in the second window, two in the third; one byte is one token."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    letters = [chr(ord("A") + i * i % 23) for i in range(WINDOWS * CONTEXT)]
    for at in (CONTEXT + 60, 2 * CONTEXT + 10, 2 * CONTEXT + 40):
        letters[at] = "~"
    path.write_text("".join(letters))
    return path


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A set of every kind; ~ stands in some items, and where it is the last token of a choice it is no input."""
    folder = tmp_path_factory.mktemp("sets")
    marks = {7: "~", 30: "a~"}
    choice = [
        {"id": f"i{n}", "context": f"item {n}{marks.get(n, '')}", "choices": ["x" * 30, "y"], "answer": 1}
        for n in range(60)
    ]
    choice[40]["choices"] = ["y~", "x" * 30]
    choice[41]["choices"] = ["x~x", "y"]
    rows: dict[str, list[dict[str, Any]]] = {
        "choice": choice,
        "cloze": [{"context": f"item {n}{'~' * (n == 3)}", "target": "xyz", "metric": "cloze"} for n in range(9)],
        "free": [
            {"context": f"item {n}{'~' * (n == 5)}", "target": ".", "metric": "regex", "max_tokens": 3}
            for n in range(9)
        ],
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return {name: folder / f"{name}.jsonl" for name in rows}


def _compare(base: Path, candidate: Path, text: Path, **options: Any) -> Comparison:
    options = {"windows": WINDOWS, "context": CONTEXT, "data": text, "generations": 2, "tasks": (), **options}
    return compare(base, candidate, device="cpu", thresholds=Thresholds(max_drop=0.5), **options)


def _strict(document: str) -> Any:
    """JSON without NaN and its like, by the schema."""
    jsonschema = pytest.importorskip("jsonschema")
    read = json.loads(document, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    schema = json.loads(files("qtool.evalsets").joinpath("compare.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(read, schema)
    return read


def test_a_model_with_one_damaged_layer_fails_in_everything(
    tiny: Path, text: Path, sets: dict[str, Path], tmp_path: Path
) -> None:
    broken = _changed(tiny, tmp_path / "broken", _spoil_a_layer)
    result = _compare(tiny, broken, text, tasks=list(sets.values()))
    assert result.verdict is Verdict.FAIL
    assert {m.verdict for m in result.metrics} == {Verdict.FAIL}  # the base answers no cloze item: that is no excuse
    tokens = WINDOWS * (CONTEXT - 1)
    first = text.read_text()[0]
    assert result.not_finite == (
        NotFinite("text", tokens, tokens, "tokens", f"for token 1 of window 0, after {first!r}"),
        NotFinite("choice", 60, 60, "items", f"in 'i0', in the choice {'x' * 30!r}"),
        NotFinite("cloze", 9, 9, "items", "in 'line-1'"),
        NotFinite("free", 9, 9, "items", "in 'line-1', after 0 tokens"),
        NotFinite("generations", 2, 2, "outputs", "in that of prompt 0, after 0 tokens"),
    )
    assert result.divergence.same_top1 == result.divergence.top5_overlap == 0
    assert [s.layer for s in result.suspects] == ["model.layers.1.mlp.down_proj"]

    page, document = write_report(result, tmp_path / "out", ["qtool"])
    read = _strict(document.read_text(encoding="utf-8"))
    assert read["verdict"] == "FAIL"
    assert [n["part"] for n in read["not_finite"]] == ["text", "choice", "cloze", "free", "generations"]
    assert (read["metrics"][0]["candidate"], read["metrics"][2]["candidate"]) == (None, 0.0)
    shown = page.read_text(encoding="utf-8")
    assert "NaN or infinity in 60 of 60 items" in shown
    assert "nan" not in shown.replace("NaN or", "")
    (suite,) = ElementTree.fromstring(exports.junit([result]))
    assert (suite.get("tests"), suite.get("failures")) == ("6", "6")
    assert "text: NaN or infinity in 189 of 189 tokens" in exports.markdown([result])


def test_late_tokens_are_found_where_they_stand(tiny: Path, text: Path, sets: dict[str, Path], tmp_path: Path) -> None:
    """What stands before the first of them is whole, in its own window and in the others."""
    tokenizer = load_tokenizer(tiny)
    late = _changed(tiny, tmp_path / "late", _spoil(tokenizer.convert_tokens_to_ids("~")))
    result = _compare(tiny, late, text, tasks=list(sets.values()), generations=0)
    before = text.read_text()[CONTEXT + 37 : CONTEXT + 61]
    assert before.endswith("~")
    assert result.not_finite == (
        # after the first ~ of each window: 63 − 60 and 63 − 10 predictions
        NotFinite("text", 3 + 53, WINDOWS * 63, "tokens", f"for token 61 of window 1, after {before!r}"),
        NotFinite("choice", 3, 60, "items", f"in 'i7', in the choice {'x' * 30!r}"),
        NotFinite("cloze", 1, 9, "items", "in 'line-4'"),
        NotFinite("free", 1, 9, "items", "in 'line-6', after 0 tokens"),
    )
    kl = result.windows.scores
    assert kl[0].kl.abs().max() < 1e-6
    assert kl[1].kl[:60].abs().max() < 1e-6
    assert kl[1].kl[60:].isnan().all()
    assert result.divergence.same_top1 == pytest.approx(1 - 56 / 189)
    assert [math.isnan(p.kl) for p in result.windows.worst] == [True] * 20
    assert (result.windows.worst[0].window, result.windows.worst[0].token) == (1, 61)
    by_name = {m.name: m for m in result.metrics}
    choice = by_name["choice accuracy"]
    assert (choice.verdict, choice.broken, choice.missing) == (Verdict.FAIL, 3, 0)  # a drop of 5 points is allowed
    assert choice.base is not None
    assert choice.base - choice.candidate <= 3 / 60
    assert "NaN or infinity for 3 of 60 items" in choice.note
    assert "3 (counted as wrong)" in html([result], ["qtool"])
    assert result.tasks[0][1].broken.keys() == {"i7", "i30", "i41"}


def test_one_position_that_overflows_in_the_last_layer_is_one_token(tiny: Path, text: Path, tmp_path: Path) -> None:
    """Nothing reads what the last MLP gives: tokens after those that overflow are as the base's."""
    token = load_tokenizer(tiny).convert_tokens_to_ids("~")

    def own_axis(weights: Weights) -> None:
        """One direction of the residual stream belongs to one token alone."""
        weights[EMBEDDING][:, 5] = 0
        weights[EMBEDDING][token, 5] = 1000
        for layer in range(2):
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                weights[f"model.layers.{layer}.{name}.weight"][5] = 0

    def overflow(weights: Weights) -> None:
        weights["model.layers.1.mlp.gate_proj.weight"][:, 5] = 3e38

    base = _changed(tiny, tmp_path / "base", own_axis)
    result = _compare(base, _changed(base, tmp_path / "hot", overflow), text, generations=0)
    before = text.read_text()[CONTEXT + 37 : CONTEXT + 61]
    assert result.not_finite == (
        NotFinite("text", 3, WINDOWS * 63, "tokens", f"for token 61 of window 1, after {before!r}"),
    )
    joined = result.windows.joined("kl")
    assert joined[joined.isfinite()].abs().max() < 1e-6


def _spoiled_in_generations(base: Path, text: Path, tmp_path: Path) -> tuple[Path, dict[int, int]]:
    """A candidate that breaks on a token that the base only generates, and after how many tokens each output does."""
    tokenizer = load_tokenizer(base)
    windows = text_windows(tokenizer, text, windows=WINDOWS, context=CONTEXT).tokens
    outputs = generate_greedy(serve(base, device="cpu"), text_prompts(windows, 6))
    made = [o.tokens for o in outputs]
    fresh = [t for own in made for t in own[3:20] if t not in windows and t not in own[:3]]
    token = fresh[0]
    breaks = {i: own.index(token) + 1 for i, own in enumerate(made) if token in own[:-1]}
    return _changed(base, tmp_path / "late", _spoil(token)), breaks


def test_generations_alone_fail_a_candidate(tiny: Path, text: Path, tmp_path: Path) -> None:
    late, breaks = _spoiled_in_generations(tiny, text, tmp_path)
    result = _compare(tiny, late, text, generations=6, cache=tmp_path / "cache")
    first, after = min(breaks.items())
    assert result.not_finite == (
        NotFinite("generations", len(breaks), 6, "outputs", f"in that of prompt {first}, after {after} tokens"),
    )
    assert [m.verdict for m in result.metrics] == [Verdict.PASS, Verdict.PASS]
    assert result.verdict is Verdict.FAIL
    positions = result.partings[0].positions
    assert {i: p for i, p in enumerate(positions) if p is not None} == breaks
    (suite,) = ElementTree.fromstring(exports.junit([result]))
    assert suite.get("failures") == "1"
    # what broke is asked again, and found again; the rest is recalled
    again = _compare(tiny, late, text, generations=6, cache=tmp_path / "cache")
    assert again.candidate.recalled == ("text",)
    assert again.not_finite == result.not_finite
    with pytest.raises(QtoolError, match=rf"late: generations: NaN or infinity in .* after {after} tokens: a broken"):
        _compare(late, tiny, text, generations=6)


def test_a_broken_base_is_refused(tiny: Path, text: Path, sets: dict[str, Path], tmp_path: Path) -> None:
    broken = _changed(tiny, tmp_path / "broken", _spoil_a_layer)
    with pytest.raises(QtoolError, match=r"broken: text: .* first for token 1 of window 0: a broken base"):
        _compare(broken, tiny, text)
    late = _changed(tiny, tmp_path / "late", _spoil(load_tokenizer(tiny).convert_tokens_to_ids("~")))
    with pytest.raises(QtoolError, match="late: text: NaN or infinity, first for token 61 of window 1: a broken base"):
        _compare(late, tiny, text)
    plain = tmp_path / "plain.txt"
    plain.write_text(text.read_text().replace("~", "A"))
    for name, where in (("choice", "3 of 60 items, first in 'i7'"), ("cloze", "'line-4'"), ("free", "'line-6'")):
        with pytest.raises(QtoolError, match=rf"late: {name}: .*{where}.*: a broken base"):
            _compare(late, tiny, plain, tasks=[sets[name]])


def test_other_candidates_are_ranked_before_it(tiny: Path, text: Path, tmp_path: Path) -> None:
    broken = _changed(tiny, tmp_path / "broken", _spoil_a_layer)
    options: dict[str, Any] = {"windows": 2, "context": 64, "generations": 0, "tasks": [], "device": "cpu"}
    results = compare_all(tiny, [broken, tiny], data=text, **options)
    assert [r.verdict for r in results] == [Verdict.FAIL, Verdict.PASS]
    page = html(results, ["qtool"])
    assert page.index("<h1>PASS") < page.index("<h1>FAIL")
    assert "not finite" in exports.markdown(results)


def test_the_command_reports_and_exits_as_for_any_fail(
    tiny: Path, text: Path, sets: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = _changed(tiny, tmp_path / "broken", _spoil_a_layer)
    options = ["--windows", "2", "--context", "64", "--data", str(text), "--tasks", str(sets["choice"]), "--no-cache"]
    options += ["--device", "cpu", "--generations", "2", "--out", str(tmp_path / "out"), "--max-drop", "5"]
    assert run(["compare", str(tiny), str(broken), *options, "--history", str(tmp_path / "runs"), "--json"]) == 1
    printed = capfd.readouterr()
    assert _strict((tmp_path / "out" / "compare.json").read_text(encoding="utf-8"))["verdict"] == "FAIL"
    assert json.loads(printed.out, parse_constant=lambda name: pytest.fail(name))["verdict"] == "FAIL"
    assert "ends with an error" not in printed.err
    assert run(["compare", str(tiny), str(broken), *options]) == 1
    printed = capfd.readouterr()
    assert "choice: NaN or infinity in 60 of 60 items" in " ".join(printed.out.split())
    assert "nan" not in printed.out

    assert run(["compare", "--quiet", str(broken), str(tiny), *options]) == 3
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert "a broken base, with which nothing can be compared" in line


def test_lm_eval_tasks_count_broken_documents_as_wrong(tiny: Path, tmp_path: Path) -> None:
    """A task that generates: the answers that break, by document; one whose metric is the lower the better."""
    late = _changed(tiny, tmp_path / "late", _spoil(load_tokenizer(tiny).convert_tokens_to_ids("~")))
    rows = [{"q": f"item {n}{'~' * (n == 2)}", "a": ""} for n in range(4)]

    def dataset(**_: Any) -> Any:
        from datasets import Dataset

        return {"test": Dataset.from_list(rows)}

    config = {
        "task": "mine", "custom_dataset": dataset, "test_split": "test", "output_type": "generate_until",
        "doc_to_text": "q", "doc_to_target": "a", "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 3, "do_sample": False},
    }  # fmt: skip
    lm = QtoolLM(served=serve(late, device="cpu"), tokenizer=load_tokenizer(tiny), keep_broken=True)
    samples = task_runs._evaluate(lm, [config], TaskManager(include_defaults=False), 0)["samples"]["mine"]
    assert lm.broken == {("mine", 2)}
    result = task_runs._named_result("mine", samples, {"exact_match": True}, {2})
    assert (result.scores["2"], result.broken) == (0.0, {"2": ""})
    reverse = task_runs._named_result("mine", samples, {"exact_match": False}, {2})
    assert math.isnan(reverse.scores["2"])
    whole = replace(reverse, scores=dict.fromkeys(reverse.scores, 1.0), broken={})
    (metric,) = judge_all([task_metric(whole, reverse, Thresholds(), seed=0)])
    assert metric.verdict is Verdict.FAIL
    # lm-eval by itself, through our class, stops at the first
    plain = QtoolLM(served=lm.served, tokenizer=lm.tokenizer)
    with pytest.raises(QtoolError, match=r"prompt 2: generating failed: .*NaN"):
        task_runs._evaluate(plain, [config], TaskManager(include_defaults=False), 0)
