"""Launches of the kernels that keep token ids on the device: greedy.cu at the end of a step, feed.cu at its start."""

from __future__ import annotations

import torch
from torch import Tensor

from qtool.runtime.kernels.cuda.driver import has_clusters, load_kernel

_GREEDY_THREADS = 1024
_FEED_THREADS = 256


def greedy(logits: Tensor, out: Tensor) -> None:
    """out[i] = the likeliest token of row i (the first of equals), -1 where the row has NaN or its largest is infinite.

    Args:
        logits: [rows, vocab_size] float16 or bfloat16, contiguous.
        out: [rows] int32.
    """
    macros = {"BF16": int(logits.dtype == torch.bfloat16), "THREADS": _GREEDY_THREADS, "WEIGHT_BITS": 8}
    load_kernel(logits.device, "greedy.cu", "greedy", macros).launch(
        (len(logits), 1, 1), _GREEDY_THREADS, (logits, out, logits.shape[1]), overlap=has_clusters(logits.device.index)
    )


def feed(given: Tensor, source: Tensor, sampled: Tensor, out: Tensor | None = None) -> Tensor:
    """Token ids [n] int32, in `out` if given: given[i] where source[i] < 0, else sampled[source[i]]; all int32."""
    tokens = torch.empty_like(given) if out is None else out
    load_kernel(given.device, "feed.cu", "feed", {"BF16": 0, "WEIGHT_BITS": 8}).launch(
        (-(-len(given) // _FEED_THREADS), 1, 1),
        _FEED_THREADS,
        (given, source, sampled, tokens, len(given)),
        overlap=has_clusters(given.device.index),
    )
    return tokens
