"""The built-in set `arithmetic`: sums, differences, products, quotients and stories; four choices, chance 0.25."""

from __future__ import annotations

import random

from qtool.evalsets.generated import Question, generated_set
from qtool.evalsets.items import ChoiceSet

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas")
GOODS = ("apples", "books", "coins", "stamps", "marbles", "cards", "pencils", "shells", "tickets", "eggs")


def _question(rng: random.Random, text: str, value: int) -> Question:
    """Wrong answers are near misses: one or two off, a ten too many or too few."""
    near = [value + d for d in (-10, -2, -1, 1, 2, 10) if value + d >= 0]
    return Question(f"Question: {text}\nAnswer:", str(value), tuple(str(v) for v in rng.sample(near, 3)))


def addition(rng: random.Random) -> Question:
    a, b = rng.randrange(3, 100), rng.randrange(3, 100)
    return _question(rng, f"What is {a} plus {b}?", a + b)


def subtraction(rng: random.Random) -> Question:
    b = rng.randrange(3, 60)
    a = b + rng.randrange(2, 60)
    return _question(rng, f"What is {a} minus {b}?", a - b)


def multiplication(rng: random.Random) -> Question:
    a, b = rng.randrange(2, 20), rng.randrange(2, 13)
    return _question(rng, f"What is {a} times {b}?", a * b)


def division(rng: random.Random) -> Question:
    b, result = rng.randrange(2, 13), rng.randrange(2, 30)
    return _question(rng, f"What is {b * result} divided by {b}?", result)


def story(rng: random.Random) -> Question:
    (who, other), what = rng.sample(NAMES, 2), rng.choice(GOODS)
    a, b = rng.randrange(5, 40), rng.randrange(2, 20)
    if a > b and rng.random() < 0.5:
        return _question(rng, f"{who} has {a} {what} and gives {b} to {other}. How many {what} are left?", a - b)
    return _question(rng, f"{who} has {a} {what} and gets {b} from {other}. How many {what} are there now?", a + b)


def arithmetic_set() -> ChoiceSet:
    """The 500 problems, the same on every machine."""
    return generated_set("arithmetic", (addition, subtraction, multiplication, division, story))
