"""The noise floor: the base against itself, asked again through the same runtime in another order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from qtool.evalsets.harness import Generated
from qtool.evalsets.items import ItemSet
from qtool.evalsets.parting import parting_position
from qtool.evalsets.task_runs import TaskResult

NOISE_WINDOWS = 1
NOISE_ITEMS = 25  # of each set at least, where it has them

S = TypeVar("S", bound=ItemSet)


@dataclass(frozen=True)
class SetNoise:
    """One set, some of whose items were asked twice.

    Attributes:
        items: how many; `flips`: of them, whose scores changed.
        max_margin_change: of the right choice's lead over the best wrong one, in nats; None where there are no choices.
        close: items of the whole set whose lead, either way, is no larger than that: their answers are down to noise.
    """

    name: str
    items: int
    flips: int
    max_margin_change: float | None = None
    close: int | None = None


@dataclass(frozen=True)
class NoiseFloor:
    """The base against itself, computed twice through the same runtime in another order of requests.

    Attributes:
        mean_kl, max_kl: nats, over `tokens` tokens.
        items, flips, max_margin_change: over all `sets`; flips None where there is no set.
        prompts: outputs that were generated twice; `parted`: of them, how many differ.
    """

    mean_kl: float
    max_kl: float
    tokens: int
    items: int = 0
    flips: int | None = None
    max_margin_change: float | None = None
    sets: tuple[SetNoise, ...] = ()
    prompts: int = 0
    parted: int | None = None


def some_of(asked: S) -> S:
    """At least NOISE_ITEMS items, equally spaced, in reverse order; all of a set that has no more."""
    some: Any = asked.items[:: max(1, len(asked.items) // NOISE_ITEMS)][::-1]  # of the set's own kind
    return replace(asked, items=some)


def set_noise(first: TaskResult, again: TaskResult) -> SetNoise:
    """What changed between a whole set's answers and those to some of its items, asked again."""
    both = [i for i in again.scores if i in first.scores]
    flips = sum(again.scores[i] != first.scores[i] for i in both)
    if not (first.margins and again.margins):
        return SetNoise(first.name, len(both), flips)
    most = max((abs(again.margins[i] - first.margins[i]) for i in both), default=0.0)
    close = sum(abs(margin) <= most for margin in first.margins.values())
    return SetNoise(first.name, len(both), flips, most, close)


def noise_floor(
    text: Mapping[str, Any], sets: Sequence[SetNoise], once: Sequence[Generated], twice: Sequence[Generated]
) -> NoiseFloor:
    """All of it; `text` holds `mean_kl`, `max_kl` and `tokens`, `once` and `twice` outputs to the same prompts."""
    changes = [s.max_margin_change for s in sets if s.max_margin_change is not None]
    parted = [parting_position(a.tokens, b.tokens) is not None for a, b in zip(once, twice, strict=True)]
    return NoiseFloor(
        **text,
        items=sum(s.items for s in sets),
        flips=sum(s.flips for s in sets) if sets else None,
        max_margin_change=max(changes, default=None),
        sets=tuple(sets),
        prompts=len(parted),
        parted=sum(parted) if parted else None,
    )
