"""How much memory this process has needed so far, and that it keeps no more than it needs."""

from __future__ import annotations

import ctypes
import resource
import sys

import torch

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of glibc's mallopt


def return_freed_memory() -> None:
    """Have this process give freed tensors back to the system at once, where its allocator is glibc's.

    Left alone it keeps freed blocks of up to 32 MB for later, and their gaps add up to hundreds of megabytes when
    tensors of many sizes come and go. For the start of a program, since it concerns the whole process.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 4 << 20)
        mallopt(_TRIM_THRESHOLD, 16 << 20)


def peak_memory() -> int:
    """Largest resident set of this process so far, in bytes; touched pages of mapped files are counted."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_gpu_memory(device: torch.device) -> int | None:
    """Most memory that tensors held on a GPU so far, in bytes; None for a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
