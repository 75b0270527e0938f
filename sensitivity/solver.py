"""The multiple-choice knapsack with any number of limits, exactly, as a mixed-integer program (scipy's HiGHS)."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from qtool.quant.errors import QtoolError

Table = Sequence[Sequence[float]]
"""A number for every option of every group."""

_OBJECTIVE_SPAN = 1e6  # the largest cost after scaling: makes the solver's absolute tolerance (1e-6) meaningless
_LIMIT_SPAN = 1e4  # a limit that is no whole number after scaling: the same for the tolerance of its row
_DIGITS = 1e-9  # relative excess over such a limit that is rounding
_INFEASIBLE = 2  # milp's status
_STDOUT = threading.Lock()  # file descriptor 1 is the whole process's


def total(table: Table, chosen: Sequence[int]) -> float:
    """The sum over groups of the chosen options; exact for whole numbers."""
    values = [row[option] for row, option in zip(table, chosen, strict=True)]
    return sum(values) if all(isinstance(v, int) for v in values) else math.fsum(values)


def least(table: Table) -> float:
    """The least sum that any choice has."""
    return total(table, [min(range(len(row)), key=row.__getitem__) for row in table])


def minimize(cost: Table, limits: Sequence[tuple[Table, float]] = ()) -> list[int] | None:
    """One option for every group: least Σ cost with Σ values ≤ limit for each of `limits`; None: there is none.

    Costs may be negative. The same arguments give the same choice. Raises QtoolError where the solver gives up.
    """
    costs = _flat(cost)
    owner = np.repeat(np.arange(len(cost)), [len(row) for row in cost])
    one_each = csr_array((np.ones(len(costs)), (owner, np.arange(len(costs)))), shape=(len(cost), len(costs)))
    limits, tightened = list(limits), False
    while True:
        rows = [_row(table, limit) for table, limit in limits]
        with _silent_stdout():
            result = milp(
                costs * (_OBJECTIVE_SPAN / (np.abs(costs).max() or 1.0)),
                integrality=np.ones(len(costs)),
                bounds=Bounds(0, 1),
                constraints=[LinearConstraint(one_each, 1, 1), *rows],
                options={"mip_rel_gap": 0.0},
            )
        if result.status == _INFEASIBLE and not tightened:
            return None
        if result.x is None:
            raise QtoolError(f"the solver found no plan ({result.message})")
        chosen = [int(np.argmax(result.x[owner == group])) for group in range(len(cost))]
        excess = [total(table, chosen) - limit for table, limit in limits]
        over = [e > (0 if _whole(t) else _DIGITS * abs(limit)) for e, (t, limit) in zip(excess, limits, strict=True)]
        if not any(over):
            return chosen
        # beyond a limit by the solver's tolerance: take twice the excess off, and try again
        limits = [(t, limit - 2 * e if o else limit) for (t, limit), e, o in zip(limits, excess, over, strict=True)]
        tightened = True


def _whole(table: Table) -> bool:
    return all(isinstance(value, int) for row in table for value in row)


def _flat(table: Table) -> NDArray[np.float64]:
    return np.array([value for row in table for value in row], dtype=np.float64)


def _row(table: Table, limit: float) -> LinearConstraint:
    """Σ values ≤ limit, scaled: whole numbers to the smallest whole numbers, others so that the limit is large."""
    values = _flat(table)
    if _whole(table):
        divisor = math.gcd(*(int(value) for value in values)) or 1
        return LinearConstraint((values / divisor)[None], -np.inf, math.floor(limit) // divisor)
    unit = max(abs(limit), float(np.abs(values).max()) / _LIMIT_SPAN) / _LIMIT_SPAN or 1.0
    return LinearConstraint((values / unit)[None], -np.inf, limit / unit)


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """HiGHS now and then prints a remark of its own to file descriptor 1, where --json promises a document."""
    with _STDOUT, ExitStack() as stack:
        try:
            kept = os.dup(1)
        except OSError:  # it is closed
            yield
            return
        sys.stdout.flush()
        stack.callback(os.close, kept)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        stack.callback(os.close, nowhere)
        os.dup2(nowhere, 1)
        stack.callback(os.dup2, kept, 1)
        yield
