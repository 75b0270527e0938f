"""The best scheme for every group under limits of size, time or damage, exactly."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from qtool.quant.errors import QtoolError
from qtool.quant.scheme import FLOAT, QuantPlan, fit_group, parse_scheme, scheme_name
from qtool.sensitivity.record import GroupSensitivity, Sensitivity
from qtool.sensitivity.solver import Table, least, minimize, total

Latency = Mapping[str, Mapping[str, float]]
"""Group name → scheme name → milliseconds that one decode step spends in the group's product."""


_LARGEST = 1e12  # of any limit: sums in the solver stay exact


@dataclass(frozen=True)
class Allocation:
    """A plan, and what it costs.

    Attributes:
        plan: layer → scheme.
        damage: predicted, the sum over groups in the metric's unit.
        linear_bytes: true bytes of the planned linears, scales and zero points included.
        total_bytes: with everything else that the artifact's weights hold.
        average_bits: per weight of the planned linears.
        latency_ms: of one decode step's products by the planned linears; None where no times were given.
    """

    plan: QuantPlan
    damage: float
    linear_bytes: int
    total_bytes: int
    average_bits: float
    latency_ms: float | None = None


@dataclass(frozen=True)
class Limits:
    """What a plan must keep within; all that are given hold together.

    Attributes:
        max_bytes: all weights of the artifact.
        avg_bits: the linears of the blocks, in bits per weight, scales and zero points counted.
        max_latency_ms: one decode step's products by the linears of the blocks.
        max_damage: summed damage in the metric's unit. With it, bytes are minimised instead of damage.
    """

    max_bytes: int | None = None
    avg_bits: float | None = None
    max_latency_ms: float | None = None
    max_damage: float | None = None

    def __post_init__(self) -> None:
        given = {"--avg-bits": self.avg_bits, "--max-latency-ms": self.max_latency_ms, "--max-kl": self.max_damage}
        for option, value in given.items():
            if value is not None and not 0 < value <= _LARGEST:
                raise QtoolError(f"{option} {value}: give a number above 0, and no larger than {_LARGEST:g}")
        if self.max_bytes is not None and self.max_bytes > 10**18:
            raise QtoolError(f"--max-bytes {str(self.max_bytes)[:9]}...: no model is as large; leave it out")
        if (self.max_bytes, *given.values()) == (None,) * 4:
            raise QtoolError("no budget: give --avg-bits, --max-bytes, --max-latency-ms or --max-kl")


@dataclass(frozen=True)
class Keep:
    """A wish by layer: every group with a layer whose name the pattern finds gets `scheme`."""

    pattern: str
    scheme: str = FLOAT

    @classmethod
    def parse(cls, text: str) -> Keep:
        """`REGEX` (16 bits) or `REGEX=SCHEME`. Raises QtoolError for a broken expression or an unknown scheme."""
        parts = re.fullmatch(r"(.*)=\s*([\w-]+)\s*", text, re.DOTALL)  # a lookahead, (?=...), names no scheme
        pattern, scheme = parts.groups() if parts else (text, FLOAT)
        if not pattern:
            raise QtoolError(f"--keep {text!r}: write a regular expression of layer names, such as 'layers.0.'")
        try:
            re.compile(pattern)
            return cls(pattern, scheme_name(parse_scheme(scheme)))
        except (re.error, OverflowError, RecursionError) as error:
            raise QtoolError(f"--keep {text!r}: not a regular expression ({error})") from None
        except QtoolError as error:
            raise QtoolError(f"--keep {text!r}: {error}") from None


def allocate(
    sensitivity: Sensitivity, limits: Limits, *, keep: Sequence[Keep] = (), latency: Latency | None = None
) -> Allocation:
    """The plan of least summed damage within the limits (of least bytes where `max_damage` is one of them, and of least
    damage among those); the same inputs give the same plan.

    Args:
        sensitivity: measured damage of every group under every candidate.
        keep: schemes fixed by layer name.
        latency: measured times, for `max_latency_ms`.

    Raises:
        QtoolError: a pattern that matches nothing, wishes that contradict each other, a wished scheme that was not
            measured, or limits that no plan keeps within (the least possible is named).
    """
    options = _options(sensitivity, keep)
    damage: Table = [list(o.values()) for o in options]
    sizes: Table = [[sensitivity.group_bytes(g, s) for s in o] for g, o in zip(sensitivity.groups, options)]
    bounds = _bounds(sensitivity, limits, sizes)
    if limits.max_latency_ms is not None:
        if latency is None:
            raise QtoolError("--max-latency-ms needs the kernels' times on this device")
        times = [[_nanoseconds(latency[g.name][s]) for s in o] for g, o in zip(sensitivity.groups, options)]
        bounds.append(_latency_bound(limits.max_latency_ms, times))
    if limits.max_damage is not None:
        bounds.append(_Bound("--max-kl", limits.max_damage, damage, limits.max_damage, lambda d: f"{d:.6g}"))
    _check_possible(bounds, "with these --keep wishes" if keep else "with the schemes measured")
    rows = [(b.values, b.limit) for b in bounds]
    if limits.max_damage is not None:
        smallest = minimize(sizes, rows)
        assert smallest is not None
        rows.append((sizes, total(sizes, smallest)))
    chosen = minimize(damage, rows)
    assert chosen is not None
    return describe(sensitivity, [list(o)[i] for o, i in zip(options, chosen)], latency)


def greedy(sensitivity: Sensitivity, limits: Limits, *, keep: Sequence[Keep] = ()) -> Allocation:
    """The usual rule, as something to compare with: from the smallest schemes upward, again and again the step that
    saves most damage per byte, while it fits.

    Raises:
        QtoolError: as allocate(); limits of other things than size.
    """
    if limits.max_latency_ms is not None or limits.max_damage is not None:
        raise QtoolError("the greedy rule knows budgets of size alone")
    options = _options(sensitivity, keep)
    sizes = [{s: sensitivity.group_bytes(g, s) for s in o} for g, o in zip(sensitivity.groups, options)]
    bounds = _bounds(sensitivity, limits, [list(size.values()) for size in sizes])
    _check_possible(bounds, "with these --keep wishes" if keep else "with the schemes measured")
    chosen = [min(size, key=lambda s, size=size: (size[s], s)) for size in sizes]  # type: ignore[misc]
    left = min(bound.limit for bound in bounds) - sum(size[s] for size, s in zip(sizes, chosen))
    while True:
        steps = [
            ((o[chosen[i]] - o[s]) / (sizes[i][s] - sizes[i][chosen[i]]), i, s)
            for i, o in enumerate(options)
            for s in o
            if 0 < sizes[i][s] - sizes[i][chosen[i]] <= left and o[s] < o[chosen[i]]
        ]
        if not steps:
            return describe(sensitivity, chosen)
        _, i, scheme = max(steps)
        left -= sizes[i][scheme] - sizes[i][chosen[i]]
        chosen[i] = scheme


def describe(sensitivity: Sensitivity, names: Sequence[str], latency: Latency | None = None) -> Allocation:
    """The allocation that gives the i-th group the scheme names[i]; each must have been measured (or be 16-bit)."""
    by_layer = {m: name for g, name in zip(sensitivity.groups, names, strict=True) for m in g.members}
    plan = QuantPlan({layer: parse_scheme(by_layer[layer]) for layer in sensitivity.shapes})
    size = sum(sensitivity.group_bytes(g, name) for g, name in zip(sensitivity.groups, names))
    weights = sum(rows * cols for rows, cols in sensitivity.shapes.values())
    return Allocation(
        plan=plan,
        damage=math.fsum(_damage_of(g, name) for g, name in zip(sensitivity.groups, names)),
        linear_bytes=size,
        total_bytes=size + sensitivity.other_bytes,
        average_bits=8 * size / weights,
        latency_ms=None
        if latency is None
        else math.fsum(latency[g.name][n] for g, n in zip(sensitivity.groups, names)),
    )


def size_range(
    sensitivity: Sensitivity, keep: Sequence[Keep] = (), latency: Latency | None = None
) -> tuple[float, float]:
    """Bytes of the linears (milliseconds where `latency` is given, each group's in whole nanoseconds, rounded up, as
    allocate() counts them) of the least plan, and of the most precise one.
    """
    options = _options(sensitivity, keep)

    def cost(group: GroupSensitivity, scheme: str) -> float:
        return sensitivity.group_bytes(group, scheme) if latency is None else _nanoseconds(latency[group.name][scheme])

    pairs = list(zip(sensitivity.groups, options, strict=True))
    smallest = [min(cost(g, s) for s in o) for g, o in pairs]
    precise = [min((damage, cost(g, s)) for s, damage in o.items())[1] for g, o in pairs]
    unit = 1.0 if latency is None else 1e6
    return math.fsum(smallest) / unit, math.fsum(precise) / unit


def uniform_allocations(sensitivity: Sensitivity, latency: Latency | None = None) -> dict[str, Allocation]:
    """Scheme name → the plan that gives it to every group (its group size fitted where it does not divide)."""
    found: dict[str, Allocation] = {}
    for name in sorted({name for g in sensitivity.groups for name in g.damage}):
        fitted = [_fitted(sensitivity, g, name) for g in sensitivity.groups]
        if all(f in g.damage for f, g in zip(fitted, sensitivity.groups)):
            found[name] = describe(sensitivity, fitted, latency)
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


@dataclass(frozen=True)
class _Bound:
    """One limit: Σ values ≤ limit; `asked` is what the user wrote, `say` makes words of a sum."""

    option: str
    asked: float
    values: Table
    limit: float
    say: Callable[[float], str]


def _bounds(sensitivity: Sensitivity, limits: Limits, sizes: Table) -> list[_Bound]:
    """The limits of size."""
    bounds = []
    if limits.avg_bits is not None:
        weights = sum(rows * cols for rows, cols in sensitivity.shapes.values())

        def bits(size: float) -> str:
            return f"{math.ceil(8e4 * size / weights) / 1e4:g} bits per weight"

        bounds.append(_Bound("--avg-bits", limits.avg_bits, sizes, math.floor(limits.avg_bits * weights / 8), bits))
    if limits.max_bytes is not None:
        other = sensitivity.other_bytes

        def whole(size: float) -> str:
            size = int(size) + other
            return f"{size} bytes ({size / 1e6:.2f} MB), of which {other} are embedding, norms and head"

        bounds.append(_Bound("--max-bytes", limits.max_bytes, sizes, limits.max_bytes - other, whole))
    return bounds


# Of a product of floats, generously: 1e6 times 0.000123 is a little above 123, times 0.000249 a little below 249.
_ROUNDING = 2.0**-50


def _nanoseconds(milliseconds: float) -> int:
    """No less than it is."""
    return math.ceil(1e6 * milliseconds * (1 - _ROUNDING))


def _latency_bound(milliseconds: float, times: Table) -> _Bound:
    limit = math.floor(1e6 * milliseconds * (1 + _ROUNDING))
    return _Bound("--max-latency-ms", milliseconds, times, limit, lambda ns: f"{math.ceil(ns / 1e2) / 1e4:g} ms")


def _check_possible(bounds: Sequence[_Bound], what: str) -> None:
    """Raise QtoolError, with the least possible, for a limit that no plan keeps, alone or with those before it."""
    for i, bound in enumerate(bounds):
        if (lowest := least(bound.values)) > bound.limit:
            raise QtoolError(f"{bound.option} {bound.asked:.12g}: the least possible {what} is {bound.say(lowest)}")
        others = [b for b in bounds[:i] if b.values is not bound.values]  # two limits of size: the smaller one counts
        if others:
            chosen = minimize(bound.values, [(b.values, b.limit) for b in others])
            assert chosen is not None  # they were found possible together, one by one
            if (lowest := total(bound.values, chosen)) > bound.limit:
                named = " and ".join(f"{b.option} {b.asked:.12g}" for b in others)
                raise QtoolError(
                    f"{bound.option} {bound.asked:.12g}: the least possible {what} under {named} is {bound.say(lowest)}"
                )
