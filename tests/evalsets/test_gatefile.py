"""The gate file: what it sets, and every way in which it can be wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from qtool.evalsets import gate
from qtool.evalsets import statistics as st
from qtool.evalsets.gate import KL, PERPLEXITY, Thresholds
from qtool.evalsets.gatefile import read_gate
from qtool.evalsets.statistics import Verdict
from qtool.quant.errors import QtoolError

WHOLE = """
alpha = 0.01
[kl]
max = 0.2
[perplexity]
max_increase = 4
counts = false
[accuracy]
max_drop = 1.5
[task."my set"]
max_drop = 3.0
[task.grammar]
counts = false
"""


def test_everything_that_a_file_says(tmp_path: Path) -> None:
    path = tmp_path / "gate.toml"
    path.write_text(WHOLE)
    expected = Thresholds(0.2, 0.04, 0.015, 0.01, (("my set", 0.03),), (PERPLEXITY, "grammar"))
    limits = read_gate(str(path))
    assert limits == expected
    assert limits.drop_of("my set") == 0.03
    assert limits.drop_of("grammar") == 0.015
    path.write_text("# the defaults\n")
    assert read_gate(str(path)) == Thresholds()


def test_a_percentage() -> None:
    assert read_gate("2%") == read_gate(" 2 ") == Thresholds(max_ppl_increase=0.02, max_drop=0.02)


def test_the_documented_example_is_read(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "gate.md").read_text(encoding="utf-8")
    path = tmp_path / "gate.toml"
    path.write_text(text.partition("```toml\n")[2].partition("```")[0], encoding="utf-8")
    assert read_gate(str(path)) == Thresholds(task_drops=(("grammar", 0.03),), ignored=(PERPLEXITY,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alpha = 0.05\nbeta = 1", r"line 2: 'beta' is not known"),
        ("[kl]\nmaxx = 1", r"line 2: 'maxx' is not known; did you mean 'max'\?"),
        ("[perplexty]\nmax_increase = 1", r"line 1: 'perplexty' is not known; did you mean 'perplexity'\?"),
        ("[kl]\nmax = 0.1\n\n[accuracy]\nmax_drop = -2", r"line 5: max_drop must be a positive number, found -2"),
        ("[accuracy]\nmax_drop = 'two'", r"line 2: max_drop must be a number, found 'two'"),
        ("[accuracy]\nmax_drop = true", r"line 2: max_drop must be a number"),
        ("[kl]\nmax = nan", r"line 2: max must be a positive number"),
        ("alpha = 0.5", r"line 1: alpha must lie between"),
        ("[task.a]\ncounts = 1", r"line 2: counts must be true or false, found 1"),
        ("[task.'a.b']\nmax = 1", r"line 2: 'max' is not known"),
        ("[accuracy]\ncounts = false", r"line 2: counts = false belongs"),
        ("kl = 0.1", r"line 1: kl must be a table: write \[kl\]"),
        ("task = 3", r"line 1: task must be tables"),
        ("[kl]\nmax = = 1", r"not valid TOML \(.*line 2"),
        ("", "empty"),
    ],
)
def test_faults_are_refused_with_their_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "gate.toml"
    path.write_text(text)
    with pytest.raises(QtoolError, match=message):
        read_gate(str(path))


@pytest.mark.parametrize("text", ["0%", "two", "-2%", "missing.toml"])
def test_neither_percentage_nor_file(text: str) -> None:
    with pytest.raises(QtoolError, match="percentage"):
        read_gate(text)


def test_tasks_that_are_not_asked_and_gates_that_count_nothing() -> None:
    with pytest.raises(QtoolError, match="names task 'quiz', which is not asked"):
        Thresholds(task_drops=(("quiz", 0.1),)).check_tasks(["grammar"])
    with pytest.raises(QtoolError, match="no metric count"):
        Thresholds(ignored=(KL, PERPLEXITY)).check_tasks([])
    Thresholds(ignored=(KL, PERPLEXITY)).check_tasks(["grammar"])


def test_what_does_not_count_neither_fails_the_model_nor_burdens_the_others() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(3, 0.1, 20)
    limits = Thresholds(ignored=(PERPLEXITY,))
    good = gate.divergence_metric(np.full(20, 0.01) + rng.normal(0, 1e-3, 20), limits, seed=0)
    bad = gate.perplexity_metric(base, base + 0.5 + rng.normal(0, 0.01, 20), limits, seed=0)
    judged = gate.judge_all([good, bad])
    assert [m.verdict for m in judged] == [Verdict.PASS, Verdict.FAIL]
    assert gate.verdict_of(judged) is Verdict.PASS
    assert judged[1].p_holm == judged[1].p
    assert gate.verdict_of(gate.judge_all([good, replace(bad, counts=True)])) is Verdict.FAIL


def test_intervals_follow_alpha() -> None:
    """Normal values: the widened bootstrap gives Student's interval at any level."""
    values = np.random.default_rng(1).normal(size=400)
    for alpha in (0.01, 0.05, 0.2):
        high = st.bootstrap_interval(values, alpha=alpha, resamples=40_000).high
        exact = stats.ttest_1samp(values, 0).confidence_interval(1 - 2 * alpha).high
        assert high - values.mean() == pytest.approx(exact - values.mean(), rel=0.03)
    # no flip in n items: the exact bound 1 − alpha^(1/n)
    assert st.drop_interval(st.Flips(100, 0, 0), alpha=0.01).high == pytest.approx(1 - 0.01**0.01)
    assert st.judge(0.05, 0.08, 0.02, 0.03, alpha=0.05) is Verdict.FAIL
    assert st.judge(0.05, 0.08, 0.02, 0.03, alpha=0.01) is Verdict.INCONCLUSIVE
