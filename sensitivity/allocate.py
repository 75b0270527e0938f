"""The best scheme for every group under a budget, exactly: a multiple-choice knapsack as a mixed-integer program."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from qtool.quant.errors import QtoolError
from qtool.quant.scheme import FLOAT, QuantPlan, fit_group, parse_scheme, scheme_name
from qtool.sensitivity.record import GroupSensitivity, Sensitivity

_OBJECTIVE_SPAN = 1e6  # the largest damage after scaling: makes the solver's absolute tolerance (1e-6) meaningless


@dataclass(frozen=True)
class Allocation:
    """A plan, and what it costs.

    Attributes:
        plan: layer → scheme.
        damage: predicted, the sum over groups in the metric's unit.
        linear_bytes: true bytes of the planned linears, scales and zero points included.
        total_bytes: with everything else that the artifact's weights hold.
        average_bits: per weight of the planned linears.
    """

    plan: QuantPlan
    damage: float
    linear_bytes: int
    total_bytes: int
    average_bits: float


@dataclass(frozen=True)
class Keep:
    """A wish by layer: every group with a layer whose name the pattern finds gets `scheme`."""

    pattern: str
    scheme: str = FLOAT

    @classmethod
    def parse(cls, text: str) -> Keep:
        """`REGEX` (16 bits) or `REGEX=SCHEME`. Raises QtoolError for a broken expression or an unknown scheme."""
        pattern, equals, scheme = text.rpartition("=")
        keep = cls(pattern, scheme_name(parse_scheme(scheme))) if equals else cls(text)
        try:
            re.compile(keep.pattern)
        except re.error as error:
            raise QtoolError(f"--keep {text!r}: not a regular expression ({error})") from None
        return keep


def allocate(
    sensitivity: Sensitivity,
    *,
    max_bytes: int | None = None,
    avg_bits: float | None = None,
    keep: Sequence[Keep] = (),
) -> Allocation:
    """The plan of least summed damage under the budget; the same inputs give the same plan.

    Args:
        sensitivity: measured damage of every group under every candidate.
        max_bytes: limit for all weights of the artifact.
        avg_bits: limit for the linears of the blocks, in bits per weight, scales and zero points counted.
        keep: schemes fixed by layer name. With two limits both hold.

    Raises:
        QtoolError: no limit, a pattern that matches nothing, wishes that contradict each other, a wished scheme that
            was not measured, or a budget below the least possible (which is named).
    """
    if max_bytes is None and avg_bits is None:
        raise QtoolError("no budget: give --avg-bits or --max-bytes")
    options = _options(sensitivity, keep)
    weights = sum(rows * cols for rows, cols in sensitivity.shapes.values())
    sizes = [[sensitivity.group_bytes(g, s) for s in o] for g, o in zip(sensitivity.groups, options)]
    least = sum(min(of_group) for of_group in sizes)
    budget = _budget(sensitivity, max_bytes, avg_bits, weights, least, bool(keep))
    chosen = _solve([list(o.values()) for o in options], sizes, budget)
    names = [list(o)[i] for o, i in zip(options, chosen)]
    return describe(sensitivity, names)


def describe(sensitivity: Sensitivity, names: Sequence[str]) -> Allocation:
    """The allocation that gives the i-th group the scheme names[i]; each must have been measured (or be 16-bit)."""
    by_layer = {m: name for g, name in zip(sensitivity.groups, names, strict=True) for m in g.members}
    plan = QuantPlan({layer: parse_scheme(by_layer[layer]) for layer in sensitivity.shapes})
    size = plan.num_bytes(sensitivity.shapes)
    return Allocation(
        plan=plan,
        damage=math.fsum(_damage_of(g, name) for g, name in zip(sensitivity.groups, names)),
        linear_bytes=size,
        total_bytes=size + sensitivity.other_bytes,
        average_bits=plan.average_bits(sensitivity.shapes),
    )


def uniform_allocations(sensitivity: Sensitivity) -> dict[str, Allocation]:
    """Scheme name → the plan that gives it to every group (its group size fitted where it does not divide)."""
    found: dict[str, Allocation] = {}
    for name in sorted({name for g in sensitivity.groups for name in g.damage}):
        fitted = [_fitted(sensitivity, g, name) for g in sensitivity.groups]
        if all(f in g.damage for f, g in zip(fitted, sensitivity.groups)):
            found[name] = describe(sensitivity, fitted)
    return found


def best_uniform(uniform: Mapping[str, Allocation], linear_bytes: int) -> str | None:
    """The name of the uniform plan of least damage among those no larger than `linear_bytes`; None: all are larger."""
    fitting = [name for name, plan in uniform.items() if plan.linear_bytes <= linear_bytes]
    return min(fitting, key=lambda name: (uniform[name].damage, name), default=None)


def _damage_of(group: GroupSensitivity, scheme: str) -> float:
    return 0.0 if scheme == FLOAT else group.damage[scheme]


def _fitted(sensitivity: Sensitivity, group: GroupSensitivity, name: str) -> str:
    scheme = parse_scheme(name)
    return FLOAT if scheme is None else fit_group(scheme, sensitivity.shapes[group.members[0]][1]).name


def _options(sensitivity: Sensitivity, keep: Sequence[Keep]) -> list[Mapping[str, float]]:
    """For every group: scheme name → damage, with one entry where a wish fixes it."""
    options: list[Mapping[str, float]] = [g.damage for g in sensitivity.groups]
    wished: dict[int, Keep] = {}
    for wish in keep:
        matches = [
            i for i, g in enumerate(sensitivity.groups) if any(re.search(wish.pattern, name) for name in g.members)
        ]
        if not matches:
            raise QtoolError(
                f"--keep {wish.pattern!r} matches none of the {len(sensitivity.shapes)} layers "
                f"({next(iter(sensitivity.shapes))}, ...); embedding, norms and head always keep 16 bits"
            )
        for i in matches:
            group = sensitivity.groups[i]
            scheme = _fitted(sensitivity, group, wish.scheme)
            other = wished.setdefault(i, wish)
            if _fitted(sensitivity, group, other.scheme) != scheme:
                raise QtoolError(
                    f"--keep {other.pattern!r} wants {other.scheme} for {group.name}, "
                    f"--keep {wish.pattern!r} wants {wish.scheme}"
                )
            if scheme != FLOAT and scheme not in group.damage:
                raise QtoolError(
                    f"--keep {wish.pattern!r}: {scheme} was not measured for {group.name} "
                    f"(measured: {', '.join(group.damage)}); analyze again with --schemes"
                )
            options[i] = {scheme: _damage_of(group, scheme)}
    return options


def _budget(
    sensitivity: Sensitivity, max_bytes: int | None, avg_bits: float | None, weights: int, least: int, kept: bool
) -> int:
    """Bytes that the linears may take. Raises QtoolError where that is below `least`."""
    what = "with these --keep wishes" if kept else "with the schemes measured"
    limits = []
    if avg_bits is not None:
        if not math.isfinite(avg_bits):
            raise QtoolError(f"--avg-bits {avg_bits}: give a number of bits per weight, such as 4.5")
        limits.append(math.floor(avg_bits * weights / 8))
        if limits[-1] < least:
            possible = math.ceil(8e4 * least / weights) / 1e4
            raise QtoolError(f"--avg-bits {avg_bits:g}: the least possible {what} is {possible:g} bits per weight")
    if max_bytes is not None:
        limits.append(max_bytes - sensitivity.other_bytes)
        if limits[-1] < least:
            other = sensitivity.other_bytes
            raise QtoolError(
                f"--max-bytes {max_bytes}: the least possible {what} is {least + other} bytes "
                f"({(least + other) / 1e6:.2f} MB), of which {other} are embedding, norms and head"
            )
    return min(limits)


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """HiGHS now and then prints a remark of its own to file descriptor 1, where --json promises a document."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _solve(damage: list[list[float]], sizes: list[list[int]], budget: int) -> list[int]:
    """Index of the chosen option of every group: least Σ damage with Σ size ≤ budget."""
    cost = np.array([d for group in damage for d in group], dtype=np.float64)
    size = np.array([s for group in sizes for s in group], dtype=np.int64)
    unit = int(np.gcd.reduce(size))
    owner = np.repeat(np.arange(len(damage)), [len(group) for group in damage])
    one_each = csr_array((np.ones(len(cost)), (owner, np.arange(len(cost)))), shape=(len(damage), len(cost)))
    with _silent_stdout():
        result = milp(
            cost * (_OBJECTIVE_SPAN / (cost.max() or 1.0)),
            integrality=np.ones(len(cost)),
            bounds=Bounds(0, 1),
            constraints=[
                LinearConstraint(one_each, 1, 1),
                LinearConstraint((size // unit)[None].astype(np.float64), -np.inf, budget // unit),
            ],
            options={"mip_rel_gap": 0.0},
        )
    if result.x is None:
        raise QtoolError(f"the solver found no plan ({result.message})")
    chosen = [int(np.argmax(result.x[owner == group])) for group in range(len(damage))]
    total = sum(sizes[group][option] for group, option in enumerate(chosen))
    if total > budget:
        raise RuntimeError(f"the solver's plan takes {total} bytes, the budget is {budget}")
    return chosen
