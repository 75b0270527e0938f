"""The whole trade-off: exact plans at budgets from the smallest to the most precise, as numbers and as a picture."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from matplotlib.figure import Figure

from qtool.quant.scheme import scheme_name
from qtool.sensitivity.allocate import Allocation, Keep, Latency, Limits, allocate, size_range, uniform_allocations
from qtool.sensitivity.record import Sensitivity
from qtool.sensitivity.verify import Correction

POINTS = 25


def frontier(
    sensitivity: Sensitivity, *, keep: Sequence[Keep] = (), latency: Latency | None = None, points: int = POINTS
) -> list[Allocation]:
    """Exact plans at budgets in equal ratios, from the least possible to the most precise plan.

    Of bytes, or of milliseconds where `latency` is given. Ascending by the budget's measure, each of less damage than
    the one before it.

    Raises:
        QtoolError: as allocate().
    """
    low, high = size_range(sensitivity, keep, latency)
    found: list[Allocation] = []
    for i in range(points):
        budget = low * (high / low) ** (i / (points - 1))
        if latency is None:
            limits = Limits(max_bytes=math.ceil(budget) + sensitivity.other_bytes)
        else:
            limits = Limits(max_latency_ms=budget * (1 + 1e-9))
        plan = allocate(sensitivity, limits, keep=keep, latency=latency)
        if not found or plan.damage < found[-1].damage:
            found.append(plan)
    return found


def table(
    plans: Sequence[tuple[str, Allocation]], correction: Correction | None = None, *, timed: bool
) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table of named plans; with a correction, the KL that it predicts beside the sum."""
    header = ["plan", "bits per weight", "MB of weights", *(["ms per step"] if timed else []), "damage"]
    rows = [
        [
            name,
            f"{plan.average_bits:.3f}",
            f"{plan.total_bytes / 1e6:.2f}",
            *([] if plan.latency_ms is None else [f"{plan.latency_ms:.3f}"]),
            f"{plan.damage:.4g}",
            *([] if correction is None else [f"{correction.kl(plan.damage):.4g}"]),
        ]
        for name, plan in plans
    ]
    return header if correction is None else [*header, "KL"], rows


def _numbers(plan: Allocation, correction: Correction | None) -> dict[str, Any]:
    return {
        "average_bits": plan.average_bits,
        "linear_bytes": plan.linear_bytes,
        "total_bytes": plan.total_bytes,
        "latency_ms": plan.latency_ms,
        "damage": plan.damage,
        "predicted_kl": None if correction is None else correction.kl(plan.damage),
    }


def picture(
    curve: Sequence[Allocation],
    uniform: Mapping[str, Allocation],
    correction: Correction | None,
    unit: str,
    *,
    timed: bool,
) -> bytes:
    """A PNG: damage (logarithmic) against megabytes or milliseconds, the curve and the uniform plans to beat."""

    def across(plan: Allocation) -> float:
        return (plan.latency_ms or 0.0) if timed else plan.total_bytes / 1e6

    def up(plan: Allocation) -> float:
        return plan.damage if correction is None else correction.kl(plan.damage)

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axis = figure.subplots()
    shown = [plan for plan in curve if plan.damage > 0]  # 16 bits everywhere has no place on a logarithmic axis
    axis.plot([across(p) for p in shown], [up(p) for p in shown], "o-", ms=3, label="mixed, exact")
    for name, plan in uniform.items():
        if plan.damage > 0:
            axis.plot(across(plan), up(plan), "x", color="tab:red")
            axis.annotate(name, (across(plan), up(plan)), (4, 3), textcoords="offset points", fontsize=8)
    axis.plot([], [], "x", color="tab:red", label="uniform")
    axis.set_yscale("log")
    axis.set_xlabel("milliseconds in the linears of one decode step" if timed else "MB of weights")
    axis.set_ylabel(unit, fontsize=9)
    axis.grid(alpha=0.3)
    axis.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def document(
    sensitivity: Sensitivity, curve: Sequence[Allocation], latency: Latency | None, correction: Correction | None
) -> dict[str, Any]:
    """The frontier and the uniform plans as plain numbers, each point with its schemes by group."""

    def point(plan: Allocation) -> dict[str, Any]:
        schemes = {g.name: scheme_name(plan.plan[g.members[0]]) for g in sensitivity.groups}
        return {**_numbers(plan, correction), "schemes": schemes}

    uniform = uniform_allocations(sensitivity, latency)
    return {
        "model": sensitivity.model,
        "fingerprint": sensitivity.fingerprint,
        "metric": sensitivity.metric,
        "correction": None if correction is None else asdict(correction),
        "frontier": [point(plan) for plan in curve],
        "uniform": {name: _numbers(plan, correction) for name, plan in uniform.items()},
    }
