"""Paired statistics of the regression gate: intervals, tests, verdicts, and how many items would settle a doubt.

Both models answer the same items, so every test here is on per-item differences. Losses are always positive numbers
here: `drop` > 0 means that the candidate is worse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from qtool.quant.errors import QtoolError

Array = NDArray[np.float64]

ALPHA = 0.05  # the default family-wise rate of false alarms, and one minus the level of every one-sided bound
POWER = 0.80  # at which the minimal detectable drop is stated
RESAMPLES = 10_000


class Verdict(StrEnum):
    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    UNINFORMATIVE = "UNINFORMATIVE"  # the base is at chance: says nothing about the candidate, never counts as PASS


@dataclass(frozen=True)
class Interval:
    """A two-sided interval of level 1 − 2·alpha: its upper end is the one-sided bound of level 1 − alpha."""

    low: float
    high: float


def bootstrap_means(values: Array, *, resamples: int = RESAMPLES, seed: int = 0) -> Array:
    """Means of `resamples` samples drawn with replacement from `values` [n]; returns [resamples] float64.

    Efron 1979. Values of few kinds (per-item differences of right and wrong are −1, 0, 1) are drawn as counts from a
    multinomial, which is the same distribution at a fraction of the work.
    """
    rng = np.random.default_rng(seed)
    kinds, counts = np.unique(values, return_counts=True)
    n = len(values)
    if len(kinds) <= 8:
        drawn: Array = rng.multinomial(n, counts / n, size=resamples) @ kinds / n
        return drawn
    rows = max(1, 4_000_000 // n)  # at most 32 MB of indices at a time
    parts = [
        values[rng.integers(0, n, size=(min(rows, resamples - start), n))].mean(axis=1)
        for start in range(0, resamples, rows)
    ]
    return np.concatenate(parts)


def bootstrap_interval(values: Array, *, seed: int = 0, resamples: int = RESAMPLES, alpha: float = ALPHA) -> Interval:
    """Bootstrap interval of the mean of `values`. Raises QtoolError for fewer than two values.

    Percentiles of a bootstrap are too near to the mean where values are few: they miss the n − 1 in the variance and
    the width of Student's t. Their distances from the mean are widened by both, which for normal values gives the t
    interval at any n (after Hesterberg 2015, "What teachers should know about the bootstrap"); at n = 500 it is 0.3 %.
    """
    n = len(values)
    if n < 2:
        raise QtoolError(f"an interval needs at least 2 items, got {n}")
    means = bootstrap_means(values, resamples=resamples, seed=seed)
    widening = stats.t.ppf(1 - alpha, n - 1) / stats.norm.ppf(1 - alpha) * math.sqrt(n / (n - 1))
    mean = values.mean()
    low, high = mean + widening * (np.quantile(means, [alpha, 1 - alpha]) - mean)
    return Interval(float(low), float(high))


@dataclass(frozen=True)
class Flips:
    """How two models' right and wrong answers to the same `items` differ."""

    items: int
    losses: int  # base right, candidate wrong
    gains: int  # base wrong, candidate right

    @classmethod
    def of(cls, base: Sequence[bool], candidate: Sequence[bool]) -> Flips:
        pairs = list(zip(base, candidate, strict=True))
        return cls(len(pairs), sum(b and not c for b, c in pairs), sum(c and not b for b, c in pairs))

    @property
    def discordant(self) -> float:
        """Share of items on which the models differ, in [0, 1]."""
        return (self.losses + self.gains) / self.items

    @property
    def drop(self) -> float:
        """Accuracy lost, as a fraction of the items; negative where the candidate gained."""
        return (self.losses - self.gains) / self.items

    def differences(self) -> Array:
        """Per-item drop [items]: 1 lost, −1 gained, 0 the same."""
        same = self.items - self.losses - self.gains
        return np.repeat(np.array([1.0, -1.0, 0.0]), [self.losses, self.gains, same])


def standard_error(drop: float, discordant: float, items: float) -> float:
    """SE of a paired difference of proportions: √((d − Δ²)/n)."""
    return math.sqrt(max(discordant - drop * drop, 0.0) / items)


def mcnemar(losses: int, gains: int) -> float:
    """Exact two-sided McNemar p: are losses and gains equally likely? 1.0 where nothing flipped. McNemar 1947."""
    return 1.0 if losses + gains == 0 else float(stats.binomtest(losses, losses + gains, 0.5).pvalue)


def mcnemar_drop(losses: int, gains: int) -> float:
    """Exact one-sided McNemar p for a drop: P(at least `losses` of the flips are losses | both equally likely)."""
    return float(stats.binom.sf(losses - 1, losses + gains, 0.5))


def paired_t(differences: Array) -> float:
    """One-sided p of a paired t-test for mean difference > 0. Constant differences: 0.0 where positive, else 1.0."""
    if np.ptp(differences) == 0:
        return 0.0 if differences[0] > 0 else 1.0
    return float(stats.ttest_1samp(differences, 0.0, alternative="greater").pvalue)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm-adjusted p values over a family of tests, step-down, monotone, capped at 1. Holm 1979."""
    adjusted: dict[str, float] = {}
    running = 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda entry: entry[1])):
        running = max(running, min(1.0, p * (len(p_values) - rank)))
        adjusted[name] = running
    return {name: adjusted[name] for name in p_values}


def above_chance(correct: int, items: int, chance: float) -> float:
    """One-sided exact binomial p that a model is better than guessing."""
    return float(stats.binomtest(correct, items, chance, alternative="greater").pvalue)


def drop_interval(flips: Flips, *, seed: int = 0, alpha: float = ALPHA) -> Interval:
    """Interval of the accuracy drop (a fraction): the paired bootstrap's, widened where the score interval is wider.

    The bootstrap cannot draw a kind of flip that was not seen: with few flips its ends lie too near to the drop (one
    gain and no loss in 50 items would prove that nothing can be lost). The score interval does not have that fault.
    Where nothing flipped the ends are the exact (Clopper–Pearson) one-sided bounds of a rate that was observed zero
    times: 1 − alpha^(1/n).
    """
    if flips.losses + flips.gains == 0:
        bound = 1 - alpha ** (1 / flips.items)
        return Interval(-bound, bound)
    drawn = bootstrap_interval(flips.differences(), seed=seed, alpha=alpha)
    low = -score_bound(flips.gains, flips.losses, flips.items, alpha)
    return Interval(min(drawn.low, low), max(drawn.high, score_bound(flips.losses, flips.gains, flips.items, alpha)))


def score_bound(losses: int, gains: int, items: int, alpha: float = ALPHA) -> float:
    """Upper one-sided bound of level 1 − alpha of the paired difference (losses − gains) / items, by inverting the
    score test, whose variance is taken at the difference that is tested. Tango 1998.
    """
    z = float(stats.norm.ppf(1 - alpha))

    def excess(difference: float) -> float:
        """How far the test statistic lies above −z: positive inside the interval."""
        b = -losses - gains + (2 * items - losses + gains) * difference
        c = -gains * difference * (1 - difference)
        rate = (math.sqrt(max(b * b - 8 * items * c, 0.0)) - b) / (4 * items)  # of gains, most likely there
        variance = items * (2 * rate + difference * (1 - difference))
        return losses - gains - items * difference + z * math.sqrt(max(variance, 0.0))

    low, high = (losses - gains) / items, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


def judge(drop: float, upper: float, threshold: float, p_adjusted: float, alpha: float = ALPHA) -> Verdict:
    """The gate's rule for one metric, on the drop, its one-sided upper bound, and the Holm-adjusted p of the drop.

    PASS where even the bound is within the threshold; FAIL where the drop is beyond it and significant; else
    INCONCLUSIVE.
    """
    if upper < threshold:
        return Verdict.PASS
    if drop > threshold and p_adjusted <= alpha:
        return Verdict.FAIL
    return Verdict.INCONCLUSIVE


def items_to_settle(drop: float, spread: float, items: int, threshold: float, alpha: float = ALPHA) -> int | None:
    """Items at which the same drop would be judged PASS or FAIL, were it to stay as it is; None where none would.

    Args:
        drop: the mean of the per-item differences; `spread`: their standard deviation.
        items: how many there are now (the answer is never below it).

    A drop within the threshold must keep z·spread/√n below the room that is left; one beyond it must keep it below
    the drop itself.
    """
    room = threshold - drop if drop <= threshold else drop
    if not math.isfinite(room) or room <= 0:
        return None
    z = float(stats.norm.ppf(1 - alpha))
    return max(items + 1, math.ceil((z * spread / room) ** 2))


def flips_to_settle(flips: Flips, threshold: float, family: int = 1, alpha: float = ALPHA) -> int | None:
    """Items at which an accuracy would be judged PASS or FAIL, were flips to go on at the same rates; None: never.

    A drop beyond the threshold is followed with the exact test that it must pass (alpha / family, Holm's worst step),
    in steps of 2 %.
    """
    if flips.drop <= threshold:
        spread = standard_error(flips.drop, flips.discordant, 1)
        return items_to_settle(flips.drop, spread, flips.items, threshold, alpha)
    items = flips.items
    while items < 1000 * flips.items:
        items = math.ceil(items * 1.02)
        losses, gains = (round(count * items / flips.items) for count in (flips.losses, flips.gains))
        if mcnemar_drop(losses, gains) * family <= alpha:
            return items
    return None


def minimal_detectable_drop(
    discordant: float, items: int, threshold: float, family: int = 1, alpha: float = ALPHA
) -> float:
    """The smallest true accuracy drop (a fraction) that FAILs with probability POWER, at this many items.

    A FAIL needs a drop beyond the threshold and a significant one after Holm's worst step (alpha / family). One item
    is added for the exact test's discreteness (the continuity correction of a difference of counts).
    """
    se = math.sqrt(max(discordant, 1 / items) / items)
    z_power = float(stats.norm.ppf(POWER))
    z_alpha = float(stats.norm.ppf(1 - alpha / family))
    return max(threshold, z_alpha * se) + z_power * se + 1 / items


def overall(verdicts: Sequence[Verdict]) -> Verdict:
    """The gate's verdict: any FAIL fails; all PASS passes; anything else (nothing to judge too) is INCONCLUSIVE.

    An uninformative metric is set aside, but never turns into a pass: if nothing else speaks, the answer is open.
    """
    informative = [v for v in verdicts if v is not Verdict.UNINFORMATIVE]
    if Verdict.FAIL in informative:
        return Verdict.FAIL
    if informative and all(v is Verdict.PASS for v in informative):
        return Verdict.PASS
    return Verdict.INCONCLUSIVE
