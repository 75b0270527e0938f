"""The int8 KV cache: its grid, attention over it against float64, what it holds and what it forgets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qtool.quant.kv_numerics import from_codes, to_codes, token_scales
from qtool.runtime.kernels.attention import paged_attention, plan_attention
from qtool.runtime.kernels.kv_cache import KVCache, KVMode, kv_bytes_per_token, make_kv_cache

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 16, 8
MODES: tuple[KVMode, ...] = ("float", "int8", "int8-static")


def new_cache(mode: KVMode, num_blocks: int = 16, dtype: torch.dtype = torch.float32) -> KVCache:
    scales = torch.full((2 * KV_HEADS,), 5 / 127) if mode == "int8-static" else None
    return make_kv_cache(num_blocks, BLOCK, 2 * KV_HEADS, DIM, dtype=dtype, mode=mode, device=CPU, static_scales=scales)


@given(st.floats(-30, 30), st.floats(0, 1), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_a_code_is_at_most_half_a_scale_off(magnitude: float, outlier: float, seed: int) -> None:
    torch.manual_seed(seed)
    kv = torch.randn(5, 3, DIM) * 10.0**magnitude
    kv[0, 0, 0] *= 10 ** (3 * outlier)
    kv[1] = 0
    scales = token_scales(kv)
    found = from_codes(to_codes(kv, scales), scales, torch.float64)
    exact = kv.abs().amax(-1).double() / 127
    assert ((found - kv.double()).abs() <= 0.5001 * scales.double()[..., None]).all()
    assert (scales.double() <= exact * (1 + 2**-8) + 2e-38).all(), "the scale is the largest magnitude's, in bfloat16"
    assert (found[1] == 0).all()


def reference(
    q: Tensor, kv: Tensor, window: int | None, soft_cap: float = 0.0, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Causal attention of the last len(q) of len(kv) tokens, in float64; [len(q), HEADS * DIM]."""
    keys, values = kv.to(dtype).repeat_interleave(HEADS // KV_HEADS, dim=1).chunk(2, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.to(dtype), keys) * DIM**-0.5
    if soft_cap:
        scores = soft_cap * (scores / soft_cap).tanh()
    query = torch.arange(len(kv) - len(q), len(kv))[:, None]
    key = torch.arange(len(kv))
    allowed = (key <= query) if window is None else (key <= query) & (key > query - window)
    probabilities = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", probabilities, values).reshape(len(q), -1)


@pytest.mark.parametrize("soft_cap", [0.0, 0.5])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("mode", MODES)
def test_attention_is_that_of_float64_over_the_cached_values(mode: KVMode, window: int | None, soft_cap: float) -> None:
    """Decodes of two lengths, drafts of two, a chunk with context before it, and a chunk without: in one step."""
    torch.manual_seed(3)
    cache = new_cache(mode, num_blocks=24)
    contexts, counts = [4, 21, 3, 14, 2, 0, 13], [1, 1, 5, 5, 3, 7, 10]
    tables = [[3], [9, 1, 6], [12], [13, 4, 14], [15], [2], [5, 0, 11]]
    kv = [torch.randn(start + count, 2 * KV_HEADS, DIM) for start, count in zip(contexts, counts)]
    read = []  # as the cache hands them back
    for tokens, start, table in zip(kv, contexts, tables):
        slots = torch.tensor([table[p // BLOCK] * BLOCK + p % BLOCK for p in range(start)], dtype=torch.long)
        read.append(cache.write(tokens[:start], slots))
    plan = plan_attention(
        contexts,
        counts,
        tables,
        block_size=BLOCK,
        windows=frozenset([window]),
        dtype=torch.float32,
        device=CPU,
        heads_per_key=HEADS // KV_HEADS,
    )
    assert [group.count for group in plan.decodes] == [1, 5, 3]
    q = torch.randn(sum(counts), HEADS, DIM)
    now = cache.write(torch.cat([t[s:] for t, s in zip(kv, contexts)]), plan.slot_mapping)
    found = paged_attention(q, now, cache, plan, scale=DIM**-0.5, window=window, soft_cap=soft_cap).double()
    row = 0
    for before, own, tokens, count in zip(read, now.split(counts), kv, counts):
        rows = slice(row, row + count)
        row += count
        cached = torch.cat([before, own])
        assert (found[rows] - reference(q[rows], cached, window, soft_cap)).abs().max() < 1e-5
        exact = reference(q[rows], tokens, window, soft_cap)
        error = float((found[rows] - exact).norm() / exact.norm())
        assert error < {"float": 1e-6, "int8": 0.01, "int8-static": 0.03}[mode]
        assert mode == "float" or error > 1e-4, "the codes were read, not the tokens"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("mode", MODES)
def test_bytes_are_those_of_the_tensors(mode: KVMode, dtype: torch.dtype) -> None:
    cache = new_cache(mode, num_blocks=3, dtype=dtype)
    assert cache.num_bytes == 3 * BLOCK * kv_bytes_per_token(2 * KV_HEADS, DIM, dtype, mode)
    tensors = [cache.values] if cache.scales is None else [cache.values, cache.scales]
    held = sum(t.untyped_storage().nbytes() for t in tensors)
    fixed = 4 * 2 * KV_HEADS if mode == "int8-static" else 0  # the scales themselves, once
    assert held == cache.num_bytes + fixed


def test_static_scales_stay_and_what_lies_beyond_them_is_clipped() -> None:
    cache = new_cache("int8-static")
    assert cache.static
    before = cache.scales.clone() if cache.scales is not None else None
    kv = torch.full((1, 2 * KV_HEADS, DIM), 80.0)
    read = cache.write(kv, torch.tensor([9]))
    assert read.unique().item() == pytest.approx(5, rel=0.004)
    assert before is not None
    assert cache.scales is not None
    assert torch.equal(cache.scales, before)
    keys, values = cache.gather(torch.tensor([1]), 1, BLOCK, torch.float32)
    assert torch.equal(keys[0, :, 1], read[0, :KV_HEADS])
    assert torch.equal(values[0, :, 1], read[0, KV_HEADS:])


@pytest.mark.parametrize("mode", ["float", "int8"])
def test_what_is_no_number_is_seen_and_can_be_erased(mode: KVMode) -> None:
    cache = new_cache(mode)
    kv = torch.ones(2, 2 * KV_HEADS, DIM)
    kv[0, 0, 3] = float("nan")
    slots = torch.tensor([8, 9])
    assert cache.write(kv, slots)[0, 0].isnan().any()
    keys, _ = cache.gather(torch.tensor([1]), 1, BLOCK, torch.float32)
    assert keys.isnan().any()
    cache.erase(slots[:1])
    keys, values = cache.gather(torch.tensor([1]), 1, BLOCK, torch.float32)
    assert keys[0, :, 0].abs().max() == 0
    assert keys[0, :, 1].mean() == pytest.approx(1, rel=0.004)
    assert values.isfinite().all()
