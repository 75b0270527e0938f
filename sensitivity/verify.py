"""Plans measured as a whole, and the correction that makes summed damages predict what is measured.

Damages are those of one group rounded alone. Errors of many groups add up to more than their sum (all push the logits
the same way, where they do not cancel), and to less where the divergence saturates: over the range of useful plans both
together are close to a power of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qtool.quant.calibration import Block, BlockWalker
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.hidden_states import HiddenStates
from qtool.quant.progress import ProgressFn, silent
from qtool.quant.scheme import FLOAT, QuantPlan
from qtool.sensitivity.allocate import Allocation, Keep, Latency, Limits, allocate, greedy
from qtool.sensitivity.divergence import mean_kl
from qtool.sensitivity.record import Sensitivity
from qtool.sensitivity.rounding import batch_tokens, round_block, rounding_for

TOLERANCE = 0.10  # a prediction that misses the measurement by more is corrected
_EXPONENTS = (0.25, 4.0)  # what a correction may have
_LOG_LARGEST = 27.0  # of a sum of damages
_ATTEMPTS = 6  # to come close to a KL from below


@dataclass(frozen=True)
class Correction:
    """KL = scale · (summed damage)^exponent, both in nats where the metric's unit is; fitted to `points`.

    Attributes:
        points: (summed damage, measured KL) of the plans that it was fitted to.
    """

    scale: float = 1.0
    exponent: float = 1.0
    points: tuple[tuple[float, float], ...] = ()

    def kl(self, damage: float) -> float:
        """The KL that a plan of this summed damage is predicted to have, nats per token."""
        return self.scale * damage**self.exponent if damage > 0 else 0.0

    def damage(self, kl: float) -> float:
        """The summed damage at which that KL is predicted."""
        return math.exp(min(_LOG_LARGEST, (math.log(kl) - math.log(self.scale)) / self.exponent))


def fit_correction(points: Sequence[tuple[float, float]]) -> Correction:
    """Least squares in logarithms over (summed damage, measured KL); one point gives a scale alone.

    Points where either is zero say nothing. An exponent that the points do not determine, or that is beyond
    _EXPONENTS (measurements of noise), stays 1.
    """
    usable = [(d, kl) for d, kl in points if d > 0 and kl > 0]
    if not usable:
        return Correction(points=tuple(points))
    x, y = np.log(np.array(usable)).T
    spread = float(((x - x.mean()) ** 2).sum())
    exponent = float(((x - x.mean()) * (y - y.mean())).sum() / spread) if spread > 1e-6 else 1.0
    if not _EXPONENTS[0] <= exponent <= _EXPONENTS[1]:
        exponent = 1.0
    return Correction(math.exp(float(y.mean()) - exponent * float(x.mean())), exponent, tuple(points))


def misses(predicted: float, measured: float) -> bool:
    """Whether a prediction is off by more than TOLERANCE of what was measured."""
    return abs(predicted - measured) > TOLERANCE * measured


def joint_kl(
    checkpoint: Checkpoint,
    tokens: Tensor,
    plans: Sequence[QuantPlan],
    *,
    rounding: str = "rtn",
    device: torch.device,
    progress: ProgressFn = silent,
) -> list[float]:
    """KL(16-bit ‖ plan) in nats, mean over tokens, of every plan as a whole.

    All plans walk through the blocks together, so that each block is read once. Memory: the hidden states of all
    samples for each plan, and the logits of one batch.

    Args:
        checkpoint: the 16-bit model.
        tokens: [num_sequences, seq_len] int64.
        rounding: `rtn`, or `gptq`: every plan is quantized by GPTQ on one half of the tokens and measured on the other.
    """
    walker = BlockWalker(checkpoint, tokens, device=device, batch_tokens=batch_tokens(tokens))
    how = rounding_for(rounding, walker)
    states = [list(walker.states) for _ in plans]
    for block in walker:
        for plan, batches in zip(plans, states, strict=True):
            originals = {name: linear.weight.data for name, linear in block.linears.items()}
            schemes = {name: plan[name] for name in originals}
            round_block(block.over(batches[: how.held]), walker.structure, schemes, how)
            run_all(block, batches)
            for name, weight in originals.items():
                block.linears[name].weight.data = weight
        progress(f"measure {len(plans)} plans", block.index + 1, len(walker))
    measured = [batches[how.held :] for batches in states]
    return mean_kl(walker.head(), walker.states[how.held :], measured)


@torch.no_grad()
def run_all(block: Block, batches: list[Tensor] | HiddenStates) -> None:
    """Replace every batch by the block's output for it."""
    for i, states in enumerate(batches):
        batches[i] = block.run(states)


Measure = Callable[[Sequence[QuantPlan]], list[float]]
"""Plans → the KL of each as a whole, nats per token."""


@dataclass(frozen=True)
class Checked:
    """A plan that was measured as a whole.

    Attributes:
        allocation: the plan.
        correction: from summed damage to KL; the identity where sums predict well enough.
        predicted: the KL that is predicted for the plan without its own measurement.
        measured: its KL as a whole.
        measurements: (summed damage, measured KL) of every plan that was measured, in order.
    """

    allocation: Allocation
    correction: Correction
    predicted: float
    measured: float
    measurements: tuple[tuple[float, float], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, without the plan."""
        return {
            "predicted_kl": self.predicted,
            "measured_kl": self.measured,
            "correction": asdict(self.correction),
            "measurements": [list(pair) for pair in self.measurements],
        }


def check(
    sensitivity: Sensitivity,
    limits: Limits,
    measure: Measure,
    *,
    keep: Sequence[Keep] = (),
    latency: Latency | None = None,
) -> Checked:
    """Solve, measure the plan as a whole, and where its sum misses the measurement fit a correction and solve again.

    Plans of nearly the same sum measure differently, by a percent or two, since sums know nothing of how errors meet.
    So under a limit of size the greedy rule's plan is measured beside the exact one, and the better is taken.

    The correction is fitted to plans at a third to three times the first plan's damage, which is not among them, so
    that its own measurement tells how well the correction predicts. It grows with the sum, so the best plan of a size
    or time stays the best; `limits.max_damage` is a limit of the KL here, see _within().

    Raises:
        QtoolError: as allocate(), or not even the most precise plan measures within `limits.max_damage`.
    """
    if limits.max_damage is not None:
        return _within(sensitivity, limits, limits.max_damage, measure, keep, latency)
    pool = [allocate(sensitivity, limits, keep=keep, latency=latency)]
    if limits.max_latency_ms is None:
        rule = greedy(sensitivity, limits, keep=keep)
        pool += [rule] if rule.plan != pool[0].plan else []
    trials = _try(pool, measure)
    best = min(trials, key=lambda t: t.kl)
    if not misses(best.plan.damage, best.kl):
        return _checked(best, trials, Correction())
    around = _try(_around(best.plan, lambda d: allocate(sensitivity, Limits(max_damage=d), keep=keep)), measure)
    return _checked(best, trials + around, fit_correction([t.point for t in around or trials]))


@dataclass(frozen=True)
class _Trial:
    """A plan and its KL as a whole."""

    plan: Allocation
    kl: float

    @property
    def point(self) -> tuple[float, float]:
        return self.plan.damage, self.kl


def _try(plans: Sequence[Allocation], measure: Measure) -> list[_Trial]:
    if not plans:
        return []
    return [_Trial(plan, kl) for plan, kl in zip(plans, measure([p.plan for p in plans]), strict=True)]


def _checked(best: _Trial, trials: Sequence[_Trial], correction: Correction, predicted: float | None = None) -> Checked:
    if predicted is None:
        predicted = correction.kl(best.plan.damage)
    return Checked(best.plan, correction, predicted, best.kl, tuple(t.point for t in trials))


def _within(
    sensitivity: Sensitivity,
    limits: Limits,
    goal: float,
    measure: Measure,
    keep: Sequence[Keep],
    latency: Latency | None,
) -> Checked:
    """The smallest plan found that measures within `goal`.

    Its sum is the first limit; after that what the correction says, which takes in every measurement, and less than the
    sum of any plan that measured above the goal. _ATTEMPTS at most; the most precise plan of all
    is the last that is tried.
    """
    precise = _most_precise(sensitivity, limits, keep, latency)

    def solve(damage: float) -> Allocation:
        if damage <= precise.damage:
            return precise
        return allocate(sensitivity, replace(limits, max_damage=damage), keep=keep, latency=latency)

    trials = _try([solve(goal)], measure)
    first = trials[0]
    if first.kl <= goal and not misses(first.plan.damage, first.kl):
        return _checked(first, trials, Correction())
    trials += _try(_around(first.plan, solve), measure)
    for _ in range(_ATTEMPTS):
        above = [t.plan.damage * goal / t.kl for t in trials if t.kl > goal]
        plan = solve(min([fit_correction([t.point for t in trials]).damage(goal), *above]))
        if any(t.plan.plan == plan.plan for t in trials):
            break
        trials += _try([plan], measure)
        if trials[-1].kl <= goal and not misses(goal, trials[-1].kl):
            break
    good = [t for t in trials if t.kl <= goal]
    if not good and all(t.plan.plan != precise.plan for t in trials):
        trials += _try([precise], measure)
        good = [t for t in trials[-1:] if t.kl <= goal]
    if not good:
        least = min(t.kl for t in trials)
        raise QtoolError(f"--max-kl {goal:g}: no plan measures within it, the most precise one has {least:.4g}")
    best = min(good, key=lambda t: (t.plan.linear_bytes, t.kl))
    others = fit_correction([t.point for t in trials if t is not best])
    return _checked(best, trials, others)


def _most_precise(
    sensitivity: Sensitivity, limits: Limits, keep: Sequence[Keep], latency: Latency | None
) -> Allocation:
    """The plan of least damage under all limits but that of damage."""
    all_bytes = sum(max(sensitivity.group_bytes(g, s) for s in (FLOAT, *g.damage)) for g in sensitivity.groups)
    size = all_bytes + sensitivity.other_bytes if limits.max_bytes is None else limits.max_bytes
    return allocate(sensitivity, replace(limits, max_bytes=size, max_damage=None), keep=keep, latency=latency)


def _around(plan: Allocation, solve: Callable[[float], Allocation]) -> list[Allocation]:
    """Distinct plans of about a third to three times the summed damage of `plan`; `solve` makes one for a limit."""
    found: dict[float, Allocation] = {}
    for factor in (1 / 3, 1 / 1.7, 1.7, 3):
        try:
            other = solve(factor * plan.damage)
        except QtoolError:  # less than the most precise plan has
            continue
        if other.damage > 0 and other.damage != plan.damage:
            found[other.damage] = other
    return list(found.values())


def correct_curve(curve: Sequence[Allocation], measure: Measure, points: int = 5) -> Correction:
    """The correction fitted to `points` plans of a frontier, evenly spread over it."""
    useful = [plan for plan in curve if plan.damage > 0]
    picked = {round(i * (len(useful) - 1) / max(1, points - 1)) for i in range(min(points, len(useful)))}
    chosen = [useful[i] for i in sorted(picked)]
    return fit_correction(list(zip((p.damage for p in chosen), measure([p.plan for p in chosen]), strict=True)))


def joint_measure(
    folder: Path, tokens: Tensor, device: torch.device, progress: ProgressFn = silent, *, rounding: str = "rtn"
) -> Measure:
    """joint_kl on the model in `folder`."""

    def measure(plans: Sequence[QuantPlan]) -> list[float]:
        with Checkpoint(folder) as checkpoint:
            return joint_kl(checkpoint, tokens, plans, rounding=rounding, device=device, progress=progress)

    return measure
