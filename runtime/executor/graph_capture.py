"""Capturing work into CUDA graphs that share one memory pool."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

log = logging.getLogger(__name__)

T = TypeVar("T")


def largest_first(sizes: list[int], capture: Callable[[int, Any], T], what: str) -> dict[int, T]:
    """What `capture` (size, pool) gives for every size; the smaller graphs reuse the memory of the larger.

    Where the memory does not suffice, the larger sizes are left out, which is logged: such steps run uncaptured.

    Args:
        sizes: descending.
        what: is counted by them, a word for the log.
    """
    while sizes:
        captured: dict[int, T] = {}
        pool = torch.cuda.graph_pool_handle()
        try:
            for size in sizes:
                captured[size] = capture(size, pool)
            return captured
        except torch.OutOfMemoryError:
            captured.clear()
            torch.cuda.empty_cache()
            sizes = [s for s in sizes if s < sizes[0] // 2]
            log.warning(
                "the memory does not suffice for all CUDA graphs: %s",
                f"steps of more than {sizes[0]} {what} run without" if sizes else f"steps of all {what} run without",
            )
    return {}


class Recorder(Protocol):
    """Runs work in a way that can be repeated."""

    def __call__(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Callable[[], object], tuple[Tensor, ...]]:
        """(what repeats `work`, its results). The results' memory may be reused once they are dropped."""
        ...


class GraphRecorder:
    """A Recorder of CUDA graphs. Work must have run once outside, so that nothing is compiled while it is captured.

    One stream captures all, so that the pool's memory passes from one graph to the next.
    """

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._pool, self._stream = pool, stream

    def __call__(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Callable[[], object], tuple[Tensor, ...]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                results = work()
            except BaseException:
                with suppress(RuntimeError):  # what went wrong is being raised
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay, results


class _Bytes:
    """Device memory as torch is told of it without being given a hold on it."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def borrowed(tensor: Tensor) -> Tensor:
    """The same contents, contiguous, without keeping their memory from being reused by the pool that it is from.

    For results of a graph that are read between its replay and the replay of the next graph of the pool.
    """
    if not tensor.is_cuda:
        return tensor
    flat = torch.as_tensor(_Bytes(tensor), device=tensor.device)
    return flat.view(tensor.dtype).view(tensor.shape)
