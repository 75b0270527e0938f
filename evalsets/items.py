"""What models are asked: items of three kinds, and named sets of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from qtool.quant.errors import QtoolError


@dataclass(frozen=True)
class Item:
    """One question in multiple choice: which of `choices` follows `context` best? `answer` is the right one's index.

    `delimiter` stands between context and choice: one space, or nothing where the context is empty.
    `kind` names the phenomenon or subject that the item tests ("" where the set has none).
    """

    id: str
    context: str
    choices: tuple[str, ...]
    answer: int
    delimiter: str = " "
    kind: str = ""


@dataclass(frozen=True)
class ClozeItem:
    """A text whose end is to be predicted: right where greedy decoding after `context` gives every token of `target`.

    Such as the last word of a passage (LAMBADA: Paperno et al. 2016, arXiv 1606.06031); the rest as in Item.
    """

    id: str
    context: str
    target: str
    delimiter: str = " "
    kind: str = ""


@dataclass(frozen=True)
class GenerationItem:
    """A prompt to be continued freely (greedily), and what the output is compared with.

    Attributes:
        targets: answers, any of which will do; for the metric `regex` patterns, any of which may be found.
        stop: strings that end the output and are no part of it; `max_tokens`: its longest length.
        extract: a pattern whose last match in the output (its first group, where there is one) is judged instead of
            the whole; "" judges the whole.
        ignore_case: whether letters of either case are equal; `kind` as in Item.
    """

    id: str
    context: str
    targets: tuple[str, ...]
    stop: tuple[str, ...] = ()
    max_tokens: int = 64
    extract: str = ""
    ignore_case: bool = False
    kind: str = ""


def _fingerprint(items: Sequence[Item | ClozeItem | GenerationItem]) -> str:
    """sha256 (hex) over every item: two runs with the same fingerprint asked the same questions."""
    text = json.dumps([asdict(item) for item in items], ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class ChoiceSet:
    """A named set of multiple-choice items and where it came from."""

    name: str
    items: tuple[Item, ...]
    source: str

    @property
    def metric(self) -> str:
        return "choice"

    @property
    def chance(self) -> float:
        """Accuracy of guessing, in [0, 1]."""
        return sum(1 / len(item.choices) for item in self.items) / len(self.items)

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) over every item: two runs with the same fingerprint asked the same questions."""
        return _fingerprint(self.items)


@dataclass(frozen=True)
class ClozeSet:
    """A named set of cloze items and where it came from."""

    name: str
    items: tuple[ClozeItem, ...]
    source: str

    @property
    def metric(self) -> str:
        return "cloze"

    @property
    def chance(self) -> float:
        """Accuracy of guessing one of tens of thousands of tokens: none."""
        return 0.0

    @property
    def fingerprint(self) -> str:
        return _fingerprint(self.items)


@dataclass(frozen=True)
class GenerationSet:
    """A named set of prompts for free generation, how outputs are judged, and where it came from.

    `metric`: `exact` and `regex` are right or wrong, `rouge1` and `rougeL` a score in [0, 1].
    """

    name: str
    items: tuple[GenerationItem, ...]
    source: str
    metric: str

    @property
    def chance(self) -> float | None:
        """Accuracy of guessing; None for scores, which have none."""
        return None if self.graded else 0.0

    @property
    def graded(self) -> bool:
        """Whether items score shares, not right and wrong."""
        return self.metric.startswith("rouge")

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.metric} {_fingerprint(self.items)}".encode()).hexdigest()


ItemSet = ChoiceSet | ClozeSet | GenerationSet


def check_sets(sets: Sequence[ItemSet]) -> None:
    """Refuse two sets of one name, whose results could not be told apart, and one with nothing to pair statistics over.

    Raises:
        QtoolError: naming the set.
    """
    for s in sets:
        if len(s.items) < 2:
            raise QtoolError(f"--tasks {s.source}: {len(s.items)} item; at least 2 are needed")
    names = [s.name for s in sets]
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise QtoolError(f"--tasks: two sets are called {twice!r}; rename one file")
