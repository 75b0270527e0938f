"""Attention of prompts over the paged KV cache in Triton: all chunks of a step in one launch, causal, with whatever
context precedes them. FlashAttention's online softmax (Dao et al. 2022, arXiv 2205.14135)."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtool.runtime.kernels.kv_cache import KVCache

QUERIES = 128  # of a program
LOG2_E = 1.4426950408889634


@triton.jit
def _step(
    q, accumulator, peak, total, start, key_limit, positions, table, cache, scales, head, block_stride, head_stride,
    token_stride, factor, cap, window, kv_heads, block_size: tl.constexpr, dim: tl.constexpr, padded: tl.constexpr,
    keys: tl.constexpr, has_scales: tl.constexpr, has_cap: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """One tile of keys and values: scores, the running softmax, the weighted sum."""
    at = start + tl.arange(0, keys)
    dims = tl.arange(0, padded)
    blocks = tl.load(table + at // block_size, mask=at < key_limit, other=0)
    blocks = blocks.to(tl.int64)
    key_rows = (blocks * block_size + at % block_size) * (2 * kv_heads) + head
    scale_at = scales + blocks * block_stride + head * head_stride + at % block_size * token_stride
    # beyond the context: zeros, since 0 times what lies there must be 0, even if that is NaN
    inside = (dims[None, :] < dim) & (at < key_limit)[:, None]
    k = tl.load(cache + key_rows[:, None] * dim + dims[None, :], mask=inside, other=0)
    s = tl.dot(q, tl.trans(k.to(q.dtype)))
    if has_scales:
        key_scales = tl.load(scale_at, mask=at < key_limit, other=0)
        s *= key_scales.to(tl.float32)[None, :]
    if has_cap:  # cap tanh(s / cap), with s and cap times log2 e as `factor` is, so that no factor is left
        s = cap - 2 * cap / (tl.exp2(s * (factor * 2.8853900817779268 / cap)) + 1)
        factor = 1.0
    if masked:
        seen = (at[None, :] <= positions[:, None]) & (at[None, :] > positions[:, None] - window)
        s = tl.where(seen, s, float("-inf"))
    top = tl.maximum(peak, tl.max(s, 1) * factor)
    base = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(s * factor - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(p, 1)
    v = tl.load(cache + (key_rows + kv_heads)[:, None] * dim + dims[None, :], mask=inside, other=0)
    if has_scales:
        # times 256, which keeps small scales within float16
        value_scales = tl.load(scale_at + kv_heads * head_stride, mask=at < key_limit, other=0)
        p *= value_scales.to(tl.float32)[None, :] * 256.0
    accumulator = tl.dot(p.to(q.dtype), v.to(q.dtype), accumulator * shrink[:, None])
    return accumulator, top, total


# One compilation for any step: its tables are of any width, and lie anywhere in the memory that holds its layout.
@triton.jit(do_not_specialize=["table_width"], do_not_specialize_on_alignment=["tables", "tiles"])
def _prefill(
    qkv, cache, scales, tables, tiles, out, table_width, block_stride, head_stride, token_stride, factor, cap,
    window, heads, kv_heads, block_size: tl.constexpr, dim: tl.constexpr, padded: tl.constexpr, queries: tl.constexpr,
    keys: tl.constexpr, has_scales: tl.constexpr, has_cap: tl.constexpr,
):  # fmt: skip
    """A program: one head of one tile of queries. tiles: [num_tiles, 4]: row of `tables`, first row of the step, its
    position, number of queries."""
    tile = tiles + tl.program_id(1) * 4
    head = tl.program_id(0)
    table = tables + tl.load(tile) * table_width
    first_row = tl.load(tile + 1)
    first = tl.load(tile + 2)
    count = tl.load(tile + 3)
    kv_head = head // (heads // kv_heads)
    rows = tl.arange(0, queries)
    dims = tl.arange(0, padded)
    positions = first + rows
    real = (rows[:, None] < count) & (dims[None, :] < dim)
    width = (heads + 2 * kv_heads) * dim
    at = (first_row + rows).to(tl.int64)
    q = tl.load(qkv + at[:, None] * width + head * dim + dims[None, :], mask=real, other=0)
    accumulator = tl.zeros([queries, padded], tl.float32)
    peak = tl.full([queries], float("-inf"), tl.float32)
    total = tl.zeros([queries], tl.float32)
    limit = first + count
    begin = tl.maximum(first - window + 1, 0) // keys * keys
    begin_free = tl.maximum(limit - window, 0)  # from here on every query sees, as far as the window goes
    begin_free = (begin_free + keys - 1) // keys * keys
    end_free = (first + 1) // keys * keys  # up to here every query sees, as far as order goes
    begin_free = tl.minimum(begin_free, tl.maximum(end_free, begin))
    end_free = tl.maximum(end_free, begin_free)
    for start in range(begin, begin_free, keys):
        accumulator, peak, total = _step(
            q, accumulator, peak, total, start, limit, positions, table, cache, scales, kv_head, block_stride,
            head_stride, token_stride, factor, cap, window, kv_heads, block_size, dim, padded, keys, has_scales,
            has_cap, True,
        )  # fmt: skip
    for start in range(begin_free, end_free, keys):
        accumulator, peak, total = _step(
            q, accumulator, peak, total, start, limit, positions, table, cache, scales, kv_head, block_stride,
            head_stride, token_stride, factor, cap, window, kv_heads, block_size, dim, padded, keys, has_scales,
            has_cap, False,
        )  # fmt: skip
    for start in range(end_free, limit, keys):
        accumulator, peak, total = _step(
            q, accumulator, peak, total, start, limit, positions, table, cache, scales, kv_head, block_stride,
            head_stride, token_stride, factor, cap, window, kv_heads, block_size, dim, padded, keys, has_scales,
            has_cap, True,
        )  # fmt: skip
    if has_scales:
        accumulator *= 1.0 / 256.0
    result = accumulator / tl.where(total == 0, 1.0, total)[:, None]
    target = out + at[:, None] * (heads * dim) + head * dim + dims[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=real)


@functools.cache
def _pipeline(device: torch.device, padded: int) -> tuple[int, int]:
    """Keys of a step of the loop, and steps in flight: as much as the device's shared memory holds."""
    if padded > 128:
        return 32, 2
    # 165 KB of shared memory, or 99: Hopper and data-center Blackwell have 227, others as little as 99
    roomy = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)
    return (128 if roomy else 64), 3


def query_tiles(table_rows: list[int], first_rows: list[int], starts: list[int], counts: list[int]) -> list[list[int]]:
    """The work of _prefill, the longest contexts first: [row of the tables, first row of the step, its position, number
    of queries] of each tile."""
    tiles = [
        [table, row + i, start + i, min(QUERIES, count - i)]
        for table, row, start, count in zip(table_rows, first_rows, starts, counts)
        for i in range(0, count, QUERIES)
    ]
    return sorted(tiles, key=lambda tile: -tile[2])


def prefill_attention(
    qkv: Tensor,
    cache: KVCache,
    tables: Tensor,
    tiles: Tensor,
    heads: int,
    window: int | None,
    soft_cap: float,
    out: Tensor,
) -> None:
    """Causal attention of the queries that `tiles` lists; their rows of `out` are written.

    Args:
        qkv: [num_tokens, (heads + 2 * kv_heads) * head_dim], queries rotated; keys and values are in `cache` already.
        tables: [sequences, blocks] int32.
        tiles: [num_tiles, 4] int32, see query_tiles.
        window: a token sees itself and the window - 1 tokens before it; None: all.
        soft_cap: see AttentionShape.
        out: [num_tokens, heads * head_dim].
    """
    values, scales = cache.values, cache.scales
    dim, kv_heads = values.shape[3], values.shape[2] // 2
    padded = triton.next_power_of_2(dim)
    keys, stages = _pipeline(qkv.device, padded)
    _prefill[(heads, len(tiles))](
        qkv,
        values,
        values if scales is None else scales,
        tables,
        tiles,
        out,
        tables.stride(0),
        *((0, 0, 0) if scales is None else (scales.stride(0), scales.stride(1), scales.stride(2))),
        dim**-0.5 * LOG2_E,
        soft_cap * LOG2_E,
        1 << 30 if window is None else window,
        heads,
        kv_heads,
        block_size=values.shape[1],
        dim=dim,
        padded=padded,
        queries=QUERIES,
        keys=keys,
        has_scales=scales is not None,
        has_cap=soft_cap > 0,
        num_warps=8,
        num_stages=stages,
    )  # fmt: skip
