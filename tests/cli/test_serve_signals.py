"""How a real `qtool serve` ends by a signal: its exit status, whether it loads or serves, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("uvicorn")
pytestmark = pytest.mark.slow  # each run imports torch twice


def engines(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The engine's process once there is one."""
    children = psutil.Process(process.pid).children()
    return [child for child in children if any("spawn_main" in part for part in child.cmdline())]


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
    command = [
        sys.executable, *(["-P"] if sys.flags.safe_path else []), "-c", "from qtool.cli.main import main; main()",
        "serve", str(tiny_model()), "--port", "0", "--device", "cpu", "--dtype", "float32",
        "--kv-cache-memory", "16MiB",
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores it
    )
    watchdog = threading.Timer(240, process.kill)
    watchdog.start()
    try:
        assert process.stderr is not None
        while not (children := engines(process)):
            assert process.poll() is None
            time.sleep(0.02)
        if serving:
            assert any(line.startswith("ready:") for line in process.stderr)
        process.send_signal(number)
        _, err = process.communicate()
        assert process.returncode == status, err
        assert "Traceback" not in err
        psutil.wait_procs(children, timeout=30)
        assert not any(child.is_running() for child in children)
        assert not list(tmp_path.iterdir())
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
