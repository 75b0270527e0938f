"""Where a device's memory goes, line by line, and how much is left for the KV cache. Arithmetic alone: no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qtool.quant.errors import QtoolError

DEFAULT_UTILIZATION = 0.9
"""Share of the memory free at start that an engine takes where none is asked for."""


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes on one device.

    Attributes:
        device: its name, for people.
        limit: most that this engine may hold.
        weights: of the model, with what the libraries took to run at all.
        activations: the largest step, decodes and prompt chunks mixed, at its peak.
        activations_measured: by running it; else estimated from the model's shape.
        graphs: captured decode steps; 0 where the device has none.
        kv_cache, kv_tokens: the KV cache, and the tokens that it holds.
        swap_space: host memory for swapped requests; not part of `limit` on a GPU.
    """

    device: str
    limit: int
    weights: int
    activations: int
    activations_measured: bool
    graphs: int
    kv_cache: int
    kv_tokens: int
    swap_space: int = 0

    @property
    def unused(self) -> int:
        return self.limit - self.weights - self.activations - self.graphs - self.kv_cache

    def lines(self) -> list[str]:
        """The budget for people, one line an item."""
        how = "measured" if self.activations_measured else "estimated"
        items = [
            (f"memory on {self.device}", self.limit, "at most"),
            ("  weights", self.weights, ""),
            ("  activations", self.activations, f"largest mixed step, {how}"),
            ("  CUDA graphs", self.graphs, ""),
            ("  KV cache", self.kv_cache, f"{self.kv_tokens} tokens"),
            ("  unused", self.unused, ""),
            ("swap space on the host", self.swap_space, ""),
        ]
        optional = ("  CUDA graphs", "swap space on the host")
        shown = [item for item in items if item[1] or item[0] not in optional]
        return [f"{name:24} {in_units(size):>11}  {remark}".rstrip() for name, size, remark in shown]


def in_units(size: int) -> str:
    """Bytes in the largest binary unit of which there is one, such as `1.50 GiB`."""
    for exponent, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(size) >= 1 << 10 * exponent:
            return f"{size / (1 << 10 * exponent):.2f} {unit}"
    return f"{size} B"


def engine_limit(total: int, free: int, utilization: float | None) -> int:
    """Bytes that an engine may hold, before its model is loaded.

    Args:
        total, free: bytes of the device, and those that nobody holds.
        utilization: share of `total`. None: DEFAULT_UTILIZATION of `free`.

    Raises:
        QtoolError: more than is free.
    """
    if utilization is None:
        return int(free * DEFAULT_UTILIZATION)
    limit = int(total * utilization)
    if limit > free:
        raise QtoolError(
            f"gpu_memory_utilization {utilization:g} is {in_units(limit)}, but {in_units(free)} of {in_units(total)} "
            f"are free: use {_floor_share(free, total)} or less"
        )
    return limit


def kv_bytes_left(
    limit: int,
    *,
    total: int,
    weights: int,
    activations: int,
    graphs: int,
    least: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> int:
    """Bytes that the rest leaves for the KV cache, of which it needs `least`.

    Raises:
        QtoolError: too few; names the largest number of tokens in a step with which it would fit, or the utilization.
    """
    left = limit - weights - activations - graphs
    if left >= least:
        return left
    fixed = weights + graphs + least
    what = (
        f"weights {in_units(weights)}, activations {in_units(activations)}, CUDA graphs {in_units(graphs)} and "
        f"{in_units(least)} for the least KV cache do not fit into {in_units(limit)}: "
    )
    tokens = int((limit - fixed) / activations * max_num_batched_tokens) if activations else 0
    if tokens >= max_num_seqs:
        raise QtoolError(f"{what}set max_num_batched_tokens to {tokens} or less")
    share = math.ceil((fixed + activations) / total * 100) / 100
    if share <= 1:
        raise QtoolError(f"{what}set gpu_memory_utilization to {share:g} or more")
    raise QtoolError(f"{what}the device is too small for this model; quantize it, or take a smaller one")


def check_length(
    max_model_len: int, room: int, block_bytes: int, block_size: int, *, option: str = "kv_cache_memory"
) -> None:
    """Raise QtoolError where a cache of `room` tokens does not hold one request of `max_model_len` tokens."""
    if max_model_len <= room:
        return
    needed = -(-max_model_len // block_size) * block_bytes
    raise QtoolError(
        f"the KV cache holds {room} tokens, fewer than max_model_len {max_model_len}: set max_model_len to {room} or "
        f"less, or give it more memory by {option} ({needed} bytes in all)"
    )


def _floor_share(part: int, whole: int) -> str:
    return f"{math.floor(part / whole * 100) / 100:g}"
