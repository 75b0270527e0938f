"""Memory of steps on a CPU: freed by one, it should serve the next, and not come from the kernel page by page."""

from __future__ import annotations

import ctypes
import logging
import os
from contextlib import suppress
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
LARGEST = 32 << 20  # bytes; glibc takes no more for M_MMAP_THRESHOLD
KEPT = 512 << 20  # bytes of freed memory that the process holds on to
OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")

log = logging.getLogger(__name__)


@cache
def keep_freed_memory() -> bool:
    """Have glibc's malloc keep what a step frees, for the next to use.

    Every layer of a long step asks for the same tens of megabytes again, and new pages have to be zeroed by the kernel.
    False where another allocator is at work, or settings of the user's own are.
    """
    if any(name in os.environ for name in (*OWN_SETTINGS, "GLIBC_TUNABLES")):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    done = mallopt(M_MMAP_THRESHOLD, LARGEST) == 1 and mallopt(M_TRIM_THRESHOLD, KEPT) == 1
    log.debug("freed memory is kept: %s", done)
    return bool(done)


def release_freed_memory() -> None:
    """Give the kernel back what glibc's malloc keeps: in the process's size it looks like memory in use."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
