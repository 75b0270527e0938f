"""Products by gate and up that leave silu(gate) * up: against float64, and bit for bit what silu.cu makes of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qtool.quant.scheme import QuantScheme
from qtool.quant.weight import QuantizedWeight
from qtool.runtime.kernels.cuda import gemm, skinny, stream
from qtool.runtime.kernels.cuda.choice import choose
from qtool.runtime.kernels.cuda.gemm import GemmConfig
from qtool.runtime.kernels.cuda.layer_ops import CUDA_OPS
from qtool.runtime.kernels.cuda.layout import pack_weight
from qtool.runtime.kernels.cuda.linear import apply_choice, apply_gated, gates, ready
from qtool.runtime.kernels.cuda.rows import Form, Int8Rows, silu_mul
from qtool.runtime.kernels.cuda.skinny import SkinnyConfig
from qtool.runtime.kernels.cuda.stream import StreamConfig
from qtool.runtime.kernels.interface import LinearSpec, QuantLinear
from qtool.runtime.kernels.layer_ops import TORCH_OPS
from qtool.runtime.models.layers import make_linear

SEED = torch.seed() % (1 << 31)
CONFIGS = [SkinnyConfig(2, 4), SkinnyConfig(4, 4, prefetch=1), SkinnyConfig(2, 8, 2, prefetch=1, prefetch_x=True)]
STREAM_CONFIGS = [StreamConfig(2, 4, 1), StreamConfig(5, 2, 2)]
GEMM_CUTS = [
    GemmConfig(*cut)
    for cut in (
        (16, 2, 1), (32, 3, 2), (64, 3, 5), (64, 4, 1), (96, 3, 1), (128, 2, 2), (192, 3, 1), (256, 2, 1),
        (128, 4, 1), (48, 3, 4),
    )
]  # fmt: skip
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
SCHEMES = ["w4g128", "w4g32-asym", "w4g128a8", "w8", "w8g64", "w8a8", "w4g64a8-asym"]


def make_weight(rows: int, cols: int, scheme: QuantScheme) -> QuantizedWeight:
    generator = torch.Generator("cuda").manual_seed(SEED)
    levels, groups = 1 << scheme.bits, scheme.num_groups(cols)
    scale = (torch.rand(rows, groups, generator=generator, device="cuda") + 0.5) * (3.5 / levels / cols**0.5)
    codes = torch.randint(0, levels, (rows, cols), generator=generator, dtype=torch.uint8, device="cuda")
    zero = None if scheme.symmetric else torch.full_like(scale, levels // 2 - 1, dtype=torch.uint8)
    return QuantizedWeight(codes, scale.half(), zero, scheme)


def test_only_whole_tiles_of_both_halves_gate() -> None:
    spec = LinearSpec(416, 128, QuantScheme(4, 32))
    assert skinny.gates(spec, 8, SkinnyConfig(2, 4))
    assert not skinny.gates(spec, 9, SkinnyConfig(2, 4))
    assert not skinny.gates(spec, 8, SkinnyConfig(1, 4))
    assert not skinny.gates(LinearSpec(400, 128, QuantScheme(4, 32)), 8, SkinnyConfig(2, 4))  # 12.5 tiles each
    assert not skinny.gates(LinearSpec(416, 128, QuantScheme(4, 32, act_bits=8)), 8, SkinnyConfig(2, 4))
    assert stream.gates(spec, 8, StreamConfig(5, 4))
    assert StreamConfig(5, 4).paired == StreamConfig(4, 4)
    assert stream.gates(spec, 16, StreamConfig(5, 4))
    assert not stream.gates(spec, 17, StreamConfig(5, 4))
    assert not stream.gates(spec, 8, StreamConfig(1, 4))
    assert not stream.gates(LinearSpec(400, 128, QuantScheme(4, 32)), 8, StreamConfig(5, 4))
    assert gemm.gates(spec)
    assert not gemm.gates(LinearSpec(400, 128, QuantScheme(4, 32)))


def activations(tokens: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Multiples of 1/64 up to 127/64, which every row holds: int8 takes them as they are."""
    x = torch.randint(-127, 128, (tokens, cols), device="cuda") / 64
    x[:, 0] = 127 / 64
    return x.to(dtype)


def as_arguments(rows: Tensor | Int8Rows) -> tuple[Tensor, Tensor | None]:
    return (rows.codes, rows.scales) if isinstance(rows, Int8Rows) else (rows, None)


def largest_error(x: Tensor, weight: QuantizedWeight, float32: float = 2e-5) -> tuple[Tensor, Tensor]:
    """float64 silu(gate) * up, and what rounding gate, up and the result to x's type may add (the slope of silu is 1.1
    at most), with `float32` of a sum's size for that."""
    unit = 2.0 ** (-11 if x.dtype == torch.float16 else -8)
    dense = weight.dequantize(torch.float64).T
    gate, up = (x.double() @ dense).chunk(2, dim=1)
    sizes = (x.double().pow(2) @ dense.pow(2)).sqrt().chunk(2, dim=1)
    off = [unit * part.abs() + float32 * size for part, size in zip((gate, up), sizes)]
    silu = functional.silu(gate)
    bound = 1.1 * off[0] * (up.abs() + off[1]) + silu.abs() * off[1] + unit * (silu * up).abs()
    return silu * up, bound * (1 + 4 * unit) + 1e-7


def check(name: str, shape: tuple[int, int], counts: tuple[int, ...], dtype: torch.dtype) -> None:
    """skinny.cu and stream.cu, whose products are gated bit for bit."""
    scheme = QuantScheme.parse(name)
    rows, cols = shape
    weight = make_weight(rows, cols, scheme)
    spec = LinearSpec(rows, cols, scheme, dtype=dtype)
    packed = pack_weight(weight, scheme.act_bits or 16, torch.device("cuda"))
    for tokens in counts:
        x = activations(tokens, cols, dtype)
        exact, bound = largest_error(x, weight)
        given = as_arguments(ready(x, packed, spec, CONFIGS[0]))
        for config in CONFIGS:
            if config.split > 1 and torch.cuda.get_device_capability()[0] < 9:
                continue
            out = torch.full((tokens, rows // 2), torch.nan, dtype=dtype, device="cuda")
            skinny.multiply(*given, packed, spec, config, out, gated=True)
            what = (name, rows, tokens, config, SEED)
            assert torch.equal(out, silu_mul(apply_choice(x, packed, spec, config), Form.PLAIN)), what
            assert bool(((out.double() - exact).abs() <= bound).all()), what
        if scheme.act_bits or tokens > 16 or torch.cuda.get_device_capability() != (9, 0):
            continue
        _, bound = largest_error(x, weight, 2e-4)  # sixty times the activations' sum is taken from sums of codes
        for cut in STREAM_CONFIGS:
            out = torch.full((tokens, rows // 2), torch.nan, dtype=dtype, device="cuda")
            stream.multiply(x, packed, spec, cut, out, gated=True)
            whole = torch.empty(tokens, rows, dtype=dtype, device="cuda")
            stream.multiply(x, packed, spec, cut.paired, whole)
            assert torch.equal(out, silu_mul(whole, Form.PLAIN)), (name, rows, tokens, cut, SEED)
            assert bool(((out.double() - exact).abs() <= bound).all()), (name, rows, tokens, cut, SEED)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", SCHEMES)
def test_the_product_leaves_what_silu_makes_of_it(name: str, dtype: torch.dtype) -> None:
    for shape in ((416, 1152), (32, 256)):  # 13 tiles each, and one
        check(name, shape, (1, 5, 8, 13, 30), dtype)


def check_gemm(name: str, shape: tuple[int, int], tokens: int, cut: GemmConfig, dtype: torch.dtype) -> None:
    """Against float64; and where the parts of a tile do not depend on its place, bit for bit."""
    scheme = QuantScheme.parse(name)
    weight = make_weight(*shape, scheme)
    spec = LinearSpec(*shape, scheme, dtype=dtype)
    packed = pack_weight(weight, scheme.act_bits or 16, torch.device("cuda"))
    x = activations(tokens, shape[1], dtype)
    given = as_arguments(ready(x, packed, spec, cut))
    out = torch.full((tokens, shape[0] // 2), torch.nan, dtype=dtype, device="cuda")
    gemm.multiply(*given, packed, spec, cut, out, gated=True)
    what = (name, shape, tokens, cut, SEED)
    whole = apply_choice(x, packed, spec, cut)
    if cut.split != gemm.EVEN:
        assert torch.equal(out, silu_mul(whole, Form.PLAIN)), what
    few_roundings = 4 * (2.0**-11 if dtype == torch.float16 else 2.0**-8)
    assert float((out.double() - silu_mul(whole, Form.PLAIN).double()).norm() / out.double().norm()) < few_roundings, (
        what
    )
    gate, up = (x.double() @ weight.dequantize(torch.float64).T).chunk(2, dim=1)
    want = functional.silu(gate) * up
    assert float((out.double() - want).norm() / want.norm()) < few_roundings, what


@pytest.mark.before_hopper
@pytest.mark.usefixtures("gpu_or_emulator")
@pytest.mark.parametrize("name", ["w4g128", "w8g64", "w4g64a8-asym"])
def test_small_products_leave_what_silu_makes_of_them(name: str) -> None:
    """Also where there is no GPU."""
    check(name, (32, 256), (9,), torch.bfloat16)
    if torch.cuda.get_device_capability() == (9, 0):
        check_gemm(name, (96, 256), 20, GemmConfig(32, 2, 2), torch.bfloat16)
        check_gemm(name, (2 * 80, 256), 20, GemmConfig(16, 2, gemm.EVEN), torch.float16)
        if not QuantScheme.parse(name).act_bits:
            check_gemm(name, (2 * 80, 128), 70, GemmConfig(80, 4), torch.float16)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="gemm.cu is for compute capability 9.0")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", [*SCHEMES, "w4-asym"])
def test_wide_products_leave_what_silu_makes_of_them(name: str, dtype: torch.dtype) -> None:
    for cut in GEMM_CUTS:
        if not gemm.fits(LinearSpec(32, 256, QuantScheme.parse(name)), cut):
            continue
        for shape in ((416, 1152), (32, 256), (2 * 1104, 384)):
            for tokens in (1, 47, 300):
                check_gemm(name, shape, tokens, cut, dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="gemm.cu is for compute capability 9.0")
@pytest.mark.parametrize("cut", [GemmConfig(256, 2, gemm.EVEN), GemmConfig(128, 3, gemm.EVEN)])
def test_wide_products_that_share_tiles_leave_what_silu_makes_of_them(cut: GemmConfig) -> None:
    for name in ("w4g128", "w8", "w8a8"):
        check_gemm(name, (2 * 4000, 640), 1600, cut, torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["w4g128", "w4g128a8", "w8a8", "w4g128-order"])
def test_a_block_agrees_with_torch(name: str) -> None:
    """gated_mlp with and without a gating product, and of columns in act-order."""
    scheme, device = QuantScheme.parse(name.removesuffix("-order")), torch.device("cuda")
    hidden, inner = 256, 352
    gate_up, down = make_weight(2 * inner, hidden, scheme), make_weight(hidden, inner, QuantScheme(8))
    if name.endswith("order"):
        order = (torch.randperm(hidden, device=device) * 2 // hidden).int()
        gate_up = QuantizedWeight(gate_up.codes, gate_up.scale, None, scheme, order)
    ours = [make_linear([w], [None], torch.float16, device) for w in (gate_up, down)]
    exact = [w.dequantize(torch.float64) for w in (gate_up, down)]
    assert isinstance(ours[0], QuantLinear)
    packing, spec = ours[0].packed, ours[0].spec
    norm = torch.rand(hidden, device=device).half() + 0.5
    found = {}
    for tokens in (1, 4, 16, 300):
        x, delta = torch.randn(2, tokens, hidden, device=device).half()
        linears = [lambda y, w=w: functional.linear(y, w) for w in exact]
        want, residual = TORCH_OPS.gated_mlp(x.double(), delta.double(), norm.double(), 1e-5, *linears)
        got, kept = CUDA_OPS.gated_mlp(x.clone(), delta, norm, 1e-5, *ours)
        assert float((kept.double() - residual).norm() / residual.norm()) < 1e-3
        assert float((got.double() - want).norm() / want.norm()) < (0.03 if scheme.act_bits else 3e-3), (name, tokens)
        found[tokens] = gates(tokens, packing, spec)
        if found[tokens]:
            y = torch.randn(tokens, hidden, device=device).half()
            packed = pack_weight(gate_up, scheme.act_bits or 16, device)
            choice = choose(spec, tokens, device)
            both = apply_choice(y, packed, spec, choice.paired if isinstance(choice, StreamConfig) else choice)
            assert torch.equal(apply_gated(y, packing, spec), silu_mul(both, Form.PLAIN))
    assert found[1] == (scheme.act_bits is None)
    assert found[300] == HOPPER
