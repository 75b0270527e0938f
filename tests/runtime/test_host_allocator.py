"""Freed memory stays with the process, and the user's own settings of malloc win."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import numpy as np, resource
from qtool.runtime.executor.host_allocator import keep_freed_memory
kept = keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    for _ in range(20):
        parts = [np.empty(24 << 20, np.uint8) for _ in range(4)]  # beyond what malloc keeps of itself
        for part in parts:
            part[::4096] = 1
use()
before = faults()
use()
print(kept, faults() - before)
"""


MEASURE = """
import numpy as np, psutil
from qtool.runtime.executor.device_memory import HostMemory
from qtool.runtime.executor.host_allocator import keep_freed_memory
keep_freed_memory()
memory = HostMemory()
before = memory.used()
parts = [np.ones(24 << 20, np.uint8) for _ in range(5)]
parts = parts[:1]
print(psutil.Process().memory_info().rss - before, memory.used() - before)
"""

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc alone has these settings")


def run(program: str, **env: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], env=os.environ | env, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@glibc
def test_memory_that_is_kept_is_not_counted_as_used() -> None:
    """A model's weights are what is still held once it is loaded: one part of five."""
    resident, used = map(int, run(MEASURE))
    assert resident > 4 * (24 << 20)
    assert used == pytest.approx(24 << 20, abs=4 << 20)


@glibc
def test_memory_is_kept_unless_the_user_says_otherwise() -> None:
    pages = 20 * 4 * (24 << 20) // 4096
    kept, faults = run(PROGRAM)
    assert kept == "True"
    assert int(faults) < pages // 1000, "what was freed serves again"
    assert run(PROGRAM, MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
