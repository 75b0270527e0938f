"""A multiple-choice item, a set of them, and the JSON-lines file that a user may bring, checked line by line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qtool.quant.errors import QtoolError


@dataclass(frozen=True)
class Item:
    """One question: which of `choices` follows `context` best? `answer` is the index of the right one.

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
class ChoiceSet:
    """A named set of items and where it came from."""

    name: str
    items: tuple[Item, ...]
    source: str

    @property
    def chance(self) -> float:
        """Accuracy of guessing, in [0, 1]."""
        return sum(1 / len(item.choices) for item in self.items) / len(self.items)

    @property
    def fingerprint(self) -> str:
        """sha256 over every item: two runs with the same fingerprint asked the same questions."""
        text = json.dumps([asdict(item) for item in self.items], ensure_ascii=False, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def read_text(path: Path, option: str) -> str:
    """A whole UTF-8 file. Raises QtoolError (missing, not a file, not UTF-8 with the line, empty), naming `option`."""
    if not path.is_file():
        raise QtoolError(f"{option} {path}: no such file")
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        byte = f"{raw[error.start]:#04x}"
        raise QtoolError(f"{option} {path}, line {line}: not UTF-8 (byte {byte}); convert the file") from None
    if not text.strip():
        raise QtoolError(f"{option} {path}: the file is empty")
    return text


def json_objects(path: Path, option: str) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) for each line of a JSON-lines file that is not blank. Raises QtoolError with the line."""
    rows: list[tuple[int, dict[str, Any]]] = []
    # not splitlines(): JSON strings may hold U+2028 and its like unescaped
    for number, line in enumerate(read_text(path, option).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise QtoolError(f"{option} {path}, line {number}: not valid JSON ({error})") from None
        if not isinstance(row, dict):
            raise QtoolError(f"{option} {path}, line {number}: expected a JSON object, found {type(row).__name__}")
        rows.append((number, row))
    return rows


def read_choice_set(path: Path) -> ChoiceSet:
    """A user's multiple-choice set: one object a line with `context`, `choices`, `answer`, and optionally `id`,
    `delimiter` (default: one space) and `kind`.

    Raises:
        QtoolError: naming file and line: a field missing or of the wrong type, fewer than two choices or equal ones,
            an answer outside the choices, an id that was there before, a bad encoding, no items at all.
    """
    items: list[Item] = []
    lines: dict[str, int] = {}
    for number, row in json_objects(path, "--tasks"):
        where = f"--tasks {path}, line {number}"
        item = _item(row, where, default_id=f"line-{number}")
        if item.id in lines:
            raise QtoolError(f"{where}: id {item.id!r} was used before, on line {lines[item.id]}; ids must be unique")
        lines[item.id] = number
        items.append(item)
    return ChoiceSet(path.stem, tuple(items), str(path))


def _item(row: dict[str, Any], where: str, default_id: str) -> Item:
    if missing := [name for name in ("context", "choices", "answer") if name not in row]:
        raise QtoolError(f"{where}: field {missing[0]!r} is missing (needed: context, choices, answer)")
    context, choices, answer = row["context"], row["choices"], row["answer"]
    item_id, delimiter, kind = row.get("id", default_id), row.get("delimiter", " "), row.get("kind", "")
    if not isinstance(context, str):
        raise QtoolError(f"{where}: context must be a string, found {type(context).__name__}")
    if not isinstance(item_id, str | int):
        raise QtoolError(f"{where}: id must be a string or a number, found {type(item_id).__name__}")
    if not isinstance(delimiter, str) or not isinstance(kind, str):
        raise QtoolError(f"{where}: delimiter and kind must be strings")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        raise QtoolError(f"{where}: choices must be a list of at least two non-empty strings")
    if len(set(choices)) < len(choices):
        raise QtoolError(f"{where}: two choices are equal")
    if not isinstance(answer, int) or isinstance(answer, bool):
        raise QtoolError(f"{where}: answer must be the index of the right choice, found {answer!r}")
    if not 0 <= answer < len(choices):
        raise QtoolError(f"{where}: answer {answer} is outside the choices (0 to {len(choices) - 1})")
    return Item(str(item_id), context, tuple(choices), answer, delimiter if context else "", kind)


def only_distinct(sets: Sequence[ChoiceSet]) -> None:
    """Refuse two sets of one name, whose results could not be told apart. Raises QtoolError."""
    names = [s.name for s in sets]
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise QtoolError(f"--tasks: two sets are called {twice!r}; rename one file")
