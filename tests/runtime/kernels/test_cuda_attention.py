"""decode_attention.cu and rotate.cu against float64: rotation, norms, the write into the cache, attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qtool.runtime.kernels.cuda.attention import WARPS, Split, attend, plan_step, split_contexts
from qtool.runtime.kernels.kv_cache import KVCache, make_kv_cache
from qtool.runtime.kernels.layer_ops import AttentionShape

SEED = torch.seed() % (1 << 31)
BLOCK = 16
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def tables(shape: AttentionShape, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and signed sin [length, 1, head_dim], as rope.rotation_table gives them."""
    inverse = 10000.0 ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    angles = torch.outer(torch.arange(length).float(), inverse)
    cos, sin = angles.cos(), angles.sin()
    both = torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)
    return tuple(t[:, None].to("cuda", dtype) for t in both)  # type: ignore[return-value]


def exact(
    qkv: Tensor, shape: AttentionShape, norms: tuple[Tensor, Tensor] | None, rotation: tuple[Tensor, Tensor], start: int
) -> tuple[Tensor, Tensor]:
    """float64 (queries [n, heads, dim], keys and values [n, 2 * kv_heads, dim]) of tokens start ..."""
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    x = qkv.double().view(-1, heads + 2 * kv_heads, dim)
    turned, values = x[:, : heads + kv_heads], x[:, heads + kv_heads :]
    if norms is not None:
        weight = torch.cat((norms[0].expand(heads, -1), norms[1].expand(kv_heads, -1))).double()
        turned = turned * (turned.pow(2).mean(-1, keepdim=True) + shape.eps).rsqrt() * weight
    cos, sin = (t[start : start + len(x)].double() for t in rotation)
    turned = turned * cos + turned.roll(dim // 2, -1) * sin
    return turned[:, :heads], torch.cat((turned[:, heads:], values), dim=1)


def attention(q: Tensor, kv: Tensor, first: int, window: int | None, soft_cap: float) -> Tensor:
    """float64 causal attention of queries at positions first ... over kv [first + n, 2 * kv_heads, dim]."""
    kv_heads, group = kv.shape[1] // 2, 2 * q.shape[1] // kv.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (kv[:, :kv_heads], kv[:, kv_heads:]))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    if soft_cap:
        scores = soft_cap * (scores / soft_cap).tanh()
    at = torch.arange(first, first + len(q), device=q.device)[:, None]
    key = torch.arange(len(k), device=q.device)[None]
    seen = (key <= at) & (key > at - (window or 1 << 30))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def stored(cache: KVCache, table: list[int], length: int) -> Tensor:
    """float64 keys and values [length, 2 * kv_heads, dim] as they lie in the cache."""
    ids = torch.tensor(table, device="cuda")
    values = cache.values[ids].double()
    if cache.scales is not None:
        values *= cache.scales[ids].transpose(1, 2).double()[..., None]
    return values.flatten(0, 1)[:length]


def check(
    shape: AttentionShape,
    works: list[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float16,
    mode: str = "float",
    window: int | None = None,
    normed: bool = False,
) -> None:
    """works: (context, tokens) of each sequence, those of one token first. Unused slots hold NaN."""
    torch.manual_seed(SEED)
    kv_heads, dim = shape.num_kv_heads, shape.head_dim
    num_blocks = sum(-(-(c + n) // BLOCK) for c, n in works) + 5
    scales = torch.rand(2 * kv_heads, device="cuda") * 0.02 + 0.02
    cache = make_kv_cache(
        num_blocks, BLOCK, 2 * kv_heads, dim, dtype=dtype, mode=mode, device=torch.device("cuda"), static_scales=scales
    )  # fmt: skip
    if mode == "float":
        cache.values.fill_(torch.nan)
    elif mode == "int8":
        cache.scales.fill_(torch.nan)
    norms = None
    if normed:
        norms = (torch.rand(dim, device="cuda").to(dtype) + 0.5, torch.rand(dim, device="cuda").to(dtype) + 0.5)
    rotation = tables(shape, max(c + n for c, n in works), dtype)
    order = torch.randperm(num_blocks).tolist()
    table_of = [[order.pop() for _ in range(-(-(c + n) // BLOCK))] for c, n in works]
    for (context, _), table in zip(works, table_of):
        if context:
            slots = torch.tensor([table[i // BLOCK] * BLOCK + i % BLOCK for i in range(context)], device="cuda")
            cache.write(torch.randn(context, 2 * kv_heads, dim, device="cuda").to(dtype), slots)
    width = (shape.num_heads + 2 * kv_heads) * dim
    qkv = torch.randn(sum(n for _, n in works), width, device="cuda").to(dtype)
    given = qkv.clone()
    plan = plan_step(
        [c for c, _ in works], [n for _, n in works], table_of, block_size=BLOCK, shape=shape, device=qkv.device
    )
    out = attend(qkv, shape, norms, rotation, cache, plan, window)
    row = 0
    for (context, tokens), table in zip(works, table_of):
        q, kv = exact(given[row : row + tokens], shape, norms, rotation, context)
        kept = stored(cache, table, context + tokens)
        coarse = {"float": TOLERANCE[dtype], "int8": 1.5e-2, "int8-static": 3e-2}[mode]
        if mode == "int8-static":  # clips what is beyond its grid
            kv = kv.clamp(-127 * scales[:, None].double(), 127 * scales[:, None].double())
        assert float((kept[context:] - kv).norm() / kv.norm()) < coarse, (shape, works, SEED)
        want = attention(q, kept, context, window, shape.soft_cap)
        got = out[row : row + tokens].double().view_as(want)
        error = float((got - want).norm() / want.norm())
        assert error < TOLERANCE[dtype], (error, shape, works, dtype, mode, window, SEED)
        row += tokens
    assert not plan.counters.any()


@pytest.mark.one_warp
@pytest.mark.before_hopper
@pytest.mark.usefixtures("gpu_or_emulator")
@pytest.mark.parametrize(
    ("shape", "mode", "dtype", "window"),
    [
        (AttentionShape(4, 2, 64, 1e-5), "float", torch.float16, None),
        (AttentionShape(7, 1, 128, 1e-5), "int8", torch.bfloat16, 20),
        (AttentionShape(2, 2, 64, 1e-5, 0.5), "int8-static", torch.float16, None),
    ],
)
def test_small_steps(shape: AttentionShape, mode: str, dtype: torch.dtype, window: int | None) -> None:
    """Also where there is no GPU; Triton's kernel for prompts is wrong with bfloat16 in its interpreter."""
    prompts = [(4, 3)] if dtype == torch.float16 else []
    check(shape, [(0, 1), (15, 1), (150, 1), *prompts], mode=mode, dtype=dtype, window=window, normed=window is None)


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("dim", [64, 128, 192, 256])
    @pytest.mark.parametrize("group", [1, 4, 7, 8, 16])
    @pytest.mark.parametrize("mode", ["float", "int8", "int8-static"])
    def test_decodes(self, dim: int, group: int, mode: str) -> None:
        shape = AttentionShape(2 * group, 2, dim, 1e-5)
        check(shape, [(0, 1), (5, 1), (15, 1), (16, 1), (200, 1), (1500, 1)], mode=mode)
        check(shape, [(3, 1), (700, 1)], mode=mode, dtype=torch.bfloat16, normed=True)

    @pytest.mark.parametrize("mode", ["float", "int8"])
    @pytest.mark.parametrize("window", [1, 16, 100, 1000])
    def test_windows(self, window: int, mode: str) -> None:
        shape = AttentionShape(8, 2, 128, 1e-5)
        check(shape, [(0, 1), (99, 1), (100, 1), (333, 1), (2000, 1)], window=window, mode=mode)

    @pytest.mark.parametrize("mode", ["float", "int8", "int8-static"])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_decodes_and_prompts_together(self, mode: str, dtype: torch.dtype) -> None:
        for shape in (AttentionShape(8, 2, 128, 1e-5), AttentionShape(4, 4, 64, 1e-5)):
            works = [(7, 1), (600, 1), (0, 5), (100, 250), (37, 2), (0, 130)]
            check(shape, works, mode=mode, dtype=dtype, normed=True)
            check(shape, works, mode=mode, dtype=dtype, window=90)

    @pytest.mark.parametrize("mode", ["float", "int8"])
    @pytest.mark.parametrize("soft_cap", [0.5, 50.0])
    def test_soft_caps(self, soft_cap: float, mode: str) -> None:
        works = [(600, 1), (2000, 1), (0, 5), (100, 250), (37, 2), (0, 130)]
        for shape in (AttentionShape(8, 2, 128, 1e-5, soft_cap), AttentionShape(3, 1, 192, 1e-5, soft_cap)):
            check(shape, works, mode=mode)
            check(shape, works, mode=mode, dtype=torch.bfloat16, window=90)

    def test_many_sequences_of_many_heads(self) -> None:
        check(AttentionShape(32, 8, 128, 1e-5), [(i * 7, 1) for i in range(70)])
        check(AttentionShape(32, 32, 128, 1e-5), [(4000, 1)])


def test_contexts_are_cut_as_it_pays() -> None:
    slots = 4 * 132
    assert split_contexts(64, 32, 4096, slots).shares == 1  # nearly four full rounds
    assert split_contexts(64, 8, 4096, slots).shares == 1  # 512 blocks fill 528 slots
    assert split_contexts(1, 32, 4096, slots).shares == 16  # 17 would take a second round
    assert (
        split_contexts(102, 8, 548, slots).shares == 1
    )  # two rounds of whole contexts beat four of halves with their sums
    assert split_contexts(80, 8, 4096, slots).shares == 4  # five rounds of quarters beat two of whole ones
    assert split_contexts(1, 8, 100, slots).shares == 2  # no piece shorter than a tile for each warp
    assert split_contexts(1, 1, 1 << 20, slots).shares == 32


def test_pieces_depend_on_their_own_context_alone_where_blocks_are_few() -> None:
    """So a captured decode, which does not know the longest context, sums up as one that does."""

    def pieces(context: int, split: Split) -> int:
        tiles = -(-context // 16)
        return -(-tiles // max(-(-tiles // split.shares), split.least_tiles))

    for context in range(1, 512):
        alone, among = (split_contexts(5, 4, longest, 4 * 132) for longest in (context, 512))
        assert pieces(context, alone) == pieces(context, among) == -(-context // 64)


def test_short_contexts_are_cut_small_only_where_blocks_are_few() -> None:
    slots = 4 * 132
    assert split_contexts(1, 32, 4096, slots).least_tiles == WARPS
    assert split_contexts(80, 8, 4096, slots).least_tiles == 64  # 1,024 tokens: what four shares have of the longest
