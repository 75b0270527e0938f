"""Cloze and generation sets over a stand-in runtime, and in a whole comparison; the noise floor of every set."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from qtool.evalsets.builtin import BUILT_IN
from qtool.evalsets.compare import compare
from qtool.evalsets.exports import markdown
from qtool.evalsets.gate import Thresholds, judge_all, task_metric, verdict_of
from qtool.evalsets.harness import Generated, QtoolLM, serve
from qtool.evalsets.items import ClozeItem, ClozeSet, GenerationItem, GenerationSet
from qtool.evalsets.noise import noise_floor, set_noise, some_of
from qtool.evalsets.report import html
from qtool.evalsets.statistics import Verdict
from qtool.evalsets.task_runs import TaskResult, result_from, run_set
from qtool.quant.documents import load_tokenizer
from qtool.quant.errors import QtoolError


@pytest.fixture
def lm(tiny: Path, fake_served: Any) -> QtoolLM:
    return QtoolLM(served=fake_served(tiny), tokenizer=load_tokenizer(tiny))


def _continuation(lm: QtoolLM, context: str, count: int) -> tuple[list[int], str]:
    """What the model itself says next, by its logits."""
    ids = lm.tok_encode(context)
    for _ in range(count):
        (logits,) = lm.served.prompt_logits([ids])
        ids = [*ids, int(logits[-1].argmax())]
    made = ids[-count:]
    return made, lm.tokenizer.decode(made)


def test_cloze_is_right_where_greedy_decoding_says_it(lm: QtoolLM) -> None:
    for number in range(100):  # many a token is a byte that is no character by itself
        context = f"item {number} is"
        ids, text = _continuation(lm, context, 1)
        if lm.tok_encode(context + text) == [*lm.tok_encode(context), *ids]:
            break
    else:
        pytest.fail("no context whose next token survives being written as text")
    items = (ClozeItem("said", context, text, ""), ClozeItem("not", context, "zzz"))
    result = run_set(lm, ClozeSet("mine", items, "here"))
    assert result.scores == {"said": 1.0, "not": 0.0}
    assert (result.metric, result.chance, result.binary) == ("accuracy", 0.0, True)


def test_generation_gives_the_greedy_output_and_its_score(lm: QtoolLM) -> None:
    ids, text = _continuation(lm, "in the end", 5)
    items = (
        GenerationItem("whole", "in the end", (text,), max_tokens=5),
        GenerationItem("other", "in the end", ("no",), max_tokens=5),
    )
    result = run_set(lm, GenerationSet("mine", items, "here", "exact"))
    assert result.scores == {"whole": float(bool(text.strip())), "other": 0.0}
    assert result.outputs == {name: Generated(text, tuple(ids)) for name in ("whole", "other")}
    assert result_from(json.loads(json.dumps(asdict(result)))) == result


def test_an_output_as_long_as_the_model_is_refused_before_work(lm: QtoolLM) -> None:
    items = (GenerationItem("a", "x", ("y",), max_tokens=128),)
    with pytest.raises(QtoolError, match="128 tokens of output leave no room"):
        run_set(lm, GenerationSet("mine", items, "here", "exact"))


def test_own_sets_of_all_kinds_join_the_gate(tiny: Path, tiny_noisy: Path, tmp_path: Path, fake_served: Any) -> None:
    """A set that the base always answers fails a candidate that is broken; what it never answers says nothing."""
    contexts = [f"item {n} is" for n in range(12)]
    rows = {
        "found": [{"context": c, "target": ".", "metric": "regex", "max_tokens": 3} for c in contexts],
        "never": [{"context": c, "target": "Q" * 9, "metric": "exact", "max_tokens": 3} for c in contexts],
        "cloze": [{"context": c, "target": "xyz", "metric": "cloze"} for c in contexts],
    }
    files = []
    for name, lines in rows.items():
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("\n".join(map(json.dumps, lines)))
    result = compare(
        tiny, tiny_noisy, windows=2, context=64, generations=2, tasks=files, serve=fake_served,
        thresholds=Thresholds(max_drop=0.5),
    )  # fmt: skip
    by_name = {m.name: m for m in result.metrics}
    assert by_name["found accuracy"].verdict is Verdict.PASS
    assert by_name["found accuracy"].p_holm == 1.0
    for name in ("never", "cloze"):
        metric = by_name[f"{name} accuracy"]
        assert (metric.base, metric.verdict) == (0.0, Verdict.UNINFORMATIVE)
        assert any(f"{name} accuracy: the base gets no item right" in note for note in result.notes)
    assert [p.name for p in result.partings] == ["text", "found", "never"]
    assert [(s.name, s.items, s.flips) for s in result.noise.sets] == [(n, 12, 0) for n in rows]
    assert (result.noise.prompts, result.noise.parted) == (2, 0)
    page = html([result], ["qtool"])
    assert "Where greedy generations part" in page
    assert "Noise floor" in page
    assert "half part within" in markdown([result])


def _answers(margins: list[float]) -> TaskResult:
    ids = [str(i) for i in range(len(margins))]
    scores = {i: float(m > 0) for i, m in zip(ids, margins)}
    return TaskResult("t", "accuracy", 0.5, scores, None, dict(zip(ids, margins)), True, {})


def test_noise_of_a_set_by_hand() -> None:
    noise = set_noise(_answers([1.0, -0.02, 0.03, 0.5]), _answers([1.01, 0.02]))
    assert (noise.items, noise.flips, noise.close) == (2, 1, 2)
    assert noise.max_margin_change == pytest.approx(0.04)
    floor = noise_floor({"mean_kl": 0.0, "max_kl": 0.1, "tokens": 5}, [noise], [Generated("", (1,))] * 2,
                        [Generated("", (1,)), Generated("", (2,))])  # fmt: skip
    assert (floor.items, floor.flips, floor.prompts, floor.parted) == (2, 1, 2, 1)
    empty = noise_floor({"mean_kl": 0.0, "max_kl": 0.0, "tokens": 5}, [], [], [])
    assert (empty.flips, empty.parted, empty.max_margin_change) == (None, None, None)


def test_some_items_of_a_set_are_asked_again_in_reverse() -> None:
    items = tuple(ClozeItem(str(i), "a", "b") for i in range(500))
    again = some_of(ClozeSet("s", items, "here"))
    assert [i.id for i in again.items] == [str(i) for i in range(480, -1, -20)]
    assert len(some_of(ClozeSet("s", items[:7], "here")).items) == 7


@pytest.mark.model
@pytest.mark.slow
def test_what_the_default_model_cannot_do_never_passes(default_model: Path) -> None:
    """100 questions in Chinese: no better than guessing, so the model against itself is no pass."""
    lm = QtoolLM(served=serve(default_model, dtype="float32", device="cpu"), tokenizer=load_tokenizer(default_model))
    asked = BUILT_IN["chinese"]()
    result = run_set(lm, replace(asked, items=asked.items[::5]))
    (metric,) = judge_all([task_metric(result, result, Thresholds(), seed=0)])
    assert metric.verdict is Verdict.UNINFORMATIVE, metric.base
    assert verdict_of([metric]) is Verdict.INCONCLUSIVE
