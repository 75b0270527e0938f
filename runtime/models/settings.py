"""Settings of a config.json, read strictly: what is missing or no such value is named, not guessed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from qtool.quant.errors import QtoolError


def _value(config: Mapping[str, Any], name: str, default: Any) -> Any:
    value = config.get(name)
    if value is None and default is None:
        raise QtoolError(f"config.json: {name!r} is missing")
    return default if value is None else value


def positive_int(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """An integer of at least 1; `default` where it is missing or null. Raises QtoolError."""
    value = _value(config, name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise QtoolError(f"config.json: {name!r} must be an integer of at least 1, got {value!r}")
    return value


def positive_number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A finite number above 0; `default` where it is missing or null. Raises QtoolError."""
    value = _value(config, name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise QtoolError(f"config.json: {name!r} must be a number above 0, got {value!r}")
    return float(value)


def flag(config: Mapping[str, Any], name: str) -> bool:
    """true or false; false where it is missing or null. Raises QtoolError."""
    value = _value(config, name, False)
    if not isinstance(value, bool):
        raise QtoolError(f"config.json: {name!r} must be true or false, got {value!r}")
    return value
