"""The sets that come with qtool, by name: 500 items each, made by us from a seed."""

from __future__ import annotations

from pathlib import Path

from qtool.evalsets.arithmetic import arithmetic_set
from qtool.evalsets.chinese import chinese_set
from qtool.evalsets.code import code_set
from qtool.evalsets.facts import facts_set
from qtool.evalsets.grammar import grammar_set
from qtool.evalsets.items import ItemSet
from qtool.evalsets.own_sets import read_set
from qtool.evalsets.retrieval import retrieval_set

BUILT_IN = {
    "grammar": grammar_set,
    "facts": facts_set,
    "arithmetic": arithmetic_set,
    "retrieval": retrieval_set,
    "code": code_set,
    "chinese": chinese_set,
}


def item_set(task: str | Path) -> ItemSet:
    """A built-in set by its name, or a user's file. Raises QtoolError as `read_set`."""
    make = BUILT_IN.get(str(task))
    return read_set(Path(task)) if make is None else make()
