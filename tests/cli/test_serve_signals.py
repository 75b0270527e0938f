"""How a real `qtool serve` ends by a signal, or by an engine that hangs: its exit status, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("uvicorn")
pytestmark = pytest.mark.slow  # each run imports torch twice


def start(folder: Path, temporary: Path, *options: str, before: str = "") -> subprocess.Popen[str]:
    """`before`: Python that the process runs before the command."""
    command = [
        sys.executable, *(["-P"] if sys.flags.safe_path else []), "-c",
        before + "\nfrom qtool.cli.main import main; main()",
        "serve", str(folder), "--port", "0", "--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "16MiB",
        *options,
    ]  # fmt: skip
    return subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores it
    )


def wait_for_engine(process: subprocess.Popen[str]) -> psutil.Process:
    """The engine's process, as soon as there is one."""
    while process.poll() is None:
        for child in psutil.Process(process.pid).children():
            if any("spawn_main" in part for part in child.cmdline()):
                return child
        time.sleep(0.02)
    raise AssertionError(process.communicate()[1])


@contextmanager
def ended_at_last(process: subprocess.Popen[str]) -> Iterator[None]:
    watchdog = threading.Timer(240, process.kill)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("number", "serving", "status"),
    [
        (signal.SIGTERM, False, 0),
        (signal.SIGTERM, True, 0),
        (signal.SIGINT, False, 130),
        (signal.SIGINT, True, 130),
    ],
)
def test_a_signal_ends_the_server(
    tiny_model: Any, tmp_path: Path, number: signal.Signals, serving: bool, status: int
) -> None:
    process = start(tiny_model(), tmp_path)
    with ended_at_last(process):
        engine = wait_for_engine(process)
        if serving:
            assert any(line.startswith("ready:") for line in process.stderr or ())
        process.send_signal(number)
        _, err = process.communicate()
        assert process.returncode == status, err
        assert "Traceback" not in err
        assert not engine.is_running()
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("module", "name", "signals"),
    [
        ("multiprocessing.context", "SpawnProcess._Popen", 1),  # the engine's process is half born
        ("tempfile", "mkdtemp", 1),
        ("qtool.runtime.server.engine_process", "EngineProcess._let_go", 2),  # and half gone, by a second signal
    ],
)
def test_a_signal_that_comes_at_a_bad_moment(
    tiny_model: Any, tmp_path: Path, module: str, name: str, signals: int
) -> None:
    before = f"""
import os, tempfile
import {module} as module

def interrupt():
    os.kill(os.getpid(), {signal.SIGTERM})
    for _ in range(1000):
        pass

def first(name):
    owner = module
    *path, name = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    real = owner.__dict__[name]
    call = getattr(real, "__func__", real)
    def wrapped(*args, **options):
        found = call(*args, **options)
        interrupt()
        return found
    setattr(owner, name, staticmethod(wrapped) if isinstance(real, staticmethod) else wrapped)

first({name!r})
if {signals} == 2:
    from qtool.runtime.server.engine_process import EngineProcess
    EngineProcess.wait_ready = lambda self: interrupt()
"""
    process = start(tiny_model(), tmp_path, before=before)
    with ended_at_last(process):
        children: set[psutil.Process] = set()
        while process.poll() is None:
            children |= set(psutil.Process(process.pid).children())
            time.sleep(0.01)
        err = process.stderr.read() if process.stderr else ""
        assert process.returncode == 0, err
        assert "Traceback" not in err
        _, alive = psutil.wait_procs(children, timeout=20)  # multiprocessing's own ends once it sees that we have
        assert not alive
        assert not list(tmp_path.iterdir())


def test_an_engine_that_hangs_while_it_starts_ends_the_server(tiny_model: Any, tmp_path: Path) -> None:
    process = start(tiny_model(), tmp_path, "--start-timeout-s", "3")
    with ended_at_last(process):
        engine = wait_for_engine(process)
        engine.suspend()
        _, err = process.communicate()
        assert process.returncode == 3, err
        assert "the engine hangs while it starts" in err.splitlines()[-1]
        assert not engine.is_running()
        assert not list(tmp_path.iterdir())
