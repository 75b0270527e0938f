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


def run(**env: str) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], env=os.environ | env, capture_output=True, text=True, check=True
    )
    kept, faults = done.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc alone has these settings")
def test_memory_is_kept_unless_the_user_says_otherwise() -> None:
    pages = 20 * 4 * (24 << 20) // 4096
    kept, faults = run()
    assert kept == "True"
    assert faults < pages // 1000, "what was freed serves again"
    assert run(MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
