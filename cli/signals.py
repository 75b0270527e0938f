"""SIGINT and SIGTERM as a KeyboardInterrupt that reaches the command, wherever they arrive."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

AGAIN_S = 0.01
_first: int | None = None


def obey() -> None:
    """SIGTERM cleans up as Ctrl-C does; and neither is lost.

    A handler runs between any two bytecodes of the main thread, and what it raises may be dropped there: in a finalizer
    or a weak reference's callback (each import ends with one) Python reports it and goes on, so the signal is raised
    again, by a timer, as soon as that is through. C code that imports a module may clear it, or make another error of
    it: for that the signal is remembered, see `received` and `check`. A SIGINT that this process was started to ignore,
    as in the background of a script, stays ignored.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    signal.signal(signal.SIGALRM, _raise_again)
    report = sys.unraisablehook

    def look(unraisable: UnraisableHookArgs) -> None:
        if _first is not None and issubclass(unraisable.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        else:
            report(unraisable)

    sys.unraisablehook = look


def received() -> int | None:
    """The first signal that asked this command to end."""
    return _first


def check() -> None:
    """Raises KeyboardInterrupt where a signal has asked for the end."""
    if _first is not None:
        raise KeyboardInterrupt


def ignore() -> None:
    """Let nothing disturb what is left to be cleaned up."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _first
    _first = _first or number
    raise KeyboardInterrupt


def _raise_again(number: int, frame: FrameType | None) -> None:
    if _first is not None:
        signal.raise_signal(_first)
