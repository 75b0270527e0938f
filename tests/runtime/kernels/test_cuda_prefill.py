"""The kernels for prompts against float64 attention: Triton's in its interpreter, or on a GPU where there is one, and
Hopper's own (flash.cu) there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

ON_GPU = torch.cuda.is_available()
SEED = 5


def reference(q: Tensor, k: Tensor, v: Tensor, first: int, window: int | None, soft_cap: float) -> Tensor:
    """q [n, heads, dim] at positions first ...; k, v [first + n, kv_heads, dim]; all float64 → [n, heads, dim]."""
    heads, dim = q.shape[1:]
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
    if soft_cap:
        scores = soft_cap * (scores / soft_cap).tanh()
    at, key = torch.arange(first, first + len(q))[:, None], torch.arange(len(k))[None]
    seen = (key <= at) & (key > at - (window or 1 << 30))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen.to(q.device), -torch.inf).softmax(-1), v)


def check(
    dim: int,
    heads: int,
    kv_heads: int,
    chunks: list[tuple[int, int]],
    window: int | None,
    mode: str,
    *,
    dtype: torch.dtype = torch.float16,
    flash: bool = False,
    soft_cap: float = 0.0,
) -> None:
    """chunks: (context, tokens) of each sequence; fragmented tables over a cache with NaN in unused slots."""
    from qtool.runtime.kernels.cuda.flash import PromptKeys, flash_attention, key_spans
    from qtool.runtime.kernels.cuda.prefill import prefill_attention, query_tiles
    from qtool.runtime.kernels.kv_cache import make_kv_cache

    device = torch.device("cuda" if ON_GPU else "cpu")
    size = 16
    torch.manual_seed(SEED)
    num_blocks = sum(-(-(c + n) // size) for c, n in chunks) + 3
    order = torch.randperm(num_blocks).tolist()
    scales = torch.rand(2 * kv_heads) * 0.02 + 0.02
    cache = make_kv_cache(
        num_blocks, size, 2 * kv_heads, dim, dtype=dtype, mode=mode, device=device, static_scales=scales
    )
    if mode == "float":
        cache.values.fill_(torch.nan)
    elif mode == "int8":
        assert cache.scales is not None
        cache.scales.fill_(torch.nan)
    tables, rows, wants = [], [], []
    for context, tokens in chunks:
        length = context + tokens
        table = [order.pop() for _ in range(-(-length // size))]
        kv = torch.randn(length, 2 * kv_heads, dim, dtype=dtype, device=device)
        slots = torch.tensor([table[i // size] * size + i % size for i in range(length)], device=device)
        kept = cache.write(kv, slots).double()
        q = torch.randn(tokens, heads, dim, dtype=dtype, device=device)
        wants.append(reference(q.double(), kept[:, :kv_heads], kept[:, kv_heads:], context, window, soft_cap))
        rows.append(torch.cat((q, kv[context:]), dim=1).flatten(1))
        tables.append(table)
    width = max(map(len, tables))
    counts = [n for _, n in chunks]
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    tiles = query_tiles(list(range(len(chunks))), firsts, [c for c, _ in chunks], counts)
    qkv = torch.cat(rows)
    out = torch.full((len(qkv), heads * dim), torch.nan, dtype=dtype, device=device)
    table = torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32, device=device)
    tiles_there = torch.tensor(tiles, dtype=torch.int32, device=device)
    if flash:
        spans, starts = key_spans(0, [c + n for c, n in chunks], dim)
        there = [torch.tensor(t, dtype=torch.int32, device=device) for t in (spans, starts)]
        flash_attention(qkv, cache, table, tiles_there, PromptKeys(*there, 0, 0, 0), heads, window, soft_cap, out)
    else:
        prefill_attention(qkv, cache, table, tiles_there, heads, window, soft_cap, out)
    want = torch.cat(wants).flatten(1)
    error = float((out.double() - want).norm() / want.norm())
    assert error < (2e-3 if dtype == torch.float16 else 1.2e-2), error


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


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
@pytest.mark.parametrize("mode", ["float", "int8"])
def test_soft_caps(mode: str, soft_cap: float) -> None:
    """On a GPU where there is one, else in the interpreter."""
    check(64, 2, 1, [(0, 40), (65, 3)], 50, mode, soft_cap=soft_cap)


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


@pytest.mark.one_warp
@pytest.mark.usefixtures("gpu_or_emulator")
@pytest.mark.parametrize(
    ("dim", "mode", "dtype", "window", "soft_cap"),
    [
        (64, "float", torch.float16, None, 0.0),
        (64, "int8", torch.bfloat16, 40, 0.7),
        (128, "int8-static", torch.float16, None, 0.0),
    ],
)
def test_flash_on_a_few_tokens(
    dim: int, mode: str, dtype: torch.dtype, window: int | None, soft_cap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is no GPU; with so few stages that they are filled anew."""
    from qtool.runtime.kernels.cuda import flash

    monkeypatch.setattr(flash, "_STAGES", {64: 2, 128: 2})
    monkeypatch.setattr(flash, "_flash_kernel", flash._flash_kernel.__wrapped__)
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("warpgroup tensor cores are Hopper's")
    check(dim, 2, 1, [(0, 150), (40, 9)], window, mode, dtype=dtype, flash=True, soft_cap=soft_cap)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mode", ["float", "int8", "int8-static"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_flash_on_hopper(dim: int, mode: str, dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("warpgroup tensor cores are Hopper's")
    for heads, kv_heads in ((8, 2), (4, 4), (14, 2)):
        check(dim, heads, kv_heads, [(0, 1000), (700, 300), (1, 129), (64, 64)], None, mode, dtype=dtype, flash=True)
    for window in (1, 100, 128, 333):
        check(dim, 4, 2, [(0, 700), (700, 300), (0, 2), (2000, 5)], window, mode, dtype=dtype, flash=True)
    check(dim, 4, 2, [(0, 700), (700, 300)], 333, mode, dtype=dtype, flash=True, soft_cap=0.7)
    many = [(i * 37 % 300, 2 + i * 53 % 200) for i in range(40)]
    check(dim, 4, 1, many, None, mode, dtype=dtype, flash=True)


def test_keys_are_laid_out_where_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles take memory and time for every key: much work a key, or none at all."""
    from qtool.runtime.kernels.cuda import flash
    from qtool.runtime.kernels.kv_cache import make_kv_cache

    monkeypatch.setattr(flash, "_runs", lambda device, dim: True)
    cpu = torch.device("cpu")
    cache = make_kv_cache(1, 16, 64, 128, dtype=torch.float16, mode="float", device=cpu)  # 32 KV heads

    def pays(context: int, tokens: int, window: int | None = None) -> bool:
        length = context + tokens
        spans, starts = flash.key_spans(0, [length], 128)
        there = (torch.tensor(spans), torch.tensor(starts))
        return flash.pays(flash.PromptKeys(*there, tokens, length, tokens * length), cache, 32, window)

    assert pays(0, 2048)
    assert pays(8192, 512)
    assert not pays(8192, 16)  # 8,208 keys for 16 queries
    assert not pays(8192, 512, window=128)  # which sees few of them
    assert not pays(30_000, 2048)  # 32,048 keys of 16 KiB are more than 256 MiB


def test_spans_cover_every_key_once() -> None:
    from qtool.runtime.kernels.cuda.flash import key_spans

    spans, starts = key_spans(2, [5, 128, 300], 128)
    assert starts == [0, 0, 0, 1, 2]
    assert spans == [[2, 0, 5], [3, 0, 128], [4, 0, 128], [4, 128, 128], [4, 256, 44]]
