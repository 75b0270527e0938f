"""How much memory this process has needed so far."""

from __future__ import annotations

import resource
import sys

import torch


def peak_memory() -> int:
    """Largest resident set of this process so far, in bytes; touched pages of mapped files are counted."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_gpu_memory(device: torch.device) -> int | None:
    """Most memory that tensors held on a GPU so far, in bytes; None for a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
