"""The gate's statistics against closed forms, textbook values, brute force, and a simulation of the whole rule."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from qtool.evalsets import statistics as st
from qtool.quant.errors import QtoolError


def test_bootstrap_means_have_the_mean_and_the_standard_error_of_the_sample() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, size=400)
    means = st.bootstrap_means(values, resamples=20_000, seed=2)
    assert abs(means.mean() - values.mean()) < 0.005
    assert abs(means.std() - values.std() / math.sqrt(400)) < 0.003


def test_bootstrap_by_counts_is_the_bootstrap_by_indices() -> None:
    """The multinomial short cut and plain resampling must have the same quantiles."""
    values = st.Flips(500, 30, 12).differences()
    rng = np.random.default_rng(0)
    brute = values[rng.integers(0, 500, size=(20_000, 500))].mean(axis=1)
    quick = st.bootstrap_means(values, resamples=20_000, seed=1)
    for q in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert abs(np.quantile(brute, q) - np.quantile(quick, q)) <= 0.002 + 1e-9


def test_bootstrap_is_seeded() -> None:
    values = np.arange(30.0)
    assert st.bootstrap_interval(values, seed=5) == st.bootstrap_interval(values, seed=5)
    assert st.bootstrap_interval(values, seed=5) != st.bootstrap_interval(values, seed=6)


def test_bootstrap_interval_of_one_item_is_refused() -> None:
    with pytest.raises(QtoolError, match="at least 2"):
        st.bootstrap_interval(np.array([1.0]))


def test_interval_covers_the_truth_about_nine_times_in_ten() -> None:
    rng = np.random.default_rng(3)
    hits = 0
    for trial in range(400):
        interval = st.bootstrap_interval(rng.exponential(1.0, size=100), seed=trial, resamples=1000)
        hits += interval.low <= 1.0 <= interval.high
    assert 0.85 <= hits / 400 <= 0.94


@pytest.mark.parametrize(
    ("losses", "gains", "two_sided", "one_sided"),
    [
        (0, 0, 1.0, 1.0),
        (5, 0, 2 / 32, 1 / 32),
        (0, 5, 2 / 32, 1.0),
        (8, 2, 2 * (45 + 10 + 1) / 1024, (45 + 10 + 1) / 1024),
    ],
)
def test_mcnemar_is_the_exact_binomial_test(losses: int, gains: int, two_sided: float, one_sided: float) -> None:
    assert st.mcnemar(losses, gains) == pytest.approx(two_sided)
    assert st.mcnemar_drop(losses, gains) == pytest.approx(one_sided)


def test_mcnemar_drop_equals_enumeration() -> None:
    for losses, gains in ((3, 4), (6, 1), (1, 6)):
        flips = list(itertools.product((0, 1), repeat=losses + gains))
        share = sum(sum(f) >= losses for f in flips) / len(flips)
        assert st.mcnemar_drop(losses, gains) == pytest.approx(share)


def test_holm_by_hand() -> None:
    adjusted = st.holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert list(adjusted) == ["a", "b", "c", "d"]
    assert st.holm({}) == {}
    assert st.holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}


def test_standard_error_of_the_reference_case() -> None:
    """n = 500, d = 8 %, no drop: 1.26 points."""
    assert st.standard_error(0.0, 0.08, 500) == pytest.approx(0.01265, abs=1e-5)


def test_flips_count_both_ways() -> None:
    flips = st.Flips.of([True, True, False, False, True], [True, False, True, False, False])
    assert (flips.items, flips.losses, flips.gains) == (5, 2, 1)
    assert flips.drop == pytest.approx(0.2)
    assert flips.discordant == pytest.approx(0.6)
    assert flips.differences().sum() == pytest.approx(1.0)


def test_identical_models_pass_only_with_enough_items() -> None:
    """Nothing flipped: 500 items prove less than two points lost (0.6), 50 do not (5.8)."""
    for items, verdict in ((500, st.Verdict.PASS), (50, st.Verdict.INCONCLUSIVE)):
        interval = st.drop_interval(st.Flips(items, 0, 0))
        assert interval.high == pytest.approx(1 - 0.05 ** (1 / items))
        assert st.judge(0.0, interval.high, 0.02, 1.0) is verdict


def test_judge_needs_size_and_significance_for_a_fail() -> None:
    assert st.judge(0.03, 0.05, 0.02, 0.01) is st.Verdict.FAIL
    assert st.judge(0.03, 0.05, 0.02, 0.20) is st.Verdict.INCONCLUSIVE
    assert st.judge(0.01, 0.05, 0.02, 0.01) is st.Verdict.INCONCLUSIVE
    assert st.judge(0.01, 0.019, 0.02, 0.01) is st.Verdict.PASS


def test_items_to_settle_settles() -> None:
    """At the n it names, the same rates are judged, and a little below they are not."""
    z = 1.6448536
    for drop, discordant in ((0.005, 0.08), (0.03, 0.15)):
        spread = math.sqrt(discordant - drop**2)
        n = st.items_to_settle(drop, spread, 100, 0.02)
        assert n is not None
        room = 0.02 - drop if drop <= 0.02 else drop
        assert z * spread / math.sqrt(n) <= room < z * spread / math.sqrt(n - 2)
    assert st.items_to_settle(0.02, 0.3, 100, 0.02) is None


def test_flips_to_settle_follows_the_exact_test() -> None:
    """Four losses of 120, no gain: p = 1/16; a fifth loss (1/32) settles it at about 120 · 4.5 / 4 items."""
    n = st.flips_to_settle(st.Flips(120, 4, 0), 0.02)
    assert n is not None
    assert 134 <= n <= 140
    within = st.flips_to_settle(st.Flips(500, 12, 10), 0.02)
    assert within == st.items_to_settle(0.004, st.standard_error(0.004, 0.044, 1), 500, 0.02)


def test_overall() -> None:
    p, f, i, u = st.Verdict.PASS, st.Verdict.FAIL, st.Verdict.INCONCLUSIVE, st.Verdict.UNINFORMATIVE
    assert st.overall([p, p]) is p
    assert st.overall([p, u]) is p
    assert st.overall([p, i, f]) is f
    assert st.overall([p, i]) is i
    assert st.overall([u]) is i
    assert st.overall([]) is i


def test_paired_t_matches_the_closed_form_for_two_values() -> None:
    """One degree of freedom: the t distribution is Cauchy, P(T > t) = 1/2 − atan(t)/π."""
    values = np.array([1.0, 3.0])
    t = values.mean() / (values.std(ddof=1) / math.sqrt(2))
    assert st.paired_t(values) == pytest.approx(0.5 - math.atan(t) / math.pi)
    assert st.paired_t(np.array([0.5, 0.5])) == 0.0
    assert st.paired_t(np.zeros(4)) == 1.0


def _simulated_family_verdicts(rng: np.random.Generator, drops: list[float], items: int, d: float) -> list[st.Verdict]:
    """One run of the gate on a family of accuracy metrics whose true drops are known."""
    flips = {}
    for k, drop in enumerate(drops):
        losses, gains, _ = rng.multinomial(items, [(d + drop) / 2, (d - drop) / 2, 1 - d])
        flips[str(k)] = st.Flips(items, int(losses), int(gains))
    adjusted = st.holm({name: st.mcnemar_drop(f.losses, f.gains) for name, f in flips.items()})
    verdicts = []
    for name, f in flips.items():
        means = st.bootstrap_means(f.differences(), resamples=400, seed=int(rng.integers(1 << 30)))
        high = float(np.quantile(means, 0.95))
        verdicts.append(st.judge(f.drop, high, 0.02, adjusted[name]))
    return verdicts


def test_the_gate_seldom_cries_wolf_and_seldom_sleeps() -> None:
    """2,000 simulated runs, five metrics, 500 items, 8 % discordant: no drop FAILs in ≤ 5 %; five points in ≥ 95 %."""
    rng = np.random.default_rng(20)
    runs = 2000

    def family(drops: list[float]) -> list[st.Verdict]:
        return _simulated_family_verdicts(rng, drops, 500, 0.08)

    false_alarms = sum(st.Verdict.FAIL in family([0.0] * 5) for _ in range(runs))
    caught = sum(family([0.05, 0, 0, 0, 0])[0] is st.Verdict.FAIL for _ in range(runs))
    assert false_alarms / runs <= 0.05
    assert caught / runs >= 0.95


def test_minimal_detectable_drop_is_detected_with_the_stated_power() -> None:
    rng = np.random.default_rng(4)
    mdd = st.minimal_detectable_drop(0.08, 500, 0.02)
    runs = 1000
    caught = sum(_simulated_family_verdicts(rng, [mdd], 500, 0.08)[0] is st.Verdict.FAIL for _ in range(runs))
    assert 0.75 <= caught / runs <= 0.90


@pytest.mark.parametrize("items", [2, 3, 8])
def test_interval_over_few_windows_misses_one_time_in_twenty(items: int) -> None:
    """Plain percentiles miss 25 %, 17 % and 9 % at 2, 3 and 8 values: a gate on eight windows needs the true level."""
    rng = np.random.default_rng(7)
    draws = rng.normal(1.0, 0.3, size=(1500, items))
    missed = sum(st.bootstrap_interval(v, seed=i, resamples=500).high < 1.0 for i, v in enumerate(draws))
    assert 0.03 <= missed / 1500 <= 0.085


@pytest.mark.parametrize(("losses", "gains", "items"), [(1, 0, 50), (0, 1, 50), (9, 3, 100), (30, 30, 500)])
def test_score_bound_is_where_the_constrained_likelihood_puts_it(losses: int, gains: int, items: int) -> None:
    """At the bound the score statistic, its variance from a brute-force constrained maximum likelihood, is −1.645."""
    bound = st.score_bound(losses, gains, items)
    rate_gains = np.linspace(1e-9, (1 - bound) / 2 - 1e-9, 400_001)
    rate_losses, same = rate_gains + bound, items - losses - gains
    usable = rate_losses > 0
    likelihood = np.where(
        usable,
        losses * np.log(np.where(usable, rate_losses, 1.0))
        + gains * np.log(rate_gains)
        + same * np.log1p(-rate_losses - rate_gains),
        -np.inf,
    )
    best = rate_gains[likelihood.argmax()]
    variance = items * (2 * best + bound - bound**2)
    assert (losses - gains - items * bound) / math.sqrt(variance) == pytest.approx(-1.6449, abs=2e-3)


@pytest.mark.parametrize(("items", "gain"), [(50, 0.01), (200, 0.0), (500, 0.01)])
def test_a_candidate_at_the_limit_passes_one_time_in_twenty_at_most(items: int, gain: float) -> None:
    rng = np.random.default_rng(4)
    draws = rng.multinomial(items, [0.02 + gain, gain, 0.98 - 2 * gain], size=1000)
    bounds = {(a, b): st.drop_interval(st.Flips(items, a, b)).high for a, b in {(int(a), int(b)) for a, b, _ in draws}}
    passed = sum(bounds[int(a), int(b)] < 0.02 for a, b, _ in draws)
    assert passed / 1000 <= 0.065


def test_a_gain_alone_does_not_prove_that_nothing_is_lost() -> None:
    assert st.drop_interval(st.Flips(50, 0, 1)).high > 0.02
