"""The built-in set `retrieval`: one of 60 entries of a long list is asked for; four choices, chance 0.25.

The wrong choices stand in the same list, so that the place must be found and not only the kind of answer. Twenty
questions share a list: a runtime that keeps prefixes reads each list once.
"""

from __future__ import annotations

import random

from qtool.evalsets.generated import ITEMS, SEED
from qtool.evalsets.items import ChoiceSet, Item

ENTRIES = 60
QUESTIONS = 20  # of each list
COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey", "orange", "purple")
BOXES = ("box", "chest", "drawer", "locker", "suitcase", "cabinet", "safe", "basket", "trunk", "folder")
FRAMES = (
    "The number of the {} is {}.",
    "Written on the {} is the number {}.",
    "The {} has the number {}.",
    "On the {} one reads the number {}.",
)


def retrieval_set() -> ChoiceSet:
    """The 500 questions over 25 lists, the same on every machine."""
    rng = random.Random(f"{SEED} retrieval")
    names = [f"{colour} {box}" for colour in COLOURS for box in BOXES]
    items: list[Item] = []
    for page in range(ITEMS // QUESTIONS):
        things = rng.sample(names, ENTRIES)
        numbers = [str(n) for n in rng.sample(range(1000, 10_000), ENTRIES)]
        listed = " ".join(rng.choice(FRAMES).format(t, n) for t, n in zip(things, numbers, strict=True))
        for place in sorted(rng.sample(range(ENTRIES), QUESTIONS)):
            choices = [numbers[place], *rng.sample([n for n in numbers if n != numbers[place]], 3)]
            rng.shuffle(choices)
            context = f"{listed}\n\nThe number of the {things[place]} is"
            answer = choices.index(numbers[place])
            depth = ("beginning", "middle", "end")[3 * place // ENTRIES]
            items.append(Item(f"list-{page + 1}-entry-{place + 1}", context, tuple(choices), answer, " ", depth))
    return ChoiceSet("retrieval", tuple(items), f"built in, seed {SEED}")
