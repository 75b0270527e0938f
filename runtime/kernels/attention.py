"""Attention over the paged KV cache, in torch, on any device.

One cache per layer (kv_cache.py). A step's tokens are laid out flat: first the sequences that compute one token each
(decodes), then those that compute a few after their context (drafts to verify), both sorted by context length and cut
into groups of similar length, then the longer chunks (prefills), one after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from qtool.runtime.kernels.kv_cache import KVCache

# Chunks of up to so many tokens with context before them attend together where they are equally long.
SHORT = 17
# A group's padding may cost this many tokens of attention before a second call is cheaper.
MAX_PADDING = 512
# Chunks with context before them attend in slices of this many queries, so that a mask stays small.
QUERY_SLICE = 512

Masks = Mapping[int | None, Tensor | None]
"""Sliding window (None: none) → additive mask in the activations' dtype; None where nothing is masked."""


@dataclass(frozen=True)
class DecodeGroup:
    """Rows `rows` of the step, `count` of each sequence, over gathered blocks [sequences * blocks per sequence]."""

    rows: slice
    count: int
    block_ids: Tensor
    length: int  # keys per sequence, padded
    masks: Masks  # each [sequences, 1, count * query heads of a KV head, length]; that 1 where count is 1


@dataclass(frozen=True)
class Prefill:
    """A chunk of one request: rows `rows` of the step. `block_ids` is None where no context precedes the chunk."""

    rows: slice
    block_ids: Tensor | None
    length: int  # context and chunk
    masks: Masks  # each [len(rows), length]; None: plain causal


@dataclass(frozen=True)
class AttentionBatch:
    """All that the layers of one step share."""

    positions: Tensor  # [num_tokens] int64
    slot_mapping: Tensor  # [num_tokens] int64: block * block_size + offset
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[Prefill, ...]
    also: tuple[Tensor, ...] = ()  # int32 each


def group_by_length(lengths: Sequence[int], max_padding: int = MAX_PADDING) -> list[slice]:
    """Cut lengths, given in ascending order, into runs; padding each run to its longest costs ≤ `max_padding`."""
    runs: list[slice] = []
    end = len(lengths)
    padding = 0
    for i in range(len(lengths) - 1, -1, -1):
        padding += lengths[end - 1] - lengths[i]
        if padding > max_padding:
            runs.append(slice(i + 1, end))
            end, padding = i + 1, 0
    if end:
        runs.append(slice(0, end))
    return runs[::-1]


def _alike(starts: Sequence[int], counts: Sequence[int]) -> Iterator[int]:
    """Lengths of the runs of sequences at the front that can attend together: as many tokens, starts ascending."""
    size = 0
    for i, (start, count) in enumerate(zip(starts, counts)):
        if count > 1 and (count > SHORT or start == 0):
            break
        if size and (counts[i - 1] != count or (starts[i - 1] > start and count > 1)):
            yield size
            size = 0
        size += 1
    if size:
        yield size


def _visible(query: Tensor, length: int, window: int | None) -> Tensor:
    """Which keys [length] each query position [rows, 1] sees."""
    key = torch.arange(length, device=query.device)
    allowed = key <= query
    return allowed if window is None else allowed & (key > query - window)


def _blocked(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """True → 0, False → -inf."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))


def plan_attention(
    starts: Sequence[int],
    counts: Sequence[int],
    tables: Sequence[Sequence[int]],
    *,
    block_size: int,
    windows: frozenset[int | None],
    dtype: torch.dtype,
    device: torch.device,
    also: Sequence[Sequence[int]] = (),
    apart: bool = False,
    heads_per_key: int = 1,
) -> AttentionBatch:
    """Lay out a step: row i computes tokens starts[i] .. starts[i] + counts[i] - 1 of the sequence in tables[i].

    Rows of one token come first, in ascending order of `starts`; in any order where they stay `apart`, each a group of
    its own, so that nothing of a row's attention depends on the others. Short chunks after a context come next, best
    in ascending order of their length and start. `heads_per_key`: query heads of a KV head. `also`: numbers that are
    wanted on the device.
    """
    positions: list[int] = []
    slots: list[int] = []
    for start, count, table in zip(starts, counts, tables):
        span = range(start, start + count)
        positions.extend(span)
        slots.extend([table[p // block_size] * block_size + p % block_size for p in span])
    position = torch.tensor(positions, dtype=torch.long, device=device)
    decodes = []
    row = first = 0
    for size in _alike(starts, counts):
        some = slice(first, first + size)
        count, ends = counts[first], [start + counts[first] for start in starts[some]]
        for part in [slice(i, i + 1) for i in range(size)] if apart else group_by_length(ends):
            own = slice(first + part.start, first + part.stop)
            rows = slice(row + part.start * count, row + part.stop * count)
            blocks = -(-ends[part.stop - 1] // block_size)
            ids = [b for table in tables[own] for b in (*table[:blocks], *[table[0]] * (blocks - len(table)))]
            alone = part.stop - part.start == 1
            length = ends[part.start] if alone else blocks * block_size
            masks: dict[int | None, Tensor | None] = {}
            for window in windows:
                if alone and count == 1 and (window is None or length <= window):
                    masks[window] = None
                    continue
                mask = _blocked(_visible(position[rows, None], length, window), dtype).view(-1, 1, count, length)
                masks[window] = mask if count == 1 else mask.repeat_interleave(heads_per_key, dim=2)
            decodes.append(DecodeGroup(rows, count, torch.tensor(ids, device=device), length, masks))
        row += size * count
        first += size
    prefills = []
    for start, count, table in zip(starts[first:], counts[first:], tables[first:]):
        length = start + count
        rows = slice(row, row + count)
        row += count
        used = None
        if start:
            used = torch.tensor(table[: -(-length // block_size)], device=device)
        masks = {}
        for window in windows:
            if start == 0 and (window is None or length <= window):
                masks[window] = None
                continue
            masks[window] = _blocked(_visible(position[rows, None], length, window), dtype)
        prefills.append(Prefill(rows, used, length, masks))
    brought = tuple(torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in also)
    slot = torch.tensor(slots, dtype=torch.long, device=device)
    return AttentionBatch(position, slot, tuple(decodes), tuple(prefills), brought)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, soft_cap: float, *, causal: bool
) -> Tensor:
    """Attention [rows, heads, count, dim] over keys and values [rows, kv_heads, length, dim]. `causal`: without a mask,
    as many queries as keys."""
    grouped = query.shape[1] != keys.shape[1]
    if not soft_cap:
        return functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    if grouped:
        keys, values = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (keys, values))
    scores = soft_cap * torch.tanh((query @ keys.transpose(-1, -2)).float() * (scale / soft_cap))
    if causal:
        mask = _blocked(torch.ones_like(scores[0, 0], dtype=torch.bool).tril(), scores.dtype)
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1).to(values.dtype) @ values


def paged_attention(
    q: Tensor,
    kv: Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None,
    soft_cap: float = 0.0,
) -> Tensor:
    """Causal attention of a step's queries over their sequences.

    Args:
        q: [num_tokens, num_heads, head_dim].
        kv: [num_tokens, 2 * num_kv_heads, head_dim] as KVCache.write gave them back: already in `cache`.
        window: a token sees itself and the window - 1 tokens before it; None: all.
        soft_cap: see AttentionShape.

    Returns:
        [num_tokens, num_heads * head_dim].
    """
    tokens, heads, dim = q.shape
    kv_heads = kv.shape[1] // 2
    out = torch.empty_like(q)
    for group in batch.decodes:
        count = group.count
        sequences = (group.rows.stop - group.rows.start) // count
        keys, values = cache.gather(group.block_ids, sequences, group.length, q.dtype)
        # The query heads of one KV head see the same keys: they stand in for query positions.
        query = q[group.rows].view(sequences, count, kv_heads, heads // kv_heads, dim).transpose(1, 2).flatten(2, 3)
        found = _attend(query, keys, values, group.masks[window], scale, soft_cap, causal=False)
        found = found.view(sequences, kv_heads, count, heads // kv_heads, dim).transpose(1, 2)
        out[group.rows] = found.reshape(sequences * count, heads, dim)
    for prefill in batch.prefills:
        query = q[prefill.rows].transpose(0, 1)[None]
        if prefill.block_ids is None:
            mine = kv[prefill.rows].transpose(0, 1)[None]
            keys, values = mine[:, :kv_heads], mine[:, kv_heads:]
        else:
            keys, values = cache.gather(prefill.block_ids, 1, prefill.length, q.dtype)
        mask = prefill.masks[window]
        if mask is None:
            found = _attend(query, keys, values, None, scale, soft_cap, causal=True)
            out[prefill.rows] = found[0].transpose(0, 1)
            continue
        target = out[prefill.rows]
        for i in range(0, query.shape[2], QUERY_SLICE):
            part = slice(i, i + QUERY_SLICE)
            found = _attend(query[:, :, part], keys, values, mask[part], scale, soft_cap, causal=False)
            target[part] = found[0].transpose(0, 1)
    return out.view(tokens, heads * dim)
