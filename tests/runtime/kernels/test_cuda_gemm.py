"""gemm.cu against float64 products of the dequantized weight: schemes, tokens, types, tiles; its choice of tile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qtool.quant.scheme import PER_CHANNEL, QuantScheme
from qtool.quant.weight import QuantizedWeight
from qtool.runtime.kernels.cuda import gemm
from qtool.runtime.kernels.cuda.choice import choose, decode, encode
from qtool.runtime.kernels.cuda.gemm import GemmConfig
from qtool.runtime.kernels.cuda.layout import pack_weight
from qtool.runtime.kernels.cuda.linear import apply, apply_choice
from qtool.runtime.kernels.interface import LinearSpec

SEED = torch.seed() % (1 << 31)  # fresh inputs every run; printed with every failure
SCHEMES = [
    QuantScheme(bits, group, symmetric, act_bits=8)
    for bits in (4, 8)
    for group in (32, 64, 128, PER_CHANNEL)
    for symmetric in (True, False)
    if symmetric or bits == 4
]


def make_weight(rows: int, cols: int, scheme: QuantScheme, scale_dtype: torch.dtype = torch.float16) -> QuantizedWeight:
    generator = torch.Generator("cuda").manual_seed(SEED)
    groups, levels = scheme.num_groups(cols), 1 << scheme.bits
    sign = torch.randint(0, 2, (rows, groups), generator=generator, device="cuda") * 2 - 1
    scale = sign * (torch.rand(rows, groups, generator=generator, device="cuda") + 0.5) / levels
    zero = None
    if not scheme.symmetric:
        zero = torch.randint(0, levels, (rows, groups), generator=generator, dtype=torch.uint8, device="cuda")
    codes = torch.randint(0, levels, (rows, cols), generator=generator, dtype=torch.uint8, device="cuda")
    return QuantizedWeight(codes, scale.to(scale_dtype), zero, scheme)


def rounded(x: Tensor) -> Tensor:
    """float64 of x rounded per token to int8."""
    scale = x.double().abs().amax(dim=1, keepdim=True) / 127
    return (x.double() / scale).round() * scale


def doubtful(x: Tensor) -> Tensor:
    """float64 [M, K]: a step of int8 where an activation lies half-way between two, so that float32 may round it either
    way (half of the row's largest is 63.5 steps), else 0."""
    scale = x.double().abs().amax(dim=1, keepdim=True) / 127
    steps = x.double() / scale
    from_half = (steps - steps.floor() - 0.5).abs()
    return scale * (from_half < 127 * 2.0**-22)  # the step count is off by 2 ** -23 of itself at most


def in_8_bits(weight: QuantizedWeight) -> Tensor:
    """float64 [N, K] as progressive products see it: multiples of 1/127 of the largest weight that a row could have."""
    columns = weight.shape[1] // weight.scale.shape[1]
    zero = torch.full_like(weight.scale, 8) if weight.zero is None else weight.zero
    reach = torch.maximum(zero.float(), 15 - zero.float())
    unit = (weight.scale.float().abs() * reach).amax(dim=1, keepdim=True) / 127
    ratio = (weight.scale.float() / unit).half().double().repeat_interleave(columns, dim=1)
    code = weight.codes.double() - zero.double().repeat_interleave(columns, dim=1)
    return (code * ratio).round() * unit.double()


def check(weight: QuantizedWeight, tokens: int, dtype: torch.dtype, config: GemmConfig | None) -> None:
    """`config` None: whatever the dispatch chooses."""
    rows, cols = weight.shape
    scheme, device = weight.scheme, weight.codes.device
    spec = LinearSpec(rows, cols, scheme, dtype=dtype)
    packed = pack_weight(weight, 8, device)
    x = torch.randn(tokens, cols, device=device).to(dtype)
    poison = torch.full((tokens, rows), torch.nan, dtype=dtype, device=device)
    del poison  # its memory is most likely the output's
    if config is None:
        y = apply(x, (packed.codes, packed.scales, packed.zeros, packed.columns), spec)
    else:
        assert gemm.supports(packed, spec)
        y = apply_choice(x, packed, spec, config)
    exact = rounded(x)
    progressive = (config or choose(spec, tokens, device)) not in gemm.configs(spec, exact=True)
    dense = in_8_bits(weight).T if progressive else weight.dequantize(torch.float64).T
    size = (exact.pow(2) @ dense.pow(2)).sqrt()  # of a sum with random signs: cancellation does not count as error
    error = ((y.double() - exact @ dense).abs() - doubtful(x) @ dense.abs()).clamp_min(0)
    # The result is rounded to 11 or 8 bits. A ratio half-way between two float16 takes 6 % of its group's weights to
    # the next of 127 steps: in one row of the least weight (two groups of 64, 37 rows) that makes 5e-4.
    tolerance = (6e-4 if dtype == torch.float16 else 5e-3) + (1e-3 if progressive else 0.0)
    what = (scheme.name, rows, cols, tokens, dtype, config, SEED)
    assert float(error.norm() / size.norm()) < tolerance, what
    assert float((error / size.clamp_min(1e-300)).max()) < 12 * tolerance, what


def every_config(spec: LinearSpec) -> list[GemmConfig]:
    return list(dict.fromkeys([*gemm.configs(spec, exact=True), *gemm.configs(spec, exact=False)]))


def test_half_of_the_largest_activation_may_round_either_way() -> None:
    """One such element of 128 moves the product by a step: 0.2 % of it, more than all other roundings together."""
    x = torch.tensor([[1.0, 0.5, -0.5, 0.25, 1 / 127, 0.0], [127.0, 63.5, 0.5, 3.0, 100.25, -7.5]])
    step = torch.tensor([[1 / 127], [1.0]], dtype=torch.float64)
    halves = [[0, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0, 1]]
    assert torch.allclose(doubtful(x), step * torch.tensor(halves))


@pytest.mark.gpu
class TestOnHopper:
    @pytest.fixture(autouse=True)
    def _hopper(self) -> None:
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("warpgroup tensor cores are Hopper's")

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
    @pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
    def test_every_scheme(self, scheme: QuantScheme, dtype: torch.dtype) -> None:
        for rows, cols in [(208, 1152), (2056, 512), (37, 128), (9, 640)]:
            weight = make_weight(rows, cols, scheme)
            for config in every_config(LinearSpec(rows, cols, scheme, dtype=dtype)):
                size = config.tokens
                for tokens in (1, size - 1, size, 2 * size + 3):
                    if rows * tokens > 30:  # fewer sums do not average their errors
                        check(weight, tokens, dtype, config)

    @pytest.mark.parametrize("name", ["w4g128a8", "w8a8", "w4g64a8-asym"])
    def test_more_tiles_than_multiprocessors(self, name: str) -> None:
        check(make_weight(4096, 4096, QuantScheme.parse(name)), 1600, torch.float16, GemmConfig(128))
        check(make_weight(22016, 1024, QuantScheme.parse(name)), 300, torch.bfloat16, GemmConfig(64))

    def test_scale_types(self) -> None:
        for name in ("w4g128a8", "w8a8"):
            for scale_dtype in (torch.float16, torch.bfloat16, torch.float32):
                weight = make_weight(64, 512, QuantScheme.parse(name), scale_dtype)
                check(weight, 70, torch.bfloat16, GemmConfig(64))
                check(weight, 70, torch.float16, GemmConfig(128))

    @pytest.mark.parametrize("name", ["w4g128a8", "w4g128a8-asym", "w8a8"])
    def test_the_dispatch_takes_it_for_many_tokens(self, name: str) -> None:
        spec = LinearSpec(512, 512, QuantScheme.parse(name), dtype=torch.float16)
        weight = make_weight(512, 512, spec.scheme)
        for tokens in (257, 512, 1000, 2048):
            assert isinstance(choose(spec, tokens, weight.codes.device), GemmConfig)
            check(weight, tokens, torch.float16, None)


@pytest.mark.gpu
def test_progressive_products_err_by_half_a_step_of_8_bits_a_weight() -> None:
    """A uniform error of a step u is u / sqrt(12) large on average; scales differ fourfold within a row."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("warpgroup tensor cores are Hopper's")
    torch.manual_seed(SEED)
    scheme = QuantScheme(4, 128, act_bits=8)
    w = torch.randn(1024, 32, 128, device="cuda") * 4 ** torch.rand(1024, 32, 1, device="cuda")
    scale = (w.abs().amax(dim=2) / 7.5).half()
    codes = ((w / scale[..., None]).round() + 8).clamp(0, 15).to(torch.uint8).flatten(1)
    weight = QuantizedWeight(codes, scale, None, scheme)
    x = torch.randn(512, 4096, device="cuda").half()
    spec = LinearSpec(1024, 4096, scheme, dtype=torch.float16)
    y = apply_choice(x, pack_weight(weight, 8, x.device), spec, GemmConfig(128, progressive=True))
    error = float((y.double() - rounded(x) @ weight.dequantize(torch.float64).T).norm())
    step = 8 * scale.double().amax(dim=1) / 127
    assert error < 1.1 * float(rounded(x).norm() * step.norm() / 12**0.5)


def test_the_tile_fills_the_device() -> None:
    w8a8, w4a8, grouped = (LinearSpec(4096, 4096, QuantScheme.parse(n)) for n in ("w8a8", "w4g128a8", "w8g64a8"))
    assert gemm.pick(w8a8, 1024, 132) == GemmConfig(256)  # 128 tiles, one round; smaller ones take two or more
    assert gemm.pick(w8a8, 512, 132) == GemmConfig(128)  # again one round of 128
    assert gemm.pick(w4a8, 1024, 132) == GemmConfig(256, progressive=True)
    assert gemm.pick(w4a8, 256, 132) == GemmConfig(64)  # one round, and nothing rounded anew
    assert gemm.pick(grouped, 2048, 132) == GemmConfig(128)  # the most that its sums leave room for


def test_every_tile_fits_a_multiprocessor() -> None:
    for scheme in SCHEMES:
        spec = LinearSpec(4096, 4096, scheme)
        for config in every_config(spec):
            assert gemm.stages(spec, config) >= 4
            assert gemm.shared_bytes(spec, config) <= 226 * 1024


def test_a_choice_survives_the_table() -> None:
    for config in (GemmConfig(128), GemmConfig(64, progressive=True)):
        assert decode(encode(config)) == config
