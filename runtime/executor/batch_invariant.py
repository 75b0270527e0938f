"""The same bits for a token whatever is computed beside it: alone or in a batch, whole or in chunks, cold or cached.

Sums of floating-point numbers depend on their order, and libraries choose the order by the shape of a product (He et
al. 2025, "Defeating Nondeterminism in LLM Inference"). So every product by a weight is made in tiles of a fixed number
of rows, and every token attends for itself over its own context; what is left works on each row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qtool.runtime.engine.params import TokenLogprobs
from qtool.runtime.executor.sampler import SamplingRow, sample
from qtool.runtime.kernels.attention import AttentionBatch, plan_attention
from qtool.runtime.kernels.layer_ops import AttentionShape, LayerOps
from qtool.runtime.models.decoder import Decoder, DecoderLayer
from qtool.runtime.models.layers import LinearFn

TILE_ROWS = 16


@dataclass(frozen=True)
class RowTiled:
    """A linear that is always given `rows` rows at a time, the last tile filled up with zeros."""

    linear: LinearFn
    rows: int

    def __call__(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        if count == 0:
            return self.linear(x)
        padded = x.new_zeros(-(-count // self.rows), self.rows, x.shape[1])
        padded.flatten(0, 1)[:count] = x
        return torch.cat([self.linear(tile) for tile in padded])[:count]


def rows_are_alike(linear: LinearFn, x: Tensor) -> bool:
    """A row of `x` [rows, in_features] gives the same bits in every place of the tile, and beside other rows."""
    want = linear(x)
    turned = (torch.equal(linear(x.roll(by, 0)).roll(-by, 0), want) for by in range(1, len(x)))
    alone = torch.zeros_like(x)
    alone[0] = x[0]
    return all(turned) and torch.equal(linear(alone)[0], want[0])


def _tiled(linear: LinearFn, cols: int, dtype: torch.dtype) -> RowTiled:
    """The widest tile that was seen to treat its rows alike: one row always does."""
    x = torch.randn(TILE_ROWS, cols, generator=torch.Generator().manual_seed(0)).to(dtype)
    return RowTiled(linear, TILE_ROWS if rows_are_alike(linear, x) else 1)


def invariant_model(model: Decoder) -> Decoder:
    """The model with all of its products in tiles."""
    config = model.config
    hidden, inner, attended = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim

    def layer(old: DecoderLayer) -> DecoderLayer:
        return replace(
            old,
            qkv=_tiled(old.qkv, hidden, model.dtype),
            o=_tiled(old.o, attended, model.dtype),
            gate_up=_tiled(old.gate_up, hidden, model.dtype),
            down=_tiled(old.down, inner, model.dtype),
        )

    return replace(model, layers=tuple(map(layer, model.layers)), head=_tiled(model.head, hidden, model.dtype))


def invariant_ops(ops: LayerOps) -> LayerOps:
    """Torch's operations with every token attending for itself."""
    return replace(ops, plan=_plan_apart)


def _plan_apart(
    starts: Sequence[int],
    counts: Sequence[int],
    tables: Sequence[Sequence[int]],
    *,
    block_size: int,
    shape: AttentionShape,
    windows: frozenset[int | None],
    dtype: torch.dtype,
    device: torch.device,
    also: Sequence[Sequence[int]] = (),
) -> AttentionBatch:
    """The layout of a step with each of its tokens as a row of its own."""
    positions = [start + i for start, count in zip(starts, counts) for i in range(count)]
    own = [table for count, table in zip(counts, tables) for _ in range(count)]
    ones = [1] * len(positions)
    return plan_attention(
        positions, ones, own, block_size=block_size, windows=windows, dtype=dtype, device=device, also=also, apart=True
    )


def sample_apart(logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[list[int], list[TokenLogprobs | None]]:
    """As `sample`, row by row."""
    each = [sample(logits[i : i + 1], [row]) for i, row in enumerate(rows)]
    return [tokens[0] for tokens, _ in each], [logprobs[0] for _, logprobs in each]
