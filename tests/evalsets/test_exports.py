"""JSON against its schema, JUnit XML, Markdown, and the ranking of several candidates."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from qtool.evalsets import exports
from qtool.evalsets.compare import Comparison, compare
from qtool.evalsets.gate import KL, Thresholds
from qtool.evalsets.ranking import ranked, ranking, worst_verdict
from qtool.evalsets.report import html, write_reports
from qtool.evalsets.statistics import Verdict

jsonschema = pytest.importorskip("jsonschema")


@pytest.fixture(scope="module")
def failed(tiny: Path, tiny_noisy: Path, fake_served: Any, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """One failed comparison; KL does not count in it."""
    path = tmp_path_factory.mktemp("task") / "a|b.jsonl"
    rows = [{"id": n, "context": f"item {n}", "choices": ["x" * 30, "y"], "answer": 1} for n in range(60)]
    path.write_text("\n".join(map(json.dumps, rows)))
    limits = Thresholds(max_drop=0.05, ignored=(KL,))
    return compare(
        tiny, tiny_noisy, windows=4, context=64, generations=2, tasks=[path], thresholds=limits, serve=fake_served
    )


@pytest.fixture(scope="module")
def others(failed: Comparison) -> list[Comparison]:
    """Candidates of other verdicts and sizes, in no order."""

    def named(name: str, verdict: Verdict, size: int) -> Comparison:
        return replace(failed, verdict=verdict, candidate=replace(failed.candidate, name=name, bytes=size))

    return [
        named("fails, tiny", Verdict.FAIL, 10),
        named("passes, large", Verdict.PASS, 300),
        named("open", Verdict.INCONCLUSIVE, 100),
        named("passes, small", Verdict.PASS, 200),
    ]


@pytest.fixture(scope="module")
def validate() -> Callable[[Any], None]:
    schema = json.loads(files("qtool.evalsets").joinpath("compare.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema).validate


def test_compare_json_follows_its_schema(
    failed: Comparison, others: list[Comparison], validate: Callable[[Any], None], tmp_path: Path
) -> None:
    for results in ([failed], others):
        _, path = write_reports(results, tmp_path / str(len(results)), ["qtool", "compare"])
        document = json.loads(path.read_text(encoding="utf-8"))
        validate(document)
        for spoiled in ({**document, "more": 1}, {**document, "verdict": "GOOD"}, {**document, "qtool_compare": 2}):
            with pytest.raises(jsonschema.ValidationError):
                validate(spoiled)


def test_what_passes_comes_first_and_the_smaller_before_the_larger(others: list[Comparison]) -> None:
    names = ["passes, small", "passes, large", "open", "fails, tiny"]
    assert [c.candidate.name for c in ranked(others)] == names
    assert [(r.rank, r.candidate) for r in ranking(others)] == list(enumerate(names, 1))
    assert worst_verdict(others) is Verdict.FAIL
    assert worst_verdict(others[1:]) is Verdict.INCONCLUSIVE
    assert worst_verdict([others[1], others[3]]) is Verdict.PASS
    page = html(others, ["qtool"])
    places = [page.index(f"<b>{name}</b>") for name in names]
    assert places == sorted(places)
    assert "4 candidates" in page


def test_junit_counts_what_the_gate_found(failed: Comparison, others: list[Comparison]) -> None:
    root = ElementTree.fromstring(exports.junit([failed]))
    (suite,) = root
    assert (suite.get("tests"), suite.get("skipped")) == ("4", "1")  # KL does not count; all numbers are finite
    verdicts = {m.name: m.verdict for m in failed.metrics}
    assert verdicts["perplexity"] is Verdict.FAIL
    cases = {case.get("name"): case for case in suite}
    failure = cases["perplexity"].find("failure")
    assert failure is not None
    assert failure.get("type") == "FAIL"
    assert "limit ≤ +3 %" in str(failure.get("message"))
    assert cases[KL].find("skipped") is not None
    expected = sum(v is Verdict.FAIL for name, v in verdicts.items() if name != KL)
    assert suite.get("failures") == str(expected)
    assert len(ElementTree.fromstring(exports.junit(others))) == 4

    rude = replace(failed, candidate=replace(failed.candidate, name='a\x00<b>&"\ud800'))
    assert ElementTree.fromstring(exports.junit([rude]))[0].get("name", "").startswith('a�<b>&"�')


def test_an_open_metric_is_an_error_and_a_pass_is_neither(failed: Comparison) -> None:
    first, second, third = failed.metrics
    mixed = replace(
        failed,
        metrics=(
            replace(first, verdict=Verdict.PASS, counts=True),
            replace(second, verdict=Verdict.INCONCLUSIVE),
            replace(third, verdict=Verdict.UNINFORMATIVE),
        ),
    )
    suite = ElementTree.fromstring(exports.junit([mixed]))[0]
    outcomes = [{child.tag for child in case} - {"system-out"} for case in suite]
    assert outcomes == [set(), {"error"}, {"skipped"}, set()]  # the last: all numbers are finite


def test_markdown_tables_have_equal_rows(failed: Comparison, others: list[Comparison]) -> None:
    text = exports.markdown([failed])
    assert text.startswith("## ❌ FAIL: ")
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(failed.metrics)
    assert {line.replace("\\|", "").count("|") for line in table} == {10}
    assert "a\\|b accuracy" in text
    assert "(does not count)" in text
    several = exports.markdown(others)
    assert several.startswith("## ❌ FAIL: 4 candidates")
    assert several.index("| 1 | passes, small") < several.index("| 4 | fails, tiny")
