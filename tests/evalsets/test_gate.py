"""The gate's verdicts on metrics whose right verdict is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from qtool.evalsets import gate
from qtool.evalsets.gate import GatedMetric, Thresholds
from qtool.evalsets.report_cells import metric_row
from qtool.evalsets.statistics import Verdict
from qtool.evalsets.task_runs import TaskResult
from qtool.quant.errors import QtoolError

LIMITS = Thresholds()


def _task(right: list[bool], *, chance: float | None = 0.25, total: int | None = None) -> TaskResult:
    scores = {str(i): float(r) for i, r in enumerate(right)}
    texts = {str(i): "text" for i in range(total or len(right))}
    return TaskResult("quiz", "accuracy", chance, scores, None, None, True, texts)


def _one(metric: GatedMetric) -> GatedMetric:
    return gate.judge_all([metric])[0]


def test_kl_is_judged_by_its_threshold() -> None:
    spread = np.array([-0.01, 0.01, 0.005, -0.005])
    for mean, verdict in ((0.003, Verdict.PASS), (0.478, Verdict.FAIL), (0.098, Verdict.INCONCLUSIVE)):
        metric = _one(gate.divergence_metric(mean + spread, LIMITS, seed=0))
        assert metric.verdict is verdict
        assert metric.p_holm is None
        assert (metric.settle is not None) == (verdict is Verdict.INCONCLUSIVE)


def test_perplexity_of_known_windows() -> None:
    base = np.array([3.0, 3.2, 3.4, 3.6])
    worse = _one(gate.perplexity_metric(base, base + 0.4 + np.array([0.01, -0.01, 0.02, 0.0]), LIMITS, seed=0))
    assert worse.verdict is Verdict.FAIL
    assert worse.base == pytest.approx(math.exp(3.3))
    assert worse.loss == pytest.approx(math.expm1(0.405))
    assert worse.interval.low < worse.loss < worse.interval.high
    same = _one(gate.perplexity_metric(base, base + 0.002, LIMITS, seed=0))
    assert same.verdict is Verdict.PASS
    noisy = _one(gate.perplexity_metric(base, base + np.array([0.2, -0.15, 0.1, -0.05]), LIMITS, seed=0))
    assert noisy.verdict is Verdict.INCONCLUSIVE


@pytest.mark.filterwarnings("error")
def test_a_perplexity_too_large_for_a_number_fails_and_is_no_nan() -> None:
    """Logits may be huge and finite: e^800 is beyond float64, 800 nats are not."""
    base = np.array([3.0, 3.2, 3.4, 3.6])
    worse = _one(gate.perplexity_metric(base, base + 800, LIMITS, seed=0))
    assert worse.verdict is Verdict.FAIL
    assert worse.note == "800 nats more per token than the base: too much for a perplexity"
    assert metric_row(worse)[:4] == ("perplexity", "27.113", "not finite", "not finite")
    same = _one(gate.perplexity_metric(base + 800, base + 800, LIMITS, seed=0))
    assert same.verdict is Verdict.PASS
    assert metric_row(same)[1:3] == ("not finite", "not finite")
    broken = _one(gate.perplexity_metric(base, base * math.nan, LIMITS, seed=0))
    assert broken.note == "the candidate computes NaN or infinity"


def test_numbers_without_end_are_shown_short() -> None:
    cells = metric_row(_one(gate.divergence_metric(np.array([2e30, 2.1e30, 1.9e30]), LIMITS, seed=0)))
    assert cells[2] == "2e+30"
    assert max(map(len, cells)) < 30


def test_accuracy_drop_of_six_points_fails_and_tells_its_flips() -> None:
    base = [True] * 400 + [False] * 100
    candidate = [True] * 365 + [False] * 35 + [True] * 5 + [False] * 95
    metric = _one(gate.task_metric(_task(base), _task(candidate), LIMITS, seed=0))
    assert (metric.losses, metric.gains, metric.items) == (35, 5, 500)
    assert metric.loss == pytest.approx(0.06)
    assert metric.verdict is Verdict.FAIL


def test_items_missing_never_pass_but_may_fail() -> None:
    right = [True] * 400 + [False] * 99
    passed = _one(gate.task_metric(_task(right), _task(right), LIMITS, seed=0))
    assert passed.verdict is Verdict.PASS
    short = _one(gate.task_metric(_task(right, total=500), _task(right, total=500), LIMITS, seed=0))
    assert short.missing == 1
    assert short.verdict is Verdict.INCONCLUSIVE
    dropped = _one(gate.task_metric(_task(right), _task(right[:-1], total=499), LIMITS, seed=0))
    assert dropped.missing == 1
    assert dropped.verdict is Verdict.INCONCLUSIVE
    broken = _one(gate.task_metric(_task(right), _task([False] * 498, total=499), LIMITS, seed=0))
    assert broken.verdict is Verdict.FAIL


def test_a_task_at_chance_is_uninformative() -> None:
    right = [i % 4 == 0 for i in range(500)]
    metric = _one(gate.task_metric(_task(right), _task(right), LIMITS, seed=0))
    assert metric.verdict is Verdict.UNINFORMATIVE
    assert "chance" in metric.note


@pytest.mark.parametrize(
    ("right", "chance", "note"),
    [
        (0, 0.0, "gets no item right"),
        (8, 0.0, "only 1.6 points above chance"),  # whatever is lost, it is no more than the limit
        (134, 0.25, "at chance (25%)"),
        (11, 0.0, ""),
        (160, 0.25, ""),
        (100, None, ""),
    ],
)
def test_a_set_that_cannot_fail_is_uninformative(right: int, chance: float | None, note: str) -> None:
    answers = [i < right for i in range(500)]
    task = replace(_task(answers), chance=chance)
    metric = _one(gate.task_metric(task, task, LIMITS, seed=0))
    assert note in metric.note
    assert metric.verdict is (Verdict.UNINFORMATIVE if note else Verdict.PASS)
    assert gate.verdict_of([metric]) is (Verdict.INCONCLUSIVE if note else Verdict.PASS)


def test_little_above_chance_on_very_many_items_is_uninformative_too() -> None:
    """1.8 points above chance are significant at 20,000 items, but no more than the limit of 2 can be lost."""
    answers = [i % 1000 < 268 for i in range(20_000)]
    metric = _one(gate.task_metric(_task(answers), _task(answers), LIMITS, seed=0))
    assert metric.verdict is Verdict.UNINFORMATIVE
    assert "only 1.8 points above chance (25%)" in metric.note


def test_scores_that_are_all_zero_are_uninformative() -> None:
    base = TaskResult("r", "rougeL", None, {str(i): 0.0 for i in range(9)}, None, None, True, {}, graded=True)
    better = replace(base, scores={str(i): 0.5 for i in range(9)})
    for candidate in (base, better):
        metric = _one(gate.task_metric(base, candidate, LIMITS, seed=0))
        assert metric.kind == "score"
        assert metric.verdict is Verdict.UNINFORMATIVE


def test_uninformative_metrics_do_not_weigh_on_the_others() -> None:
    """Holm's family is the informative metrics alone."""
    noise = [i % 4 == 0 for i in range(500)]
    useless = gate.task_metric(_task(noise), _task(noise), LIMITS, seed=0)
    real = gate.task_metric(_task([True] * 500), _task([True] * 485 + [False] * 15), LIMITS, seed=0)
    alone = gate.judge_all([real])[0]
    beside = gate.judge_all([replace(useless, name="other"), real])[1]
    assert alone.p_holm == beside.p_holm == real.p


def test_a_candidate_that_is_not_finite_fails() -> None:
    broken = np.array([3.0, math.nan, 3.0])
    metrics = [
        gate.divergence_metric(broken, LIMITS, seed=0),
        gate.perplexity_metric(np.array([3.0, 3.0, 3.0]), broken, LIMITS, seed=0),
    ]
    assert [m.verdict for m in gate.judge_all(metrics)] == [Verdict.FAIL, Verdict.FAIL]


def test_scores_that_are_not_right_or_wrong() -> None:
    rng = np.random.default_rng(0)
    b = rng.uniform(0.4, 0.6, 300)
    base = TaskResult("rouge", "rouge", None, {str(i): v for i, v in enumerate(b)}, None, None, True, {})
    worse = replace(base, scores={k: 0.9 * v for k, v in base.scores.items()})
    metric = _one(gate.task_metric(base, worse, LIMITS, seed=0))
    assert metric.kind == "score"
    assert metric.loss == pytest.approx(0.1)
    assert metric.verdict is Verdict.FAIL
    assert _one(gate.task_metric(base, base, LIMITS, seed=0)).verdict is Verdict.PASS


@pytest.mark.parametrize("field", ["max_kl", "max_ppl_increase", "max_drop"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_thresholds_that_make_no_sense_are_refused(field: str, value: float) -> None:
    with pytest.raises(QtoolError, match=f"--{field.replace('_', '-')}"):
        Thresholds(**{field: value})
