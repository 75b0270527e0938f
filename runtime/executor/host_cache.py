"""KV blocks in host memory, and their way from and to the device."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.engine.request import Request
from qtool.runtime.engine.swap import BlockCopy
from qtool.runtime.kernels.kv_cache import KVCache

SAMPLE_BLOCKS = 32  # copied to measure the rate


class HostCache:
    """`num_blocks` blocks of every layer in host memory, pinned where the device is a GPU.

    Copies are queued on the device's stream like the steps between which they are made: nothing waits for them.
    """

    def __init__(self, caches: Sequence[KVCache], num_blocks: int) -> None:
        pin = caches[0].values.is_cuda
        self._pairs = [
            (paged, torch.empty((num_blocks, *paged.shape[1:]), dtype=paged.dtype, pin_memory=pin))
            for cache in caches
            for paged in _stored(cache)
        ]
        self._device = caches[0].values.device
        self.num_blocks = num_blocks

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Make the copies, in order."""
        for work in copies:
            ids = torch.tensor(list(work.device_blocks), dtype=torch.long, device=self._device)
            runs = list(_runs(work.host_blocks))
            for paged, host in self._pairs:
                if work.out:
                    _out(paged, host, ids, runs)
                else:
                    _back(paged, host, ids, runs)

    def measure(self) -> float:
        """Seconds to copy a block one way; for a cache that holds nothing yet."""
        count = min(SAMPLE_BLOCKS, self.num_blocks, len(self._pairs[0][0]))
        blocks, nobody = list(range(count)), Request("", [0], SamplingParams())
        both = [BlockCopy(nobody, out, blocks, blocks) for out in (True, False)]
        times = []
        for _ in range(3):
            began = time.perf_counter()
            self.copy(both)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            times.append(time.perf_counter() - began)
        return min(times) / (2 * count)


def _stored(cache: KVCache) -> Iterator[Tensor]:
    """What a block consists of; static scales belong to no block."""
    yield cache.values
    if cache.scales is not None and not cache.static:
        yield cache.scales


def _runs(blocks: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Places in `blocks` and the blocks there, in stretches of neighbours."""
    for _, group in itertools.groupby(enumerate(blocks), key=lambda item: item[1] - item[0]):
        items = list(group)
        (at, first), count = items[0], len(items)
        yield slice(at, at + count), slice(first, first + count)


def _out(paged: Tensor, host: Tensor, ids: Tensor, runs: Sequence[tuple[slice, slice]]) -> None:
    staged = paged.index_select(0, ids)
    for part, blocks in runs:
        host[blocks].copy_(staged[part], non_blocking=True)


def _back(paged: Tensor, host: Tensor, ids: Tensor, runs: Sequence[tuple[slice, slice]]) -> None:
    staged = torch.empty((len(ids), *paged.shape[1:]), dtype=paged.dtype, device=paged.device)
    for part, blocks in runs:
        staged[part].copy_(host[blocks], non_blocking=True)
    paged.index_copy_(0, ids, staged)
