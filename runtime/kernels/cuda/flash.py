"""Attention of prompts on Hopper: their keys and values out of the paged cache into tiles (gather.cu), then one kernel
for all chunks of a step (flash.cu). The tiles, in 16 bits, take memory and time for every token of context, so long
contexts before few new tokens are left to prefill.py, which reads the cache itself."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.runtime.kernels.cuda.driver import Kernel, load_kernel
from qtool.runtime.kernels.kv_cache import KVCache

HEAD_DIMS = (64, 128)
_TILES_BYTES = 256 << 20  # that the keys and values of a step may take
# Query-key pairs a key, and a query head of a KV head, from which laying out the keys pays: estimated from the rates of
# memory (3 TB/s) and of both kernels (450 TFLOP/s; prefill.py 230, and 115 over an int8 cache) on an H200.
_PAYS_FROM = {False: 300, True: 100}
_THREADS = 384  # two warpgroups that multiply, one that copies
_GATHER_THREADS = 256
_STAGES = {64: 12, 128: 6}  # tiles of keys or values in shared memory, by head size
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class PromptKeys:
    """The keys of a step's prompts in tiles of head_dim tokens.

    Attributes:
        spans: [tiles, 3] int32: row of the step's tables, first token, tokens.
        starts: [rows of the tables] int32: a row's first tile.
        tokens: new ones of all prompts.
        keys: of all prompts, contexts included.
        pairs: of a new token and a key, as if no order hid any.
    """

    spans: Tensor
    starts: Tensor
    tokens: int
    keys: int
    pairs: int


def key_spans(first_row: int, lengths: Sequence[int], size: int) -> tuple[list[list[int]], list[int]]:
    """PromptKeys.spans and starts in tiles of `size`, of sequences in rows first_row ... of the tables."""
    spans: list[list[int]] = []
    starts = [0] * first_row
    for row, length in enumerate(lengths, first_row):
        starts.append(len(spans))
        spans += [[row, i, min(size, length - i)] for i in range(0, length, size)]
    return spans, starts


@functools.cache
def _runs(device: torch.device, dim: int) -> bool:
    return device.type == "cuda" and dim in HEAD_DIMS and torch.cuda.get_device_capability(device) == (9, 0)


def pays(keys: PromptKeys, cache: KVCache, heads: int, window: int | None) -> bool:
    """Whether flash.cu runs such a step here and is likely the faster way."""
    _, _, both, dim = cache.values.shape
    if not _runs(cache.values.device, dim):
        return False
    pairs = keys.pairs if window is None else min(keys.pairs, keys.tokens * window)
    fits = len(keys.spans) * dim * both * dim * 2 <= _TILES_BYTES
    return fits and 2 * pairs * heads >= _PAYS_FROM[cache.scales is not None] * keys.keys * both


@functools.cache
def _gather_kernel(device: torch.device, dtype: torch.dtype, dim: int, kv: int, block_size: int) -> Kernel:
    """kv: as the macro KV of rotate.cuh."""
    bf16 = int(dtype == torch.bfloat16)
    macros = {"D": dim, "KEYS": dim, "BF16": bf16, "KV": kv, "BS": block_size, "WEIGHT_BITS": 8}
    return load_kernel(device, "gather.cu", "gather", macros)


@functools.cache
def _flash_kernel(device: torch.device, dtype: torch.dtype, dim: int, capped: bool) -> tuple[Kernel, int]:
    """The kernel and its bytes of dynamic shared memory."""
    macros = {"D": dim, "KEYS": dim, "TOKENS": dim, "BF16": int(dtype == torch.bfloat16)}
    macros |= {"ACT_BITS": 16, "STAGES": _STAGES[dim], "WEIGHT_BITS": 8, "SOFT_CAP": int(capped)}
    size = _STAGES[dim] * dim * dim * 2
    return load_kernel(device, "flash.cu", "flash", macros, shared_limit=size), size


def gather(cache: KVCache, tables: Tensor, spans: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys and values of `spans` in `dtype`, as flash.cu reads them. [tiles, kv_heads, 2, dim / 64, dim tokens, 64]"""
    _, block_size, both, dim = cache.values.shape
    device = cache.values.device
    out = torch.empty(len(spans), both // 2, 2, dim // 64, dim, 64, dtype=dtype, device=device)
    scales = cache.values if cache.scales is None else cache.scales
    kv = 0 if cache.scales is None else 2 if cache.static else 1
    _gather_kernel(device, dtype, dim, kv, block_size).launch(
        (len(spans), both, 1),
        _GATHER_THREADS,
        (cache.values, scales, tables, spans, out, tables.stride(0), both // 2),
        overlap=True,
    )
    return out


def flash_attention(
    qkv: Tensor,
    cache: KVCache,
    tables: Tensor,
    tiles: Tensor,
    keys: PromptKeys,
    heads: int,
    window: int | None,
    soft_cap: float,
    out: Tensor,
) -> None:
    """As prefill.prefill_attention, for a step for which `pays` holds."""
    dim, kv_heads = cache.values.shape[3], cache.values.shape[2] // 2
    kv = gather(cache, tables, keys.spans, qkv.dtype)
    kernel, size = _flash_kernel(qkv.device, qkv.dtype, dim, soft_cap > 0)
    kernel.launch(
        (heads, len(tiles), 1),
        _THREADS,
        (qkv, kv, tiles, keys.starts, out, heads, kv_heads, window or 1 << 30, dim**-0.5 * LOG2_E, soft_cap * LOG2_E),
        shared_bytes=size,
        overlap=True,
    )
