"""The CUDA kernels against float64 products of the dequantized weight: schemes, shapes, tokens, types, cuts."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from kernel_products import SEED, TOLERANCE, activations, check, device, hopper, make_weight, run

from qtool.quant.errors import QtoolError
from qtool.quant.scheme import PER_CHANNEL, QuantScheme
from qtool.runtime.kernels.cuda import kernels
from qtool.runtime.kernels.cuda.choice import choose
from qtool.runtime.kernels.cuda.dequantize import dequantize_rows
from qtool.runtime.kernels.cuda.driver import num_sms
from qtool.runtime.kernels.cuda.gemm import EVEN, GemmConfig, blocks_and_rounds
from qtool.runtime.kernels.cuda.layout import PackedWeight, pack_weight
from qtool.runtime.kernels.cuda.linear import apply_choice
from qtool.runtime.kernels.cuda.rows import quantize_rows
from qtool.runtime.kernels.cuda.skinny import SkinnyConfig
from qtool.runtime.kernels.cuda.stream import StreamConfig
from qtool.runtime.kernels.interface import LinearSpec

on_hopper = pytest.mark.usefixtures("needs_hopper")

SCHEMES = [
    QuantScheme(bits, group, symmetric, act_bits)
    for bits in (4, 8)
    for group in (32, 64, 128, PER_CHANNEL)
    for symmetric in (True, False)
    for act_bits in (None, 8)
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_skinny_for_every_scheme(scheme: QuantScheme, dtype: torch.dtype) -> None:
    config = SkinnyConfig(2, 4, 2 if hopper() else 1, prefetch=1)
    weight = make_weight(208, 1152, scheme)
    for tokens in (1, 7, 8):
        run(weight, tokens, dtype, config)
    run(weight, 13, dtype, SkinnyConfig(1, 8, prefetch=2, prefetch_x=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_dequantized_for_every_scheme(scheme: QuantScheme, dtype: torch.dtype) -> None:
    for rows, cols in [(208, 1152), (37, 128), (1, 640)]:
        weight = make_weight(rows, cols, scheme)
        spec = LinearSpec(rows, cols, scheme, dtype=dtype)
        packed = pack_weight(weight, scheme.act_bits or 16, device())
        got = dequantize_rows(packed, spec, 0, packed.tiles)
        assert torch.equal(got.cpu(), weight.dequantize(dtype))
        run(weight, 65, dtype, None)


SKINNY_CUTS = [
    SkinnyConfig(tiles, warps, split, prefetch, prefetch_x)
    for tiles, warps, split, prefetch, prefetch_x in [
        (1, 4, 1, 1, False),
        (1, 16, 1, 4, True),
        (2, 8, 1, 2, False),
        (2, 8, 2, 4, True),
        (4, 4, 4, 1, False),
        (4, 16, 1, 2, False),
    ]
]


@pytest.mark.gpu
@pytest.mark.parametrize("cut", SKINNY_CUTS, ids=str)
@pytest.mark.parametrize("name", ["w4g128", "w4g128a8", "w8a8", "w8-asym"])
def test_skinny_for_every_cut(name: str, cut: SkinnyConfig) -> None:
    if cut.split > 1 and not hopper():
        pytest.skip("clusters are Hopper's")
    for rows, cols in [(2064, 1024), (48, 11008)]:
        weight = make_weight(rows, cols, QuantScheme.parse(name))
        for tokens in (1, 5, 16, 31, 64):
            if cut.shared_bytes(tokens) < 200_000:
                run(weight, tokens, torch.float16, cut)


A_CUT_OF_EACH_KIND: list[tuple[StreamConfig | GemmConfig, tuple[int, ...]]] = [
    (StreamConfig(2, 4, 1), (1, 7, 8, 9, 16)),
    (StreamConfig(5, 2, 3), (1, 7, 8, 9, 16)),  # so many tiles that sums are of codes as they are set in
    (GemmConfig(64, 2, split=3), (2, 33, 64, 150)),
    (GemmConfig(32, 3), (2, 33, 64, 150)),
]


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if not s.act_bits], ids=lambda s: s.name)
def test_16_bit_activations_for_every_scheme(scheme: QuantScheme, dtype: torch.dtype) -> None:
    for rows, cols in [(208, 1152), (520, 640), (37, 128)]:
        weight = make_weight(rows, cols, scheme)
        for cut, counts in A_CUT_OF_EACH_KIND:
            for tokens in counts:
                run(weight, tokens, dtype, cut)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16], ids=["fp16 scales", "bf16 scales"])
@pytest.mark.parametrize("apart", [6, 12], ids=lambda k: f"groups {1 << k} times")
@pytest.mark.parametrize("name", ["w4g32", "w4g128", "w4g64-asym", "w8g32"])
def test_gemm_where_rows_and_groups_differ_in_size(
    name: str, apart: int, scale_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """Each row by itself is as exact as where all are alike, also where its largest groups meet no activations."""
    rows, cols, tokens = 192, 1024, 48
    weight = make_weight(rows, cols, QuantScheme.parse(name), torch.float32)
    groups = weight.scale.shape[1]
    most = 1e3 if torch.float16 in (dtype, scale_dtype) else 1e6
    sizes = torch.logspace(-3, 0, rows)[torch.randperm(rows)] * most
    large = torch.arange(groups) % 8 == 3
    scale = weight.scale * sizes.unsqueeze(1) * torch.where(large, 1.0, 2.0**-apart)
    weight = replace(weight, scale=scale.to(scale_dtype))
    packed = pack_weight(weight, 16, device())
    assert (len(packed.powers) > 0) == (apart == 6 and weight.zero is None)
    spec = LinearSpec(rows, cols, weight.scheme, dtype=dtype)
    x = activations(tokens, cols, dtype) / most * 2.0**apart
    x[:, large.repeat_interleave(cols // groups).to(x.device)] = 0
    dense = weight.dequantize(torch.float64).to(x.device).T
    size = (x.double().pow(2) @ dense.pow(2)).sqrt()
    for cut in (GemmConfig(48, 3), GemmConfig(32, 2, split=2)):
        y = apply_choice(x, packed, spec, cut)
        error = (y.double() - x.double() @ dense).norm(dim=0) / size.norm(dim=0)
        assert float(error.max()) < 2 * TOLERANCE[dtype], (name, cut, SEED)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("name", ["w4g64", "w8", "w4g32-asym"])
def test_16_bit_activations_for_an_odd_number_of_chunks(name: str) -> None:
    """Steps are two chunks of 64 columns: the last one is half empty."""
    for cols in (64, 192, 576):
        weight = make_weight(200, cols, QuantScheme.parse(name))
        for tokens in (1, 10):
            run(weight, tokens, torch.float16, StreamConfig(3, 4, 1))
        for cut in (GemmConfig(64, 3), GemmConfig(32, 2, split=2)):
            run(weight, 70, torch.float16, cut)


STREAM_CUTS = [StreamConfig(*cut) for cut in [(1, 8, 3), (2, 16, 2), (3, 8, 1), (4, 4, 3), (6, 4, 2)]]


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("cut", STREAM_CUTS, ids=str)
@pytest.mark.parametrize("name", ["w4g128", "w4g128-asym", "w4g32", "w8"])
def test_stream_for_every_cut(name: str, cut: StreamConfig) -> None:
    for rows, cols in [(2064, 1024), (48, 11008)]:
        weight = make_weight(rows, cols, QuantScheme.parse(name))
        spec = LinearSpec(rows, cols, weight.scheme, dtype=torch.float16)
        for tokens in (1, 3, 8, 11, 16):
            if cut.resident(spec, tokens):
                run(weight, tokens, torch.float16, cut)


@pytest.mark.gpu
@on_hopper
def test_stream_of_activations_that_do_not_cancel_out() -> None:
    """Sums of products by a code and a power of two grow with them; what tensor cores cut off always has one sign."""
    drawn = make_weight(512, 11008, QuantScheme(4, 128))
    codes = drawn.codes.clamp_min(1)
    codes[:, 1::2] = 16 - codes[:, ::2]  # so that results are as small as of other activations
    weight = replace(drawn, codes=codes, scale=drawn.scale.abs())
    for dtype in (torch.float16, torch.bfloat16):
        spec = LinearSpec(512, 11008, weight.scheme, dtype=dtype)
        packed = pack_weight(weight, 16, device())
        for tokens, cut in ((1, StreamConfig(4, 8)), (8, StreamConfig(4, 4, 3)), (16, StreamConfig(5, 4))):
            x = activations(tokens, 11008, dtype).abs()
            check(apply_choice(x, packed, spec, cut), x, weight, (dtype, tokens, cut))


GEMM_CUTS = [
    GemmConfig(*cut)
    for cut in (
        (16, 2, 1), (32, 3, 2), (64, 3, 5), (64, 4, 1), (96, 3, 1), (128, 2, 4), (128, 3, 1), (160, 3, 1),
        (160, 2, 2), (224, 2, 1), (192, 3, 2), (192, 2, 1), (64, 2, EVEN), (128, 3, EVEN), (256, 2, EVEN),
        (256, 2, 1), (256, 2, 2), (48, 3, 4), (112, 3, 1), (144, 3, 1), (176, 2, 2), (208, 2, EVEN), (240, 2, 1),
        (128, 4, 1), (96, 4, EVEN), (112, 4, 2),
    )
]  # fmt: skip


@pytest.mark.gpu
@on_hopper
def test_gemm_takes_more_tiles_than_multiprocessors() -> None:
    for name, cut in (("w4g128", GemmConfig(128, 3)), ("w4g64-asym", GemmConfig(64, 2))):
        weight = make_weight(4096, 1024, QuantScheme.parse(name))
        run(weight, 1600, torch.float16, cut)
        run(weight, 1600, torch.bfloat16, cut)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("cut", [GemmConfig(128, 3, EVEN), GemmConfig(192, 2, EVEN), GemmConfig(256, 2, EVEN)])
@pytest.mark.parametrize("name", ["w4g64", "w4g32-asym", "w4", "w8", "w8g32-asym"])
def test_gemm_shares_the_last_tiles_evenly(name: str, cut: GemmConfig) -> None:
    weight = make_weight(4000, 1088, QuantScheme.parse(name))
    spec = LinearSpec(4000, 1088, weight.scheme, dtype=torch.float16)
    packed = pack_weight(weight, 16, device())
    x = activations(1600, 1088, torch.float16)
    tiles = -(-4000 // cut.rows) * -(-1600 // cut.tokens)
    blocks, rounds = blocks_and_rounds(tiles, 9, cut, num_sms(0))
    assert rounds * blocks < tiles  # else nothing is shared
    first = apply_choice(x, packed, spec, cut)
    check(first, x, weight, (name, cut))
    for _ in range(300):  # more launches than take turns: each must leave its flags as it found them
        again = apply_choice(x, packed, spec, cut)
    assert torch.equal(first, again)


EVERY_CUT: list[tuple[str, GemmConfig]] = [
    *((name, cut) for name in ("w4g128", "w4g32-asym", "w8") for cut in GEMM_CUTS),
    *((name, GemmConfig(256, 2, split)) for name in ("w8g128", "w8g32-asym") for split in (1, 2)),
]


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("name", "cut"), EVERY_CUT, ids=str)
def test_wgmma_for_every_cut(name: str, cut: GemmConfig) -> None:
    for rows, cols in [(2064, 1024), (48, 11008), (130, 128)]:
        weight = make_weight(rows, cols, QuantScheme.parse(name))
        for tokens in (2, 32, 47, 64, 129, 300):
            run(weight, tokens, torch.float16, cut)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols"), [(1, 64), (17, 64), (576, 576), (192, 576), (1000, 96), (33, 4160)])
@pytest.mark.parametrize("name", ["w4g32", "w4g32-asym", "w4g32a8", "w8a8", "w8", "w4a8-asym"])
def test_odd_shapes_through_the_interface(name: str, rows: int, cols: int) -> None:
    (kernel,) = kernels()
    weight = make_weight(rows, cols, QuantScheme.parse(name))
    for dtype in (torch.float16, torch.bfloat16):
        spec = LinearSpec(rows, cols, weight.scheme, dtype=dtype)
        assert kernel.supports(spec, device()) is None
        packed = kernel.pack(weight, spec, device())
        for tokens in (0, 1, 3, 16, 40, 100, 513):
            x = activations(tokens, cols, dtype)
            y = kernel.apply(x, packed, spec)
            assert y.shape == (tokens, rows)
            if tokens:
                choice = choose(spec, tokens, x.device)
                progressive = isinstance(choice, GemmConfig) and choice.progressive
                check(y, x, weight, (name, rows, cols, tokens, dtype), progressive=progressive)


@pytest.mark.gpu
def test_per_channel_columns_that_no_vector_divides() -> None:
    weight = make_weight(50, 77, QuantScheme(8))
    run(weight, 3, torch.float16, SkinnyConfig(1, 4, prefetch=1))
    run(weight, 90, torch.float16, None)


@pytest.mark.gpu
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("group", [64, PER_CHANNEL])
def test_scale_types(group: int, scale_dtype: torch.dtype) -> None:
    weight = make_weight(64, 512, QuantScheme(4, group), scale_dtype)
    for dtype in (torch.float16, torch.bfloat16):
        run(weight, 4, dtype, SkinnyConfig(1, 4))
        if hopper():
            run(weight, 4, dtype, StreamConfig(4, 2))
            run(weight, 40, dtype, GemmConfig(64, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["w4g64", "w4g128-asym", "w4g64a8"])
def test_act_order(name: str) -> None:
    weight = make_weight(64, 1024, QuantScheme.parse(name), act_order=True)
    for tokens in (1, 16, 100):
        run(weight, tokens, torch.float16, SkinnyConfig(2, 4) if tokens <= 64 else None)
    if hopper():
        run(weight, 100, torch.float16, GemmConfig(64, 2))
    if hopper() and not weight.scheme.act_bits:
        run(weight, 6, torch.float16, StreamConfig(4, 2))


@pytest.mark.gpu
def test_groups_wider_than_the_kernels_own() -> None:
    run(make_weight(64, 1024, QuantScheme(4, 256)), 4, torch.float16, SkinnyConfig(1, 4))


@pytest.mark.gpu
def test_int8_activations_have_one_scale_a_token() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        size = torch.tensor([[1e-3], [1], [7], [300], [0]], device=device())
        x = (torch.randn(5, 704, device=device()) * size).to(dtype)
        rows = quantize_rows(x)
        codes, scales = rows.codes, rows.scales
        assert torch.allclose(scales, x.float().abs().amax(dim=1) / 127, rtol=1e-6)
        half_step = scales[:, None] * (0.5 + 1e-4)
        assert bool(((codes.float() * scales[:, None] - x.float()).abs() <= half_step).all())
        assert int(codes[4].abs().max()) == 0


@pytest.mark.gpu
def test_products_are_captured_and_replayed() -> None:
    (kernel,) = kernels()
    for name in ("w4g128", "w8a8"):
        weight = make_weight(256, 512, QuantScheme.parse(name))
        spec = LinearSpec(256, 512, weight.scheme, dtype=torch.float16)
        packed = kernel.pack(weight, spec, device())
        for tokens in (1, 24, 64, 100):  # the last through cuBLAS
            x = torch.zeros(tokens, 512, dtype=torch.float16, device=device())
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                kernel.apply(x, packed, spec)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = kernel.apply(x, packed, spec)
            for _ in range(2):
                x.copy_(activations(tokens, 512, x.dtype))
                y.fill_(torch.nan)
                graph.replay()
                check(y, x, weight, (name, tokens))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("name", ["w4g128", "w8", "w4g128a8", "w8a8"])
def test_replays_leave_the_same_bits(name: str) -> None:
    """Beside cuBLAS, launch behind launch: a sum does not depend on which block or copy comes first."""
    (kernel,) = kernels()
    rows, cols = 6144, 4096
    weight = make_weight(rows, cols, QuantScheme.parse(name))
    spec = LinearSpec(rows, cols, weight.scheme, dtype=torch.float16)
    packed = kernel.pack(weight, spec, device())
    dense = torch.randn(cols, rows, dtype=torch.float16, device=device())
    for tokens in (1, 8, 20, 64, 100, 136, 192, 256):
        x = activations(tokens, cols, torch.float16)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            want = kernel.apply(x, packed, spec)
            x @ dense
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = []
            for _ in range(10):
                found.append(kernel.apply(x, packed, spec))
                x @ dense
                found.append(kernel.apply(x, packed, spec))
        for _ in range(30):
            for y in found:
                y.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(y, want) for y in found), (name, tokens, SEED)


@pytest.mark.gpu
def test_a_chain_of_overlapping_launches_reads_finished_inputs() -> None:
    """Kernels start before the one ahead has finished (programmatic dependent launch): values must not show it."""
    weight = make_weight(512, 512, QuantScheme(4, 128))
    spec = LinearSpec(512, 512, weight.scheme, dtype=torch.float16)
    packed = pack_weight(weight, 16, device())
    dense = weight.dequantize(torch.float64).to(device())
    x = torch.randn(4, 512, device=device()).half()
    y, want = x, x.double()
    for _ in range(20):
        y = apply_choice(y, packed, spec, SkinnyConfig(1, 4))
        y = (y.float() / y.float().norm()).half()
        want = want @ dense.T
        want = want / want.norm()
    assert float((y.double() - want).norm()) < 0.02
    a = apply_choice(x, packed, spec, SkinnyConfig(1, 4))
    b = apply_choice(a, packed, spec, SkinnyConfig(1, 4))
    c = apply_choice(b, packed, spec, SkinnyConfig(1, 4))
    check(b, a, weight, "second")
    check(c, b, weight, "third")


@pytest.mark.gpu
def test_a_fresh_thread_may_launch() -> None:
    weight = make_weight(64, 128, QuantScheme(4, 128))
    errors: list[BaseException] = []

    def work() -> None:
        try:
            run(weight, 2, torch.float16, SkinnyConfig(1, 4, prefetch=1))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []


@pytest.mark.gpu
def test_wrong_inputs_are_refused() -> None:
    (kernel,) = kernels()
    weight = make_weight(32, 128, QuantScheme(4, 128))
    spec = LinearSpec(32, 128, weight.scheme, dtype=torch.float16)
    packed = kernel.pack(weight, spec, device())
    for x in (
        torch.zeros(2, 64, dtype=torch.float16, device=device()),
        torch.zeros(2, 128, dtype=torch.bfloat16, device=device()),
        torch.zeros(2, 128, dtype=torch.float16),
    ):
        with pytest.raises(QtoolError, match="expected"):
            kernel.apply(x, packed, spec)
    with pytest.raises(QtoolError, match="given to a kernel made for"):
        kernel.pack(weight, LinearSpec(64, 128, weight.scheme), device())
    assert PackedWeight(*packed).tiles == 2
