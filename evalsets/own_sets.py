"""The JSON-lines file of items that a user may bring, checked line by line. docs/tasks.md describes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qtool.evalsets.items import ChoiceSet, ClozeItem, ClozeSet, GenerationItem, GenerationSet, Item, ItemSet
from qtool.evalsets.jsonlines import json_objects
from qtool.evalsets.rouge import rouge_words
from qtool.quant.errors import QtoolError

METRICS = ("choice", "cloze", "exact", "regex", "rouge1", "rougeL")
OPTION = "--tasks"
MOST_TOKENS = 4096
DEFAULT_TOKENS = {"exact": 32, "regex": 64, "rouge1": 128, "rougeL": 128}


def read_set(path: Path) -> ItemSet:
    """A user's set: one object a line, of one kind in the whole file.

    `choices` and `answer` make an item of multiple choice; `target` with a `metric` of METRICS one of cloze or of free
    generation.

    Raises:
        QtoolError: naming file and line: a field missing, of the wrong type or out of range, an answer outside the
            choices, a pattern that is no regular expression, an id that was there before, an item of another kind than
            the first, a bad encoding, no items at all.
    """
    items: list[Any] = []
    lines: dict[str, int] = {}
    first: tuple[str, int] | None = None
    for number, row in json_objects(path, OPTION):
        where = f"{OPTION} {path}, line {number}"
        metric = _metric(row, where)
        if first is None:
            first = metric, number
        if metric != first[0]:
            raise QtoolError(
                f"{where}: an item of the kind {metric!r}, but line {first[1]} is {first[0]!r}: a file holds one kind, "
                "so part it into two"
            )
        item_id = _id(row, where, f"line-{number}")
        item = _item(row, metric, item_id, where)
        if item_id in lines:
            raise QtoolError(f"{where}: id {item_id!r} was used before, on line {lines[item_id]}; ids must be unique")
        lines[item_id] = number
        items.append(item)
    assert first is not None  # an empty file is refused
    if first[0] == "choice":
        return ChoiceSet(path.stem, tuple(items), str(path))
    if first[0] == "cloze":
        return ClozeSet(path.stem, tuple(items), str(path))
    return GenerationSet(path.stem, tuple(items), str(path), first[0])


def read_choice_set(path: Path) -> ChoiceSet:
    """A user's set of multiple choice. Raises QtoolError as `read_set`, and for a set of another kind."""
    found = read_set(path)
    if not isinstance(found, ChoiceSet):
        raise QtoolError(f"{OPTION} {path}: a set of multiple choice is needed here (choices, answer)")
    return found


def _metric(row: Mapping[str, Any], where: str) -> str:
    if "choices" in row and "target" in row:
        raise QtoolError(f"{where}: both choices and target; an item has one of them")
    metric = row.get("metric", "choice" if "target" not in row else None)
    if metric is None:
        raise QtoolError(f"{where}: a target needs a metric: {', '.join(METRICS[1:])}")
    if metric not in METRICS:
        raise QtoolError(f"{where}: metric {metric!r} is not known; one of {', '.join(METRICS)}")
    return str(metric)


def _id(row: Mapping[str, Any], where: str, default: str) -> str:
    found = row.get("id", default)
    if isinstance(found, bool) or not isinstance(found, str | int):
        raise QtoolError(f"{where}: id must be a string or a number, found {type(found).__name__}")
    return str(found)


def _item(row: Mapping[str, Any], metric: str, item_id: str, where: str) -> Item | ClozeItem | GenerationItem:
    needed = ("context", "choices", "answer") if metric == "choice" else ("context", "target")
    if missing := [name for name in needed if name not in row]:
        raise QtoolError(f"{where}: field {missing[0]!r} is missing (needed: {', '.join(needed)})")
    context, delimiter, kind = row["context"], row.get("delimiter", " "), row.get("kind", "")
    if not isinstance(context, str):
        raise QtoolError(f"{where}: context must be a string, found {type(context).__name__}")
    if not isinstance(delimiter, str) or not isinstance(kind, str):
        raise QtoolError(f"{where}: delimiter and kind must be strings")
    if metric == "choice":
        return _choice(row, item_id, context, delimiter if context else "", kind, where)
    if metric == "cloze":
        target = row["target"]
        if not isinstance(target, str) or not target.strip():
            raise QtoolError(f"{where}: target must be a string that is not blank")
        return ClozeItem(item_id, context, target, delimiter if context else "", kind)
    return _generation(row, metric, item_id, context, kind, where)


def _choice(row: Mapping[str, Any], item_id: str, context: str, delimiter: str, kind: str, where: str) -> Item:
    choices, answer = row["choices"], row["answer"]
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        raise QtoolError(f"{where}: choices must be a list of at least two non-empty strings")
    if len(set(choices)) < len(choices):
        raise QtoolError(f"{where}: two choices are equal")
    if not isinstance(answer, int) or isinstance(answer, bool):
        raise QtoolError(f"{where}: answer must be the index of the right choice, found {answer!r}")
    if not 0 <= answer < len(choices):
        raise QtoolError(f"{where}: answer {answer} is outside the choices (0 to {len(choices) - 1})")
    return Item(item_id, context, tuple(choices), answer, delimiter, kind)


def _generation(
    row: Mapping[str, Any], metric: str, item_id: str, context: str, kind: str, where: str
) -> GenerationItem:
    if not context:
        raise QtoolError(f"{where}: context is empty, so there is nothing to continue")
    targets = _strings(row, "target", where)
    if not targets:
        raise QtoolError(f"{where}: target must be a string, or a list of at least one")
    for target in targets:
        if metric == "regex":
            _pattern(target, "target", where)
        elif not target.strip():
            raise QtoolError(f"{where}: a target is blank")
        elif metric.startswith("rouge") and not rouge_words(target):
            raise QtoolError(f"{where}: target {target!r} holds no word or number, so ROUGE cannot count any")
    stop = _strings(row, "stop", where) if "stop" in row else ("\n",) if metric == "exact" else ()
    if not all(stop):
        raise QtoolError(f"{where}: a stop string is empty")
    most = row.get("max_tokens", DEFAULT_TOKENS[metric])
    if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= MOST_TOKENS:
        raise QtoolError(f"{where}: max_tokens must be a whole number from 1 to {MOST_TOKENS}, found {most!r}")
    extract, ignore_case = row.get("extract", ""), row.get("ignore_case", False)
    if not isinstance(extract, str):
        raise QtoolError(f"{where}: extract must be a string, found {type(extract).__name__}")
    _pattern(extract, "extract", where)
    if not isinstance(ignore_case, bool):
        raise QtoolError(f"{where}: ignore_case must be true or false, found {ignore_case!r}")
    return GenerationItem(item_id, context, targets, stop, most, extract, ignore_case, kind)


def _strings(row: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    value = row[name]
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(s, str) for s in found):
        raise QtoolError(f"{where}: {name} must be a string or a list of strings")
    return tuple(found)


def _pattern(text: str, name: str, where: str) -> None:
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise QtoolError(f"{where}: {name} {text!r} is no regular expression ({error})") from None
