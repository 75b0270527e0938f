"""How the built-in multiple-choice sets are made: makers of questions, a seed, and 500 that are all different."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qtool.evalsets.items import ChoiceSet, Item

ITEMS = 500
SEED = 20


@dataclass(frozen=True)
class Question:
    """What stands before the choices, the right choice and the wrong ones."""

    context: str
    right: str
    wrong: tuple[str, ...]


Maker = Callable[[random.Random], Question]


def generated_set(name: str, makers: Sequence[Maker], *, delimiter: str = " ") -> ChoiceSet:
    """`ITEMS` questions, equally many of each maker, the same on every machine; the right one's place is drawn."""
    items: list[Item] = []
    for maker in makers:
        rng = random.Random(f"{SEED} {name} {maker.__name__}")
        seen: set[tuple[str, str]] = set()
        while len(seen) < ITEMS // len(makers):
            question = maker(rng)
            if (question.context, question.right) in seen:
                continue
            seen.add((question.context, question.right))
            choices = [question.right, *question.wrong]
            rng.shuffle(choices)
            answer = choices.index(question.right)
            ident = f"{maker.__name__}-{len(seen)}"
            items.append(Item(ident, question.context, tuple(choices), answer, delimiter, maker.__name__))
    return ChoiceSet(name, tuple(items), f"built in, seed {SEED}")


def others(rng: random.Random, right: str, pool: Sequence[str], count: int = 3) -> tuple[str, ...]:
    """`count` different wrong choices from `pool`."""
    return tuple(rng.sample(sorted(set(pool) - {right}), count))
