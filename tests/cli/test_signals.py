"""A signal ends a command even where Python drops exceptions: each in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# the signal arrives inside of a finalizer, or of a weak reference's callback; what follows must not be reached
DROPPED = """
import os, signal, sys, time, weakref
from qtool.cli import signals

signals.obey()

def send(*_):
    os.kill(os.getpid(), int(sys.argv[1]))
    for _ in range(1000):
        pass

class Thing:
    if sys.argv[2] == "finalizer":
        __del__ = send

thing = Thing()
if sys.argv[2] == "callback":
    watch = weakref.ref(thing, send)
try:
    del thing
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(signals.received())
sys.exit("the signal was dropped")
"""


def run_python(text: str, *args: str, ignored: bool = False) -> tuple[int, str]:
    """(exit status, stderr) of a process of its own; `ignored`: SIGINT, as in the background of a script."""
    command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-c", text, *args]
    handler = signal.SIG_IGN if ignored else signal.SIG_DFL
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=50, preexec_fn=lambda: signal.signal(signal.SIGINT, handler)
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("where", ["finalizer", "callback"])
@pytest.mark.parametrize(("number", "ignored"), [(2, False), (15, False), (15, True)])
def test_a_signal_in_a_finalizer_ends_the_command(number: int, ignored: bool, where: str) -> None:
    assert run_python(DROPPED, str(number), where, ignored=ignored) == (number, "")


def test_other_failures_of_finalizers_are_reported() -> None:
    text = """
from qtool.cli import signals
signals.obey()
class Thing:
    def __del__(self):
        raise ValueError("told")
del (things := [Thing()])[0]
"""
    status, err = run_python(text)
    assert status == 0
    assert "ValueError: told" in err


@pytest.mark.parametrize(
    ("verb", "number", "status"), [("serve", 15, 0), ("serve", 2, 130), ("quantize", 15, 130), ("quantize", 2, 130)]
)
@pytest.mark.parametrize("instead", ["RuntimeError('made of it')", "QtoolError('made of it')", "KeyboardInterrupt()"])
def test_an_error_that_was_made_of_a_signal_is_one(verb: str, number: int, status: int, instead: str) -> None:
    text = f"""
import os, sys
from qtool.cli import main
from qtool.quant.errors import QtoolError

def app(args, standalone_mode):
    try:
        os.kill(os.getpid(), {number})
        for _ in range(1000):
            pass
    except KeyboardInterrupt:
        raise {instead} from None

main.build_app = lambda: app
sys.argv = ["qtool", "{verb}", "model"]
main.main()
"""
    wanted = "" if status == 0 else "interrupted: nothing half-written was left behind\n"
    assert run_python(text) == (status, wanted)


def test_a_signal_that_was_cleared_is_found_at_the_next_check() -> None:
    text = """
import os, sys
from qtool.cli import signals
signals.obey()
try:
    os.kill(os.getpid(), 15)
    for _ in range(1000):
        pass
except BaseException:
    pass
try:
    signals.check()
except KeyboardInterrupt:
    sys.exit(9)
"""
    assert run_python(text) == (9, "")


@pytest.mark.parametrize("number", [2, 15])
def test_no_signal_disturbs_the_end(number: int) -> None:
    text = f"""
import atexit, os, time
from qtool.cli import main

def late():
    os.kill(os.getpid(), {number})
    time.sleep(0.1)
    print("all was cleaned up", flush=True)

atexit.register(late)
main.build_app = lambda: lambda args, standalone_mode: 1
main.main()
"""
    assert run_python(text) == (1, "")
