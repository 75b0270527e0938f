"""Time kernels as they are used: replayed from a CUDA graph, on data that the L2 cache does not hold."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_COLD_BYTES = 260_000_000  # several times the L2 of today's GPUs
_HOT_TOKENS, _MANY_TOKENS = 128, 256  # from here on a product is a matter of power; takes long


def _median_milliseconds(work: Callable[[], object], repeats: int) -> float:
    times: list[float] = []
    for _ in range(repeats):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def copies(tensors: Sequence[Tensor], most: int = 48) -> list[tuple[Tensor, ...]]:
    """`tensors` and as many clones as it takes for a round over them to exceed the L2 cache (2 to `most` in all)."""
    size = sum(t.numel() * t.element_size() for t in tensors)
    count = max(2, min(most, math.ceil(_COLD_BYTES / max(1, size))))
    return [tuple(tensors), *(tuple(t.clone() for t in tensors) for _ in range(count - 1))]


def settling(tokens: int) -> float:
    """Seconds after which a product of so many tokens runs at the clock that its power allows."""
    return 0.1 if tokens >= _HOT_TOKENS else 0.0


def calls_of(tokens: int, *rounds: int) -> int:
    """Products of so many tokens that one graph should hold: at least one for each weight that takes turns, and so many
    that the few microseconds between the event and the first kernel of a graph do not count."""
    return max(16 if tokens >= _MANY_TOKENS else 100, *rounds)


def _capture(call: Callable[[int], object], calls: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(min(2, calls)):
            call(i)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    return graph


def _replay(graph: torch.cuda.CUDAGraph, seconds: float) -> None:
    """Once at least."""
    until = time.perf_counter() + seconds
    graph.replay()
    while time.perf_counter() < until:
        graph.replay()
        torch.cuda.synchronize()


def graph_microseconds(call: Callable[[int], object], calls: int, replays: int = 9) -> float:
    """Median microseconds of one `call(i)`, i = 0 .. calls - 1 captured into one CUDA graph and replayed.

    Args:
        call: enqueues the work.
        calls: in the graph.
        replays: that are timed.
    """
    return in_turns([call], calls, replays, rounds=1)[0]


def in_turns(
    work: Sequence[Callable[[int], object]], calls: int, replays: int = 9, settle: float = 0.0, rounds: int = 3
) -> list[float]:
    """graph_microseconds of several kinds of work that take turns, so that none always meets a cooler device; medians
    of all `rounds`. `settle`: seconds of replays before each, after which the clock is what the work's power allows;
    then the last kind runs before the first is timed, too: the device cools while graphs are captured."""
    graphs = [_capture(call, calls) for call in work]
    found: list[list[float]] = [[] for _ in work]
    if settle:
        _replay(graphs[-1], settle)
    for _ in range(rounds):
        for graph, times in zip(graphs, found, strict=True):
            _replay(graph, settle)
            times.append(1e3 * _median_milliseconds(graph.replay, replays) / calls)
    return [statistics.median(times) for times in found]


def copy_ceiling(device: torch.device) -> float:
    """GB/s of a large device-to-device copy, bytes read plus bytes written: what memory gives at most."""
    source = torch.randn(1 << 30, dtype=torch.float16, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    milliseconds = _median_milliseconds(lambda: target.copy_(source), 9)
    return 2 * source.numel() * source.element_size() / milliseconds / 1e6
