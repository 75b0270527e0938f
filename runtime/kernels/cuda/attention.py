"""Paged attention on a GPU: the layout of a step, and the launches for its decodes (decode_attention.cu) and its
prompts (rotate.cu, then flash.py or prefill.py)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qtool.runtime.kernels.cuda.driver import Kernel, has_clusters, load_kernel
from qtool.runtime.kernels.cuda.flash import PromptKeys, flash_attention, key_spans, pays
from qtool.runtime.kernels.kv_cache import KVCache
from qtool.runtime.kernels.layer_ops import AttentionShape

HEAD_DIMS = (64, 128, 192, 256)
MAX_GROUP = 16  # query heads of a KV head: one tile of the tensor cores
WARPS = 4  # of a decode block
_TILE = 16  # tokens that a warp takes at a time
_MAX_SHARES = 32  # of one context, as in decode_attention.cu
# What a decode block takes beside its tokens, in tokens, and what more where shares are summed up: by the times of 5
# loads on an H200 (31 ns a token where all slots work).
_BLOCK_TOKENS, _SUM_TOKENS = 50, 130
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Split:
    """How decodes' contexts are cut: into at most `shares` pieces of at least `least_tiles` tiles of 16 tokens."""

    shares: int
    least_tiles: int


@dataclass(frozen=True)
class PagedBatch:
    """The layout of one step: rows that compute one token each (decodes) first, then the chunks of prompts.

    Attributes:
        positions: [num_tokens] int32; negative where a decode row is padding.
        slot_mapping: [num_tokens] int32, block * block_size + offset.
        tables: [num_sequences, blocks] int32, the decodes' first.
        num_decodes: rows of one token.
        tiles: of the prompts, [num_tiles, 4] int32, see prefill.query_tiles; None where there are none.
        split: of the decodes.
        partial: float32 room for the pieces' sums; counters: int32 zeros, one for each KV head of each decode.
        keys: of the prompts; None where there are none.
        also: what was brought along, int32.
    """

    positions: Tensor
    slot_mapping: Tensor
    tables: Tensor
    num_decodes: int
    tiles: Tensor | None
    split: Split
    partial: Tensor
    counters: Tensor
    keys: PromptKeys | None = None
    also: tuple[Tensor, ...] = ()


def blocks_per_sm(shape: AttentionShape) -> int:
    """Decode blocks that a multiprocessor's registers hold."""
    if shape.head_dim > 128:
        return 1
    return 4 if shape.num_heads // shape.num_kv_heads <= 8 else 3


def split_contexts(sequences: int, kv_heads: int, longest: int, slots: int) -> Split:
    """How contexts of up to `longest` tokens are cut on a device that holds `slots` blocks at once.

    Where whole contexts leave slots idle: into as many pieces as fill them, none shorter than a tile for each warp, so
    that a context's pieces depend on its own length, not on `longest`, while there are slots for all of them. Else by
    the least cost, which is rounds over the device by what a block takes, and shorter contexts into fewer pieces.
    """
    blocks = max(1, sequences * kv_heads)
    most = max(1, min(-(-longest // (_TILE * WARPS)), _MAX_SHARES))
    if blocks < slots:
        return Split(min(most, slots // blocks), WARPS)

    def cost(shares: int) -> float:
        rounds = -(-blocks * shares // slots)
        return rounds * (longest / shares + _BLOCK_TOKENS + (_SUM_TOKENS if shares > 1 else 0))

    shares = min(range(1, most + 1), key=cost)
    return Split(shares, max(WARPS, -(-longest // (_TILE * shares))))


def split_decodes(sequences: int, shape: AttentionShape, longest: int, device: torch.device) -> Split:
    """split_contexts on `device`."""
    return split_contexts(sequences, shape.num_kv_heads, longest, num_sms(device) * blocks_per_sm(shape))


def scratch(sequences: int, shape: AttentionShape, split: Split, device: torch.device) -> tuple[Tensor, Tensor]:
    """PagedBatch.partial and counters."""
    size = 0 if split.shares == 1 else sequences * split.shares * shape.num_heads * (shape.head_dim + 2)
    partial = torch.empty(size, dtype=torch.float32, device=device)
    return partial, torch.zeros(sequences * shape.num_kv_heads, dtype=torch.int32, device=device)


@functools.cache
def num_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """int32 arrays on the device, by one copy that the host does not wait for."""
    flat = torch.empty(sum(a.size for a in arrays), dtype=torch.int32, pin_memory=device.type == "cuda")
    flat.numpy()[:] = np.concatenate([a.reshape(-1) for a in arrays])
    there = flat.to(device, non_blocking=True)
    parts = torch.split(there, [a.size for a in arrays])
    return [part.view(a.shape) for part, a in zip(parts, arrays)]


def plan_step(
    starts: Sequence[int],
    counts: Sequence[int],
    tables: Sequence[Sequence[int]],
    *,
    block_size: int,
    shape: AttentionShape,
    device: torch.device,
    also: Sequence[Sequence[int]] = (),
) -> PagedBatch:
    """Lay out a step: row i computes tokens starts[i] .. starts[i] + counts[i] - 1 of the sequence in tables[i].

    Rows of one token come first. `also`: numbers that travel in the same copy to the device.
    """
    from qtool.runtime.kernels.cuda.prefill import query_tiles

    decodes = sum(1 for c in counts if c == 1)
    width = max(len(t) for t in tables)
    table = np.zeros((len(tables), width), dtype=np.int32)
    for row, ids in zip(table, tables):
        row[: len(ids)] = ids
    sequence = np.repeat(np.arange(len(counts)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    position = np.arange(len(sequence)) - first + np.repeat(np.array(starts), counts)
    slot = table[sequence, position // block_size] * block_size + position % block_size
    rows = np.cumsum(counts) - counts
    tiles = query_tiles(
        list(range(decodes, len(counts))), rows[decodes:].tolist(), list(starts[decodes:]), list(counts[decodes:])
    )
    new = list(counts[decodes:])
    lengths = [start + count for start, count in zip(starts[decodes:], new)]
    spans, firsts = key_spans(decodes, lengths, shape.head_dim)
    arrays = [position, slot, table, np.array(tiles).reshape(-1, 4), np.array(spans).reshape(-1, 3), np.array(firsts)]
    arrays += [np.array(numbers) for numbers in also]
    there = to_device([a.astype(np.int32) for a in arrays], device)
    positions, slots, table_there, tiles_there, spans_there, firsts_there, *rest = there
    pairs = sum(length * count for length, count in zip(lengths, new))
    keys = PromptKeys(spans_there, firsts_there, sum(new), sum(lengths), pairs) if tiles else None
    split = split_decodes(decodes, shape, max(starts[:decodes], default=0) + 1, device)
    partial, counters = scratch(decodes, shape, split, device)
    prompts = tiles_there if tiles else None
    return PagedBatch(positions, slots, table_there, decodes, prompts, split, partial, counters, keys, tuple(rest))


@dataclass(frozen=True)
class _Setting:
    """What the kernels are compiled for.

    Attributes:
        kv: as the macro KV of rotate.cuh: 0: 16 bits, 1: int8 with a scale a token and head, 2: with fixed scales.
        block_size: tokens of a cache block.
        normed: queries and keys are.
    """

    device: torch.device
    shape: AttentionShape
    dtype: torch.dtype
    kv: int
    block_size: int
    normed: bool


def _macros(setting: _Setting) -> dict[str, int]:
    return {
        "BF16": int(setting.dtype == torch.bfloat16),
        "D": setting.shape.head_dim,
        "KV": setting.kv,
        "QK_NORM": int(setting.normed),
        "BS": setting.block_size,
        "WEIGHT_BITS": 8,
    }


@functools.cache
def _rotate_kernel(setting: _Setting) -> Kernel:
    return load_kernel(setting.device, "rotate.cu", "rotate", _macros(setting))


@functools.cache
def _decode_kernel(setting: _Setting) -> tuple[Kernel, int]:
    """The kernel and its bytes of dynamic shared memory."""
    dim, group = setting.shape.head_dim, setting.shape.num_heads // setting.shape.num_kv_heads
    macros = _macros(setting) | {
        "G": group,
        "SOFT_CAP": int(setting.shape.soft_cap > 0),
        "WARPS": WARPS,
        "MINB": blocks_per_sm(setting.shape),
    }
    size = (16 if group > 8 else 8) * (dim + 32) * 2 + WARPS * group * dim * 4
    return load_kernel(setting.device, "decode_attention.cu", "decode_attention", macros, shared_limit=size), size


def attend(
    qkv: Tensor,
    shape: AttentionShape,
    norms: tuple[Tensor, Tensor] | None,
    rotation: tuple[Tensor, Tensor],
    cache: KVCache,
    plan: PagedBatch,
    window: int | None,
    out: Tensor | None = None,
) -> Tensor:
    """As layer_ops.AttendFn; qkv's queries of prompts are rotated in place."""
    if out is None:
        out = torch.empty(len(qkv), shape.num_heads * shape.head_dim, dtype=qkv.dtype, device=qkv.device)
    cos, sin = rotation
    q_norm, k_norm = norms or (cos, cos)  # not read without norms
    scales = cache.values if cache.scales is None else cache.scales
    decodes, overlap = plan.num_decodes, has_clusters(qkv.device.index)
    kv = 0 if cache.scales is None else 2 if cache.static else 1
    setting = _Setting(qkv.device, shape, qkv.dtype, kv, cache.values.shape[1], norms is not None)
    if decodes:
        kernel, size = _decode_kernel(setting)
        kernel.launch(
            (shape.num_kv_heads, plan.split.shares, decodes),
            WARPS * 32,
            (qkv, q_norm, k_norm, cos, sin, cache.values, scales, plan.positions, plan.tables, out, plan.partial,
             plan.counters, plan.tables.stride(0), plan.split.least_tiles, window or 0, shape.head_dim**-0.5 * LOG2_E,
             shape.soft_cap * LOG2_E, shape.eps),
            shared_bytes=size,
            overlap=overlap,
        )  # fmt: skip
    if plan.tiles is not None:
        rows = (qkv, plan.positions, plan.slot_mapping)
        mine, positions, slots = (t[decodes:] for t in rows) if decodes else rows
        _rotate_kernel(setting).launch(
            (len(mine), 1, 1),
            256,
            (mine, q_norm, k_norm, cos, sin, cache.values, scales, positions, slots,
             shape.num_heads, shape.num_kv_heads, shape.eps),
            overlap=overlap,
        )  # fmt: skip
        if plan.keys is not None and pays(plan.keys, cache, shape.num_heads, window):
            flash_attention(
                qkv, cache, plan.tables, plan.tiles, plan.keys, shape.num_heads, window, shape.soft_cap, out
            )
        else:
            from qtool.runtime.kernels.cuda.prefill import prefill_attention

            prefill_attention(qkv, cache, plan.tables, plan.tiles, shape.num_heads, window, shape.soft_cap, out)
    return out
