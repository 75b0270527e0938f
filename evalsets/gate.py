"""The gate: one verdict per metric and one for all, from paired per-item values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from qtool.evalsets import statistics as st
from qtool.evalsets.statistics import Array, Interval, Verdict
from qtool.evalsets.task_runs import TaskResult
from qtool.quant.errors import QtoolError

KL, PERPLEXITY = "mean token KL", "perplexity"  # names of the metrics of the text


@dataclass(frozen=True)
class Thresholds:
    """How much worse a candidate may be.

    Attributes:
        max_kl: mean KL(base ‖ candidate) per token, in nats.
        max_ppl_increase: relative increase of perplexity (0.03 is 3 %).
        max_drop: accuracy lost, as a fraction of the items (0.02 is two points).
        alpha: family-wise rate of false alarms; intervals are of level 1 − 2·alpha.
        task_drops: (task, `max_drop` of its own).
        ignored: names of metrics and tasks that are measured and judged, but do not count for the verdict.

    Raises:
        QtoolError: a threshold that is not a positive number.
    """

    max_kl: float = 0.1
    max_ppl_increase: float = 0.03
    max_drop: float = 0.02
    alpha: float = st.ALPHA
    task_drops: tuple[tuple[str, float], ...] = ()
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for option, value in (
            ("--max-kl", self.max_kl),
            ("--max-ppl-increase", self.max_ppl_increase),
            ("--max-drop", self.max_drop),
        ):
            if not (math.isfinite(value) and value > 0):
                raise QtoolError(f"{option} must be a positive number, got {value}")

    def drop_of(self, task: str) -> float:
        """The largest drop that one task may have."""
        return dict(self.task_drops).get(task, self.max_drop)

    def check_tasks(self, tasks: Sequence[str]) -> None:
        """Refuse a gate that is about tasks which are not asked, or that leaves nothing to count. Raises QtoolError."""
        named = {name for name, _ in self.task_drops} | (set(self.ignored) - {KL, PERPLEXITY})
        if strange := sorted(named - set(tasks)):
            raise QtoolError(f"the gate names task {strange[0]!r}, which is not asked; see --tasks, --lm-eval-tasks")
        if {KL, PERPLEXITY, *tasks} <= set(self.ignored):
            raise QtoolError("the gate lets no metric count: remove a `counts = false`")


@dataclass(frozen=True)
class GatedMetric:
    """One metric under the gate.

    Attributes:
        name: what is measured; `kind` tells how to print it: "kl", "perplexity", "accuracy" or "score".
        base, candidate: the two values; base None for a divergence from the base.
        loss: how much worse the candidate is, on the threshold's scale (nats, relative increase, fraction of items).
        interval: of `loss`, two-sided, level 1 − 2·alpha: its upper end is the one-sided bound of level 1 − alpha.
        threshold: on the same scale.
        items: how many paired items; `unit` says of what; `missing` how many more there should be; `broken`: for how
            many of them the candidate computes NaN or infinity.
        p: one-sided p of "the candidate is worse"; `p_holm` after Holm's correction; None where there is no such test.
        p_two_sided: exact McNemar p for accuracies.
        losses, gains: items that only the base, and only the candidate, got right.
        detectable: the smallest true loss that would FAIL four times in five, or None.
        settle: items that would settle an INCONCLUSIVE, the loss staying as it is; None where none would.
        counts: whether the verdict of the whole gate depends on it.
        note: a remark that belongs to the verdict.
    """

    name: str
    kind: str
    base: float | None
    candidate: float
    loss: float
    interval: Interval
    threshold: float
    items: int
    unit: str
    verdict: Verdict = Verdict.INCONCLUSIVE
    missing: int = 0
    broken: int = 0
    p: float | None = None
    p_holm: float | None = None
    p_two_sided: float | None = None
    losses: int | None = None
    gains: int | None = None
    chance: float | None = None
    detectable: float | None = None
    settle: int | None = None
    counts: bool = True
    note: str = ""


def divergence_metric(window_kl: Array, thresholds: Thresholds, *, seed: int) -> GatedMetric:
    """Mean token KL, from its mean per window [windows]."""
    mean = float(window_kl.mean())
    return GatedMetric(
        name=KL,
        kind="kl",
        base=None,
        candidate=mean,
        loss=mean,
        interval=st.bootstrap_interval(window_kl, seed=seed, alpha=thresholds.alpha),
        threshold=thresholds.max_kl,
        items=len(window_kl),
        unit="windows",
        settle=st.items_to_settle(
            mean, float(window_kl.std(ddof=1)), len(window_kl), thresholds.max_kl, thresholds.alpha
        ),
        counts=KL not in thresholds.ignored,
    )


def perplexity_metric(base_nll: Array, candidate_nll: Array, thresholds: Thresholds, *, seed: int) -> GatedMetric:
    """Perplexity, from both models' mean negative log-likelihood per window [windows]; resampled by window."""
    delta = candidate_nll - base_nll
    room = math.log1p(thresholds.max_ppl_increase)
    nats = st.bootstrap_interval(delta, seed=seed, alpha=thresholds.alpha)
    with np.errstate(over="ignore"):  # logits that are huge, though finite: a perplexity of infinity says so
        base, candidate = np.exp([base_nll.mean(), candidate_nll.mean()]).tolist()
        loss, low, high = np.expm1([delta.mean(), nats.low, nats.high]).tolist()
    overflows = math.isfinite(delta.mean()) and not math.isfinite(loss)
    return GatedMetric(
        name=PERPLEXITY,
        kind="perplexity",
        base=base,
        candidate=candidate,
        loss=loss,
        interval=Interval(low, high),
        threshold=thresholds.max_ppl_increase,
        items=len(delta),
        unit="windows",
        p=st.paired_t(delta),
        settle=st.items_to_settle(float(delta.mean()), float(delta.std(ddof=1)), len(delta), room, thresholds.alpha),
        counts=PERPLEXITY not in thresholds.ignored,
        note=f"{delta.mean():.4g} nats more per token than the base: too much for a perplexity" if overflows else "",
    )


def task_metric(base: TaskResult, candidate: TaskResult, thresholds: Thresholds, *, seed: int) -> GatedMetric:
    """One task, paired by item id; items that only one model answered count as missing."""
    shared = [item for item in base.scores if item in candidate.scores]
    asked = base.texts.keys() | candidate.texts.keys() | base.scores.keys() | candidate.scores.keys()
    if len(shared) < 2:
        raise QtoolError(f"task {base.name}: {len(shared)} items were answered by both models; at least 2 are needed")
    if base.binary and candidate.binary:
        metric = _accuracy(base, candidate, shared, thresholds, seed)
    else:
        metric = _score(base, candidate, shared, thresholds, seed)
    return replace(
        metric,
        missing=len(asked) - len(shared),
        broken=len(candidate.broken),
        counts=base.name not in thresholds.ignored,
    )


def _accuracy(
    base: TaskResult, candidate: TaskResult, shared: list[str], thresholds: Thresholds, seed: int
) -> GatedMetric:
    flips = st.Flips.of([base.scores[i] == 1 for i in shared], [candidate.scores[i] == 1 for i in shared])
    right = sum(base.scores[i] == 1 for i in shared)
    chance = base.chance
    why = _uninformative(right, len(shared), chance, thresholds.drop_of(base.name), thresholds.alpha)
    return GatedMetric(
        name=f"{base.name} accuracy",
        kind="accuracy",
        base=right / len(shared),
        candidate=sum(candidate.scores[i] == 1 for i in shared) / len(shared),
        loss=flips.drop,
        interval=st.drop_interval(flips, seed=seed, alpha=thresholds.alpha),
        threshold=thresholds.drop_of(base.name),
        items=len(shared),
        unit="items",
        verdict=Verdict.UNINFORMATIVE if why else Verdict.INCONCLUSIVE,
        p=st.mcnemar_drop(flips.losses, flips.gains),
        p_two_sided=st.mcnemar(flips.losses, flips.gains),
        losses=flips.losses,
        gains=flips.gains,
        chance=chance,
        note=why,
    )


def _uninformative(right: int, items: int, chance: float | None, limit: float, alpha: float) -> str:
    """Why a set says nothing about the candidate, or "": the base is no better than guessing, or so little better that
    a candidate that only guesses would lose no more than the limit allows.
    """
    if chance is None:
        return ""
    if st.above_chance(right, items, chance) > alpha or right == 0:
        return f"the base is at chance ({chance:.0%})" if chance else "the base gets no item right"
    if right / items - chance <= limit:
        room = f"{100 * (right / items - chance):.1f} points above chance ({chance:.0%})"
        return f"the base is only {room}, so no loss could pass the limit of {100 * limit:g}"
    return ""


def _score(
    base: TaskResult, candidate: TaskResult, shared: list[str], thresholds: Thresholds, seed: int
) -> GatedMetric:
    """A task whose items score other numbers than right and wrong: losses are relative to the base's mean."""
    b = np.array([base.scores[i] for i in shared])
    c = np.array([candidate.scores[i] for i in shared])
    scale = abs(float(b.mean()))
    difference = (b - c if base.higher_is_better else c - b) / (scale or 1.0)
    return GatedMetric(
        name=f"{base.name} {base.metric}",
        kind="score",
        base=float(b.mean()),
        candidate=float(c.mean()),
        loss=float(difference.mean()),
        interval=st.bootstrap_interval(difference, seed=seed, alpha=thresholds.alpha),
        threshold=thresholds.drop_of(base.name),
        items=len(shared),
        unit="items",
        verdict=Verdict.INCONCLUSIVE if scale else Verdict.UNINFORMATIVE,
        note="" if scale else "the base scores 0 on every item",
        p=st.paired_t(difference),
        settle=st.items_to_settle(
            float(difference.mean()),
            float(difference.std(ddof=1)),
            len(shared),
            thresholds.drop_of(base.name),
            thresholds.alpha,
        ),
    )


def judge_all(metrics: Sequence[GatedMetric], alpha: float = st.ALPHA) -> list[GatedMetric]:
    """Correct the p values over the informative metrics that count (Holm) and set each verdict.

    A divergence has no null hypothesis of its own (it is 0 for equal models only), so its threshold alone decides. A
    metric with items missing may FAIL but never PASS. One for which the candidate computes NaN or infinity FAILs,
    whatever the base knows: it is no test then, and takes no part in the family.
    """
    informative = [m for m in metrics if m.verdict is not Verdict.UNINFORMATIVE and _is_finite(m)]
    family = {m.name: m.p for m in informative if m.p is not None and m.counts}
    adjusted = st.holm(family)
    return [_judged(m, adjusted.get(m.name, m.p), len(adjusted) if m.counts else 1, alpha) for m in metrics]


def verdict_of(metrics: Sequence[GatedMetric]) -> Verdict:
    """The gate's verdict over the judged metrics that count."""
    return st.overall([m.verdict for m in metrics if m.counts])


def _is_finite(metric: GatedMetric) -> bool:
    return math.isfinite(metric.loss) and not metric.broken


def _judged(metric: GatedMetric, p_holm: float | None, family: int, alpha: float) -> GatedMetric:
    if not _is_finite(metric):
        where = f" for {metric.broken} of {metric.items} {metric.unit}" if metric.broken else ""
        broke = f"the candidate computes NaN or infinity{where}"
        note = metric.note or broke if metric.kind == "perplexity" else broke
        return replace(metric, verdict=Verdict.FAIL, p=None, p_two_sided=None, settle=None, note=note)
    if metric.verdict is Verdict.UNINFORMATIVE:
        return replace(metric, settle=None)
    significance = 0.0 if p_holm is None else p_holm
    verdict = st.judge(metric.loss, metric.interval.high, metric.threshold, significance, alpha)
    note, settle, detectable = metric.note, metric.settle, None
    if metric.losses is not None and metric.gains is not None:
        flips = st.Flips(metric.items, metric.losses, metric.gains)
        settle = st.flips_to_settle(flips, metric.threshold, max(family, 1), alpha)
        detectable = st.minimal_detectable_drop(flips.discordant, flips.items, metric.threshold, max(family, 1), alpha)
    if metric.missing:
        note = f"{metric.missing} items have no answer from both models"
        verdict = Verdict.FAIL if verdict is Verdict.FAIL else Verdict.INCONCLUSIVE
    elif verdict is Verdict.INCONCLUSIVE:
        note = f"about {settle:,} {metric.unit} would settle it" if settle else "too close to call"
    settle = settle if verdict is Verdict.INCONCLUSIVE else None
    return replace(metric, verdict=verdict, p_holm=p_holm, settle=settle, detectable=detectable, note=note)
