"""Decode steps as CUDA graphs: one for each padded number of sequences, from token ids to sampled tokens.

A step copies its inputs into fixed buffers and replays a graph, which leaves the sampled tokens in another; the host
waits for none of it. Graphs are captured largest first into one memory pool, so that the smaller ones reuse what the
largest took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qtool.runtime.executor.graph_capture import largest_first
from qtool.runtime.kernels.cuda.attention import PagedBatch, num_sms, scratch, split_shares
from qtool.runtime.kernels.cuda.tokens import feed, greedy
from qtool.runtime.kernels.kv_cache import KVCache
from qtool.runtime.kernels.layer_ops import LayerOps
from qtool.runtime.models.decoder import Decoder

_TURNS = 2  # host buffers: one is filled while the device still reads the other


def graph_sizes(most: int) -> list[int]:
    """Numbers of sequences with a graph, descending: 1, 2, 4, multiples of 8, of 16 from 128, of 32 from 256."""
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, most + 32, 32)]
    return sorted({min(s, most) for s in sizes}, reverse=True)


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    plan: PagedBatch  # what the graph reads and writes stays allocated
    logits: Tensor  # [size, vocab_size] in the model's dtype


@dataclass(frozen=True)
class _HostRows:
    """Inputs of one step on the host, pinned. `given`, `source`, `positions` are the rows of `head`."""

    head: Tensor  # [3, most] int32
    tables: Tensor  # [most, blocks] int32
    held: list[tuple[Sequence[int], int]]  # the table, and how much of it, that a row of `tables` holds


class DecodeGraphs:
    """The captured decode steps of one model.

    Args:
        sampled: [≥ max_num_seqs] int32, where every step, captured or not, leaves its tokens in the order of its rows.
        max_num_seqs: most sequences of a step.
        max_blocks: most KV blocks of a sequence.
        sizes: numbers of sequences to capture, descending; None: graph_sizes(max_num_seqs).
    """

    def __init__(
        self,
        model: Decoder,
        caches: Sequence[KVCache],
        ops: LayerOps,
        sampled: Tensor,
        *,
        max_num_seqs: int,
        max_blocks: int,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self._model, self._caches, self._ops, self._sampled = model, caches, ops, sampled
        device = sampled.device
        self._head = torch.zeros(3, max_num_seqs, dtype=torch.int32, device=device)
        self._tables = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        self._hosts = [
            _HostRows(
                torch.zeros(3, max_num_seqs, dtype=torch.int32, pin_memory=True),
                torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, pin_memory=True),
                [((), 0)] * max_num_seqs,
            )
            for _ in range(_TURNS)
        ]
        self._turn = 0
        self._longest = max_blocks * caches[0].values.shape[1]
        self._graphs = self._capture_all(list(sizes or graph_sizes(max_num_seqs)))

    @property
    def sizes(self) -> list[int]:
        """Numbers of sequences that have a graph, ascending."""
        return sorted(self._graphs)

    def fits(self, count: int) -> bool:
        return bool(self._graphs) and count <= max(self._graphs)

    def _capture_all(self, sizes: list[int]) -> dict[int, _Captured]:
        self._head[2].fill_(-1)  # rows without a sequence: nothing is read from the cache, and nothing written
        return largest_first(sizes, self._capture, "sequences")

    def _capture(self, size: int, pool: Any) -> _Captured:
        model, shape = self._model, self._model.attention_shape
        device = self._sampled.device
        shares = split_shares(size, shape.num_kv_heads, self._longest, num_sms(device))
        partial, counters = scratch(size, shape, shares, device)
        positions = self._head[2, :size]
        plan = PagedBatch(positions, positions, self._tables[:size], size, None, shares, partial, counters)

        def step() -> Tensor:
            tokens = feed(self._head[0, :size], self._head[1, :size], self._sampled)
            logits = model.logits(model.forward(tokens, plan, self._caches, self._ops), self._ops)
            greedy(logits, self._sampled[:size])
            return logits

        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            step()  # compiles what is missing and sets up cuBLAS, neither of which may happen while capturing
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits = step()
        return _Captured(graph, plan, logits)

    def replay(
        self,
        tokens: Sequence[int],
        sources: Sequence[int],
        positions: Sequence[int],
        tables: Sequence[Sequence[int]],
    ) -> Tensor:
        """Queue one step of len(tokens) sequences; the sampled tokens will be in the first rows of `sampled`.

        Args:
            tokens: the last token of each sequence; not read where `sources` is not negative.
            sources: row of `sampled` where the step before leaves the token, or -1.
            positions: of these tokens.
            tables: KV blocks of each sequence. One that is the same object and as long as before is not copied again:
                tables only grow.

        Returns:
            logits [len(tokens), vocab_size] in the model's dtype, valid until the next step.
        """
        count = len(tokens)
        size = min(s for s in self._graphs if s >= count)
        host = self._hosts[self._turn]
        self._turn = (self._turn + 1) % _TURNS
        head = host.head.numpy()
        head[0, :count], head[1, :count], head[2, :count] = tokens, sources, positions
        head[1, count:size], head[2, count:size] = -1, -1
        rows: np.ndarray = host.tables.numpy()
        for i, table in enumerate(tables):
            length, (held, held_length) = len(table), host.held[i]
            if held is not table or held_length != length:
                rows[i, :length] = table
                host.held[i] = (table, length)
        self._head.copy_(host.head, non_blocking=True)
        self._tables[:count].copy_(host.tables[:count], non_blocking=True)
        captured = self._graphs[size]
        captured.graph.replay()
        return captured.logits[:count]
