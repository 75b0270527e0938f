"""Decode steps as CUDA graphs: one for each padded number of sequences, from token ids to sampled tokens.

A step copies its inputs into fixed buffers and replays a graph, which leaves the sampled tokens in another; the host
waits for none of it. Graphs are captured largest first into one memory pool, so that the smaller ones reuse what the
largest took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtool.runtime.executor.decode_inputs import DecodeInputs
from qtool.runtime.executor.graph_capture import largest_first
from qtool.runtime.kernels.cuda.attention import PagedBatch, scratch, split_decodes
from qtool.runtime.kernels.cuda.tokens import feed, greedy
from qtool.runtime.kernels.kv_cache import KVCache
from qtool.runtime.kernels.layer_ops import LayerOps
from qtool.runtime.models.decoder import Decoder


def graph_sizes(most: int) -> list[int]:
    """Numbers of sequences with a graph, descending: 1, 2, 4, multiples of 8, of 16 from 128, of 32 from 256."""
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, most + 32, 32)]
    return sorted({min(s, most) for s in sizes}, reverse=True)


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    plan: PagedBatch  # what the graph reads and writes stays allocated
    logits: Tensor  # [size, vocab_size] in the model's dtype


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
        self._inputs = DecodeInputs(max_num_seqs, max_blocks, sampled.device)
        self._longest = max_blocks * caches[0].values.shape[1]
        # captured over rows of padding, which read nothing from the cache and write nothing
        self._graphs = largest_first(list(sizes or graph_sizes(max_num_seqs)), self._capture, "sequences")

    @property
    def sizes(self) -> list[int]:
        """Numbers of sequences that have a graph, ascending."""
        return sorted(self._graphs)

    def fits(self, count: int) -> bool:
        return bool(self._graphs) and count <= max(self._graphs)

    def _capture(self, size: int, pool: Any) -> _Captured:
        model, shape = self._model, self._model.attention_shape
        device = self._sampled.device
        split = split_decodes(size, shape, self._longest, device)
        partial, counters = scratch(size, shape, split, device)
        inputs = self._inputs
        given, sources, positions = (t[:size] for t in (inputs.given, inputs.sources, inputs.positions))
        plan = PagedBatch(positions, positions, inputs.tables[:size], size, None, split, partial, counters)

        def step() -> Tensor:
            tokens = feed(given, sources, self._sampled)
            logits = model.all_logits(tokens, plan, self._caches, self._ops)
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
        self._inputs.put(tokens, sources, positions, tables, size)
        captured = self._graphs[size]
        captured.graph.replay()
        return captured.logits[:count]
