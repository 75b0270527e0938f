"""Text and JSON-lines files that a user brings, checked line by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from qtool.quant.errors import QtoolError


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
    """(line number, object) for each line of a JSON-lines file that is not blank.

    Raises:
        QtoolError: naming the line: no JSON object, a number that JSON does not have (NaN, Infinity), a field that
            stands there twice, half a surrogate pair; or as `read_text`.
    """
    rows: list[tuple[int, dict[str, Any]]] = []
    # not splitlines(): JSON strings may hold U+2028 and its like unescaped
    for number, line in enumerate(read_text(path, option).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=_no_number, object_pairs_hook=_no_field_twice)
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise QtoolError(f"{option} {path}, line {number}: a string holds half a surrogate pair") from None
        except (ValueError, RecursionError) as error:
            raise QtoolError(f"{option} {path}, line {number}: not valid JSON ({error})") from None
        if not isinstance(row, dict):
            raise QtoolError(f"{option} {path}, line {number}: expected a JSON object, found {type(row).__name__}")
        rows.append((number, row))
    return rows


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _no_field_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"field {next(n for n in names if names.count(n) > 1)!r} stands there twice")
    return found
