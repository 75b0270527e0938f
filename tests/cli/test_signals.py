"""A signal ends a command even where Python drops exceptions: each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

# the signal arrives inside of a finalizer, or of a weak reference's callback; what follows must not be reached
SENT = """
import os, signal, sys, time, weakref
from qtool.cli import signals

def leave(number, frame):
    raise SystemExit(0)

signals.obey()
if sys.argv[2] == "leave":
    signal.signal(signal.SIGTERM, leave)

def send(*_):
    os.kill(os.getpid(), int(sys.argv[1]))
    for _ in range(1000):
        pass

class Thing:
    if sys.argv[3] == "finalizer":
        __del__ = send

thing = Thing()
if sys.argv[3] == "callback":
    watch = weakref.ref(thing, send)
try:
    del thing
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(130)
sys.exit("the signal was dropped")
"""


@pytest.mark.parametrize("where", ["finalizer", "callback"])
@pytest.mark.parametrize(("number", "handler", "status"), [(2, "default", 130), (15, "default", 130), (15, "leave", 0)])
def test_a_signal_in_a_finalizer_ends_the_command(number: int, handler: str, status: int, where: str) -> None:
    safe = ["-P"] if sys.flags.safe_path else []
    command = [sys.executable, *safe, "-c", SENT, str(number), handler, where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (status, "")


def test_other_failures_of_finalizers_are_reported() -> None:
    text = """
from qtool.cli import signals
signals.obey()
class Thing:
    def __del__(self):
        raise ValueError("told")
del (things := [Thing()])[0]
"""
    safe = ["-P"] if sys.flags.safe_path else []
    done = subprocess.run([sys.executable, *safe, "-c", text], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0
    assert "ValueError: told" in done.stderr
