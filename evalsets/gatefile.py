"""The gate as a user writes it: a percentage, or a TOML file that is checked line by line."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qtool.evalsets.gate import KL, PERPLEXITY, Thresholds
from qtool.evalsets.jsonlines import read_text
from qtool.quant.errors import QtoolError

_LIMITS = {"kl": "max", "perplexity": "max_increase", "accuracy": "max_drop"}  # table → its limit
_SHARES = ("max_increase", "max_drop")  # written in percent and points


def read_gate(text: str, option: str = "--gate") -> Thresholds:
    """`2%` or `2` (accuracy in points and perplexity in percent), or the path of a TOML file.

    Raises:
        QtoolError: neither of them; a file that is no TOML; a key, type or value that is not known, with its line.
    """
    percent = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%?\s*", text)
    if percent is not None:
        share = float(percent[1]) / 100
        if share == 0:
            raise QtoolError(f"{option} {text!r}: write a percentage above 0, such as 2%, or a TOML file")
        return Thresholds(max_ppl_increase=share, max_drop=share)
    path = Path(text)
    if not path.is_file():
        raise QtoolError(f"{option} {text!r}: write a percentage such as 2%, or the path of a TOML file")
    source = read_text(path, option)
    try:
        document = tomllib.loads(source)
    except tomllib.TOMLDecodeError as error:
        raise QtoolError(f"{option} {path}: not valid TOML ({error})") from None
    return _Reader(f"{option} {path}", source).thresholds(document)


class _Reader:
    """Checks one document; remembers its source, to name the line of a fault."""

    def __init__(self, where: str, source: str) -> None:
        self._where, self._lines = where, source.splitlines()

    def thresholds(self, document: Mapping[str, Any]) -> Thresholds:
        self._known(document, ("alpha", *_LIMITS, "task"), ())
        settings: dict[str, Any] = {}
        ignored: list[str] = []
        if "alpha" in document:
            settings["alpha"] = self._number(document["alpha"], "alpha", ())
            if not 0.0001 <= settings["alpha"] <= 0.2:
                raise self._fault(f"alpha must lie between 0.0001 and 0.2, found {document['alpha']}", "alpha", ())
        fields = {"kl": "max_kl", "perplexity": "max_ppl_increase", "accuracy": "max_drop"}
        for name, limit in _LIMITS.items():
            value, counts = self._table(document.get(name, {}), limit, (name,))
            if value is not None:
                settings[fields[name]] = value
            if not counts and name == "accuracy":
                raise self._fault("counts = false belongs to a [task.NAME]", "counts", (name,))
            if not counts:
                ignored.append({"kl": KL, "perplexity": PERPLEXITY}[name])
        tasks = document.get("task", {})
        if not isinstance(tasks, dict):
            raise self._fault("task must be tables, such as [task.grammar]", "task", ())
        drops: list[tuple[str, float]] = []
        for name, table in tasks.items():
            value, counts = self._table(table, "max_drop", ("task", name))
            if value is not None:
                drops.append((name, value))
            if not counts:
                ignored.append(name)
        return Thresholds(**settings, task_drops=tuple(drops), ignored=tuple(ignored))

    def _table(self, table: Any, limit: str, path: tuple[str, ...]) -> tuple[float | None, bool]:
        """The limit (a fraction, or nats) or None, and whether the metric counts."""
        if not isinstance(table, dict):
            raise self._fault(f"{'.'.join(path)} must be a table: write [{'.'.join(path)}]", path[-1], path[:-1])
        self._known(table, (limit, "counts"), path)
        counts = table.get("counts", True)
        if not isinstance(counts, bool):
            raise self._fault(f"counts must be true or false, found {counts!r}", "counts", path)
        if limit not in table:
            return None, counts
        value = self._number(table[limit], limit, path)
        return (value / 100 if limit in _SHARES else value), counts

    def _number(self, value: Any, key: str, path: tuple[str, ...]) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._fault(f"{key} must be a number, found {value!r}", key, path)
        if not (math.isfinite(value) and value > 0):
            raise self._fault(f"{key} must be a positive number, found {value}", key, path)
        return float(value)

    def _known(self, table: Mapping[str, Any], names: tuple[str, ...], path: tuple[str, ...]) -> None:
        for key in table:
            if key not in names:
                near = difflib.get_close_matches(key, names, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(names)}"
                raise self._fault(f"{key!r} is not known; {hint}", key, path)

    def _fault(self, message: str, key: str, path: tuple[str, ...]) -> QtoolError:
        line = self._line(key, path)
        return QtoolError(f"{self._where}{'' if line is None else f', line {line}'}: {message}")

    def _line(self, key: str, path: tuple[str, ...]) -> int | None:
        """The line where `key` of the table `path` stands, for files written in the plain way; None for others."""
        inside: tuple[str, ...] = ()
        for number, line in enumerate(self._lines, 1):
            if header := re.match(r"\s*\[([^\[\]]+)\]", line):
                parts = re.findall(r'"[^"]*"|\'[^\']*\'|[^.]+', header[1])
                inside = tuple(part.strip().strip("\"'") for part in parts)
                if inside == (*path, key):
                    return number
            elif inside == path and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line):
                return number
        return None
