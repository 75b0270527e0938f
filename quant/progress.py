"""How long work tells how far it is: a plain function, so that any room can report and any front can show."""

from __future__ import annotations

from collections.abc import Callable

ProgressFn = Callable[[str, int, int], None]
"""progress(what, done, total): called after each unit of work; `what` names the stage, `done` == `total` ends it."""


def silent(what: str, done: int, total: int) -> None:
    """The progress function that shows nothing."""
