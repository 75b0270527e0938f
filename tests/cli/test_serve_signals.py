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


def start(folder: Path, temporary: Path, *options: str) -> subprocess.Popen[str]:
    command = [
        sys.executable, *(["-P"] if sys.flags.safe_path else []), "-c", "from qtool.cli.main import main; main()",
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
