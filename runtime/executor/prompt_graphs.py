"""Steps that hold prompts, as CUDA graphs of the pieces between attentions.

What a decoder does between two attentions depends on the number of tokens alone: such a piece is captured once for each
of a ladder of token counts, and a step is padded up to the next of them. Attention, which depends on every sequence's
context, runs between the pieces over the real tokens alone, so that padding reaches no KV cache; and since pieces work
on each row alone, it changes no real row either. (Piecewise CUDA graphs, as vLLM has them.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qtool.runtime.executor.graph_capture import GraphRecorder, Recorder, borrowed, largest_first
from qtool.runtime.kernels.kv_cache import KVCache
from qtool.runtime.kernels.layer_ops import LayerOps, StepPlan
from qtool.runtime.models.decoder import Decoder

MOST_TOKENS = 2048  # above, the device takes longer over a step than the host over its launches


def token_counts(most: int) -> list[int]:
    """Numbers of tokens with graphs, descending: 16, 32, multiples of 32 up to 128, of 64 to 512, of 128 to 2,048."""
    ladder = [16, 32, 64, 96, *range(128, 512, 64), *range(512, MOST_TOKENS + 1, 128)]
    return sorted({min(s, most) for s in ladder}, reverse=True)


@dataclass(frozen=True)
class _Piece:
    """From one attention to the next: `qkv` is what the next one reads, and after the last layer the hidden states."""

    replay: Callable[[], object]
    qkv: Tensor


def record_pieces(
    model: Decoder, ops: LayerOps, ids: Tensor, attended: Tensor, record: Recorder, lend: Callable[[Tensor], Tensor]
) -> list[_Piece]:
    """The pieces of a step of len(ids) tokens, in order; one more than layers.

    Args:
        ids: [tokens] int32, where a step's token ids will lie.
        attended: [tokens, num_heads * head_dim], where attention will leave its results.
        lend: makes of a result what may be kept without holding its memory.
    """
    replay, (qkv, hidden) = record(partial(model.enter, ids, ops))
    pieces = [_Piece(replay, lend(qkv))]
    for index in range(len(model.layers)):
        del qkv  # attention has read it by the time the next piece runs, which may use the memory
        replay, (qkv, hidden) = record(partial(model.advance, index, attended, hidden, ops))
        pieces.append(_Piece(replay, lend(qkv)))
    return pieces


class PromptGraphs:
    """The pieces of one model for the ladder of token counts.

    Args:
        sizes: token counts, descending.
        recorder: makes the recorder of one size; None: CUDA graphs.
    """

    def __init__(
        self,
        model: Decoder,
        caches: Sequence[KVCache],
        ops: LayerOps,
        sizes: Sequence[int],
        recorder: Recorder | None = None,
    ) -> None:
        self._model, self._caches, self._ops = model, caches, ops
        device, config = model.embed.device, model.config
        self._ids = torch.zeros(sizes[0], dtype=torch.int32, device=device)
        self._attended = torch.zeros(
            sizes[0], config.num_heads * config.head_dim, dtype=model.dtype, device=device
        )  # of padding: whatever an earlier step has left
        if recorder is not None:
            self._pieces = {size: self._record(size, recorder) for size in sizes}
            return
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pieces = largest_first(list(sizes), self._capture, "tokens with prompts")

    @property
    def sizes(self) -> list[int]:
        """Numbers of tokens that have graphs, ascending."""
        return sorted(self._pieces)

    def fits(self, count: int) -> bool:
        return bool(self._pieces) and count <= max(self._pieces)

    def ids(self, count: int) -> Tensor:
        """Where the token ids of a step of `count` tokens are to be put: [count] int32."""
        return self._ids[:count]

    def _record(self, size: int, record: Recorder) -> list[_Piece]:
        return record_pieces(self._model, self._ops, self._ids[:size], self._attended[:size], record, borrowed)

    def _capture(self, size: int, pool: Any) -> list[_Piece]:
        stream, device = self._stream, self._ids.device
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._record(size, _run_once)  # compiles what is missing and sets up cuBLAS
        stream.synchronize()
        pieces = self._record(size, GraphRecorder(pool, stream))
        for piece in pieces:  # the first replay brings a graph to the device
            piece.replay()
        torch.cuda.current_stream(device).synchronize()
        return pieces

    def forward(self, count: int, plan: StepPlan) -> Tensor:
        """Hidden states [count, hidden_size] of a step whose token ids are in `ids(count)`; good until the next step.

        `plan` is the ops' layout of its `count` tokens; keys and values go into the caches.
        """
        model, ops = self._model, self._ops
        pieces = self._pieces[min(s for s in self._pieces if s >= count)]
        rotation, out = ops.rotation(model.cos, model.sin, plan), self._attended[:count]
        for index, (piece, cache) in enumerate(zip(pieces, self._caches)):
            piece.replay()
            model.attend(index, piece.qkv[:count], rotation, cache, plan, ops, out)
        pieces[-1].replay()
        return pieces[-1].qkv[:count]


def _run_once(work: Callable[[], tuple[Tensor, ...]]) -> tuple[Callable[[], object], tuple[Tensor, ...]]:
    """A Recorder that keeps nothing."""
    return work, work()
