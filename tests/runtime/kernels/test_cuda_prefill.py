"""The Triton prefill kernel against float64 attention: in Triton's interpreter, or on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

ON_GPU = torch.cuda.is_available()
SEED = 5


def reference(q: Tensor, k: Tensor, v: Tensor, first: int, window: int | None) -> Tensor:
    """q [n, heads, dim] at positions first ...; k, v [first + n, kv_heads, dim]; all float64 → [n, heads, dim]."""
    heads, dim = q.shape[1:]
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
    at, key = torch.arange(first, first + len(q))[:, None], torch.arange(len(k))[None]
    seen = (key <= at) & (key > at - (window or 1 << 30))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen.to(q.device), -torch.inf).softmax(-1), v)


def check(dim: int, heads: int, kv_heads: int, chunks: list[tuple[int, int]], window: int | None, mode: str) -> None:
    """chunks: (context, tokens) of each sequence; fragmented tables over a cache with garbage in unused slots."""
    from qtool.runtime.kernels.cuda.prefill import prefill_attention, query_tiles
    from qtool.runtime.kernels.kv_cache import make_kv_cache

    device = torch.device("cuda" if ON_GPU else "cpu")
    dtype, size = torch.float16, 16
    torch.manual_seed(SEED)
    num_blocks = sum(-(-(c + n) // size) for c, n in chunks) + 3
    order = torch.randperm(num_blocks).tolist()
    scales = torch.rand(2 * kv_heads) * 0.02 + 0.02
    cache = make_kv_cache(
        num_blocks, size, 2 * kv_heads, dim, dtype=dtype, mode=mode, device=device, static_scales=scales
    )
    tables, rows, wants = [], [], []
    for context, tokens in chunks:
        length = context + tokens
        table = [order.pop() for _ in range(-(-length // size))]
        kv = torch.randn(length, 2 * kv_heads, dim, dtype=dtype, device=device)
        slots = torch.tensor([table[i // size] * size + i % size for i in range(length)], device=device)
        kept = cache.write(kv, slots).double()
        q = torch.randn(tokens, heads, dim, dtype=dtype, device=device)
        wants.append(reference(q.double(), kept[:, :kv_heads], kept[:, kv_heads:], context, window))
        rows.append(torch.cat((q, kv[context:]), dim=1).flatten(1))
        tables.append(table)
    width = max(map(len, tables))
    counts = [n for _, n in chunks]
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    tiles = query_tiles(list(range(len(chunks))), firsts, [c for c, _ in chunks], counts)
    qkv = torch.cat(rows)
    out = torch.full((len(qkv), heads * dim), torch.nan, dtype=dtype, device=device)
    table = torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32, device=device)
    prefill_attention(qkv, cache, table, torch.tensor(tiles, dtype=torch.int32, device=device), heads, window, out)
    want = torch.cat(wants).flatten(1)
    error = float((out.double() - want).norm() / want.norm())
    assert error < 2e-3, error


CASES = [
    (64, 2, 2, [(0, 5), (0, 130)], None, "float"),
    (64, 4, 2, [(70, 33), (0, 2)], None, "float"),
    (128, 2, 1, [(150, 40)], 37, "float"),
    (64, 2, 1, [(0, 90), (65, 3)], 200, "int8"),
    (192, 2, 1, [(20, 17)], None, "int8-static"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefill_on_the_gpu(case: tuple[int, int, int, list[tuple[int, int]], int | None, str]) -> None:
    check(*case)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("mode", ["float", "int8"])
def test_long_prompts_on_the_gpu(dim: int, mode: str) -> None:
    check(dim, 8, 2, [(0, 1000), (700, 300), (1, 129), (64, 64)], None, mode)
    check(dim, 8, 2, [(0, 1000), (700, 300)], 333, mode)


@pytest.mark.skipif(ON_GPU, reason="the GPU runs the kernel itself")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefill_in_the_interpreter(case: tuple[int, int, int, list[tuple[int, int]], int | None, str]) -> None:
    check(*case)
