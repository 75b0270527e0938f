"""SIGINT and SIGTERM as exceptions that reach the command, wherever they arrive."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

AGAIN_S = 0.01
SIGNAL_OF: dict[type[BaseException], signal.Signals] = {
    KeyboardInterrupt: signal.SIGINT,
    SystemExit: signal.SIGTERM,  # a verb whose end by SIGTERM is no failure raises it
}


def obey() -> None:
    """SIGTERM cleans up as Ctrl-C does; and neither is lost in a finalizer.

    A handler runs between any two bytecodes of the main thread. Those may be of a finalizer or of a weak reference's
    callback (each import ends with one), whose exceptions Python reports and drops. So such a signal is raised again,
    by a timer, as soon as the finalizer is through.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    dropped = signal.SIGINT
    report = sys.unraisablehook

    def raise_again(number: int, frame: FrameType | None) -> None:
        signal.raise_signal(dropped)

    def look(unraisable: UnraisableHookArgs) -> None:
        nonlocal dropped
        number = SIGNAL_OF.get(unraisable.exc_type)
        if number is None:
            report(unraisable)
        else:
            dropped = number
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)

    signal.signal(signal.SIGALRM, raise_again)
    sys.unraisablehook = look


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
