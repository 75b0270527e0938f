"""Results of finished stages, kept by the fingerprint of everything they depend on."""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from qtool._version import __version__
from qtool.quant.errors import QtoolError
from qtool.quant.hub import cache_folder
from qtool.quant.textfile import write_text

_KEEP_DAYS = 30

T = TypeVar("T")


def stage_path(name: str, facts: Mapping[str, Any]) -> Path:
    """`$QTOOL_CACHE/stages/NAME-KEY.json`: another model, argument or version of qtool has another key."""
    text = json.dumps({"qtool_version": __version__, **facts}, sort_keys=True, default=str)
    return cache_folder() / "stages" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def recall(path: Path, read: Callable[[Path], T]) -> T | None:
    """What an equal run left at a stage's path; None where it left nothing, or what cannot be read."""
    try:
        found = read(path)
        path.touch()  # see keep()
    except (OSError, QtoolError, ValueError, KeyError, TypeError):
        return None
    return found


@contextmanager
def alone(name: str, target: Path) -> Iterator[None]:
    """Within it no other run of `name` works on `target` (where the cache can be written to).

    Raises:
        QtoolError: one does.
    """
    key = hashlib.sha256(str(target.resolve()).encode()).hexdigest()[:32]
    lock = cache_folder() / "locks" / f"{name}-{key}"
    with ExitStack() as stack:
        with suppress(OSError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            handle = stack.enter_context(lock.open("w"))
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise QtoolError(
                    f"{target}: another run is making it; wait for its end, or choose another --out"
                ) from None
        yield


def keep(path: Path, text: str) -> None:
    """Leave a stage's result for later runs; what a month has not used is removed.

    A cache that cannot be written to costs a later run time, never this one.
    """
    with suppress(OSError, QtoolError):
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.glob("*.json"):
            if time.time() - old.stat().st_mtime > _KEEP_DAYS * 86400:
                old.unlink(missing_ok=True)
        write_text(path, text)
