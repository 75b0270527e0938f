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
from qtool.quant.progress import ProgressFn, silent
from qtool.quant.scheme import QuantPlan
from qtool.sensitivity.allocate import Allocation, Keep, Latency, Limits, allocate, greedy
from qtool.sensitivity.divergence import mean_kl
from qtool.sensitivity.record import Sensitivity
from qtool.sensitivity.rounding import batch_tokens, round_block, rounding_for

TOLERANCE = 0.10  # a prediction that misses the measurement by more is corrected


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
        return float((kl / self.scale) ** (1 / self.exponent))


def fit_correction(points: Sequence[tuple[float, float]]) -> Correction:
    """Least squares in logarithms over (summed damage, measured KL); one point gives a scale alone.

    Points where either is zero say nothing. An exponent that the points do not determine, or that is not positive
    (measurements of noise), stays 1.
    """
    usable = [(d, kl) for d, kl in points if d > 0 and kl > 0]
    if not usable:
        return Correction(points=tuple(points))
    x, y = np.log(np.array(usable)).T
    spread = float(((x - x.mean()) ** 2).sum())
    exponent = float(((x - x.mean()) * (y - y.mean())).sum() / spread) if spread > 1e-6 else 1.0
    if exponent <= 0:
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
def run_all(block: Block, batches: list[Tensor]) -> None:
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
        predicted: the KL that was predicted for the plan before it was measured itself.
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
    or time stays the best; `limits.max_damage` is a limit of the KL here, and the plan is solved again under the
    corrected limit until it measures within it, or three times.

    Raises:
        QtoolError: as allocate().
    """
    goal = limits.max_damage
    pool = [allocate(sensitivity, limits, keep=keep, latency=latency)]
    if goal is None and limits.max_latency_ms is None:
        rule = greedy(sensitivity, limits, keep=keep)
        pool += [rule] if rule.plan != pool[0].plan else []
    measured = dict(zip((p.damage for p in pool), measure([p.plan for p in pool]), strict=True))
    plan = min(pool, key=lambda p: measured[p.damage])
    kl = measured[plan.damage]
    if not misses(plan.damage, kl) and (goal is None or kl <= goal):
        return Checked(plan, Correction(), plan.damage, kl, tuple(measured.items()))
    around = _around(sensitivity, plan, keep)
    others = dict(zip((p.damage for p in around), measure([p.plan for p in around]), strict=True))
    correction = fit_correction(list(others.items()) or list(measured.items()))
    measured |= others
    predicted = correction.kl(plan.damage)
    for _ in range(3 if goal is not None else 0):
        assert goal is not None
        again = allocate(sensitivity, replace(limits, max_damage=correction.damage(goal)), keep=keep, latency=latency)
        if again.damage not in measured:
            predicted = correction.kl(again.damage)
            (measured[again.damage],) = measure([again.plan])
            correction = fit_correction(list(measured.items()))
        plan = again
        if measured[plan.damage] <= goal:
            break
    return Checked(plan, correction, predicted, measured[plan.damage], tuple(measured.items()))


def _around(sensitivity: Sensitivity, plan: Allocation, keep: Sequence[Keep]) -> list[Allocation]:
    """Distinct exact plans of about a third to three times the summed damage of `plan`."""
    found: dict[float, Allocation] = {}
    for factor in (1 / 3, 1 / 1.7, 1.7, 3):
        try:
            other = allocate(sensitivity, Limits(max_damage=factor * plan.damage), keep=keep)
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
