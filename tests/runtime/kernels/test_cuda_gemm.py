"""gemm.cu with int8 activations against float64 products of the dequantized weight: schemes, tokens, types, cuts; the
choice among them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qtool.quant.scheme import PER_CHANNEL, QuantScheme
from qtool.quant.weight import QuantizedWeight
from qtool.runtime.kernels.cuda import gemm
from qtool.runtime.kernels.cuda.choice import choose, decode, encode
from qtool.runtime.kernels.cuda.gemm import EVEN, GemmConfig
from qtool.runtime.kernels.cuda.layout import pack_weight
from qtool.runtime.kernels.cuda.linear import apply, apply_choice, pack
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
        y = apply(x, pack(weight, spec, device), spec)
        chosen = choose(spec, tokens, device)
        assert isinstance(chosen, GemmConfig)
        progressive = chosen.progressive
    else:
        y = apply_choice(x, packed, spec, config)
        progressive = config.progressive
    exact = rounded(x)
    dense = in_8_bits(weight).T if progressive else weight.dequantize(torch.float64).T
    size = (exact.pow(2) @ dense.pow(2)).sqrt()  # of a sum with random signs: cancellation does not count as error
    error = ((y.double() - exact @ dense).abs() - doubtful(x) @ dense.abs()).clamp_min(0)
    # The result is rounded to 11 or 8 bits. A ratio half-way between two float16 takes 6 % of its group's weights to
    # the next of 127 steps: in one row of the least weight (two groups of 64, 37 rows) that makes 5e-4.
    tolerance = (6e-4 if dtype == torch.float16 else 5e-3) + (1e-3 if progressive else 0.0)
    what = (scheme.name, rows, cols, tokens, dtype, config, SEED)
    assert float(error.norm() / size.norm()) < tolerance, what
    assert float((error / size.clamp_min(1e-300)).max()) < 12 * tolerance, what


A_FEW_CUTS = [
    GemmConfig(64, 3, 3),
    GemmConfig(96, 2, EVEN),
    GemmConfig(64, 2),
    GemmConfig(256, 2),
    GemmConfig(256, 2, progressive=True),
]
CUTS = [
    GemmConfig(*cut, progressive)
    for cut in (
        (16, 2, 1), (32, 3, 2), (32, 4, 1), (64, 3, 5), (64, 4, 1), (64, 2, EVEN), (96, 3, EVEN), (128, 2, 4),
        (160, 2, EVEN), (160, 2, 2), (192, 3, 1), (224, 2, 2), (256, 2, 1), (256, 2, EVEN),
        (48, 3, 2), (112, 2, 1), (144, 2, EVEN), (176, 3, 1), (208, 2, 1), (240, 2, 2),
    )
    for progressive in (False, True)
]  # fmt: skip


def test_half_of_the_largest_activation_may_round_either_way() -> None:
    """One such element of 128 moves the product by a step: 0.2 % of it, more than all other roundings together."""
    x = torch.tensor([[1.0, 0.5, -0.5, 0.25, 1 / 127, 0.0], [127.0, 63.5, 0.5, 3.0, 100.25, -7.5]])
    step = torch.tensor([[1 / 127], [1.0]], dtype=torch.float64)
    halves = [[0, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0, 1]]
    assert torch.allclose(doubtful(x), step * torch.tensor(halves))


@pytest.mark.usefixtures("gpu_or_emulator")
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("name", ["w4g128a8", "w4g32a8-asym"])
def test_small_products(name: str, progressive: bool) -> None:
    """Also where there is no GPU."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("warpgroup tensor cores are Hopper's")
    weight = make_weight(200, 384, QuantScheme.parse(name))
    check(weight, 70, torch.float16, GemmConfig(48, 3, EVEN, progressive=progressive))
    check(weight, 20, torch.bfloat16, GemmConfig(32, 2, 3, progressive=progressive))


@pytest.mark.gpu
class TestOnHopper:
    @pytest.fixture(autouse=True)
    def _hopper(self) -> None:
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("warpgroup tensor cores are Hopper's")

    @staticmethod
    def check_around(weight: QuantizedWeight, config: GemmConfig, dtype: torch.dtype) -> None:
        """Numbers of tokens about a tile's."""
        size = config.tokens
        for tokens in (1, size - 1, size, 2 * size + 3):
            if weight.shape[0] * tokens > 30:  # fewer sums do not average their errors
                check(weight, tokens, dtype, config)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
    @pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
    def test_every_scheme(self, scheme: QuantScheme, dtype: torch.dtype) -> None:
        for rows, cols in [(208, 1152), (2056, 512), (37, 128), (9, 640)]:
            weight = make_weight(rows, cols, scheme)
            for config in A_FEW_CUTS:
                if gemm.fits(LinearSpec(rows, cols, scheme, dtype=dtype), config):
                    self.check_around(weight, config, dtype)

    @pytest.mark.parametrize("config", CUTS, ids=str)
    @pytest.mark.parametrize("name", ["w4g128a8", "w8a8", "w4g64a8-asym"])
    def test_every_cut(self, name: str, config: GemmConfig) -> None:
        scheme = QuantScheme.parse(name)
        if not gemm.fits(LinearSpec(64, 512, scheme), config):
            pytest.skip("no such way, or more sums than registers")
        for rows, cols in [(2064, 1024), (130, 11008)]:
            self.check_around(make_weight(rows, cols, scheme), config, torch.float16)

    @pytest.mark.parametrize("name", ["w4g64a8", "w8a8", "w4g32a8-asym"])
    def test_an_odd_number_of_chunks(self, name: str) -> None:
        """Steps are two chunks of 64 columns: the last one is half empty."""
        for cols in (64, 192, 576):
            weight = make_weight(200, cols, QuantScheme.parse(name))
            for config in (GemmConfig(64, 3), GemmConfig(32, 2, split=2)):
                check(weight, 70, torch.float16, config)

    @pytest.mark.parametrize("name", ["w4g128a8", "w8a8", "w4g64a8-asym"])
    def test_more_tiles_than_multiprocessors(self, name: str) -> None:
        check(make_weight(4096, 4096, QuantScheme.parse(name)), 1600, torch.float16, GemmConfig(128, 2))
        check(make_weight(22016, 1024, QuantScheme.parse(name)), 300, torch.bfloat16, GemmConfig(64, 3))

    @pytest.mark.parametrize("cut", [GemmConfig(96, 3, EVEN), GemmConfig(160, 2, EVEN), GemmConfig(256, 2, EVEN, True)])
    @pytest.mark.parametrize("name", ["w4g64a8-asym", "w8a8", "w4g128a8"])
    def test_tiles_are_shared_evenly(self, name: str, cut: GemmConfig) -> None:
        """The last of many, and one or few among all multiprocessors; alike at every launch."""
        scheme = QuantScheme.parse(name)
        if not gemm.fits(LinearSpec(64, 512, scheme), cut):
            pytest.skip("no such way")
        for rows, cols, tokens in ((4000, 1152, 1600), (384, 4096, 150), (40, 11008, 300)):
            weight = make_weight(rows, cols, scheme)
            spec = LinearSpec(rows, cols, scheme, dtype=torch.float16)
            packed = pack_weight(weight, 8, weight.codes.device)
            check(weight, tokens, torch.float16, cut)
            x = torch.randn(tokens, cols, device="cuda").half()
            first = apply_choice(x, packed, spec, cut)
            for _ in range(100):  # more launches than take turns: each must leave its flags as it found them
                again = apply_choice(x, packed, spec, cut)
            assert torch.equal(first, again)

    def test_scale_types(self) -> None:
        for name in ("w4g128a8", "w8a8"):
            for scale_dtype in (torch.float16, torch.bfloat16, torch.float32):
                weight = make_weight(64, 512, QuantScheme.parse(name), scale_dtype)
                check(weight, 70, torch.bfloat16, GemmConfig(64, 2))
                check(weight, 70, torch.float16, GemmConfig(128, 2))

    @pytest.mark.parametrize("name", ["w4g128a8", "w4g128a8-asym", "w8a8"])
    def test_the_dispatch_takes_it_for_many_tokens(self, name: str) -> None:
        spec = LinearSpec(512, 512, QuantScheme.parse(name), dtype=torch.float16)
        weight = make_weight(512, 512, spec.scheme)
        for tokens in (100, 136, 257, 512, 1000, 2048, 2100):
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
    y = apply_choice(x, pack_weight(weight, 8, x.device), spec, GemmConfig(128, 2, progressive=True))
    error = float((y.double() - rounded(x) @ weight.dequantize(torch.float64).T).norm())
    step = 8 * scale.double().amax(dim=1) / 127
    assert error < 1.1 * float(rounded(x).norm() * step.norm() / 12**0.5)


def test_few_tokens_are_multiplied_exactly() -> None:
    spec = LinearSpec(4096, 4096, QuantScheme.parse("w4g128a8"))
    assert not any(config.progressive for config in gemm.configs(spec, 128))
    assert any(config.progressive for config in gemm.configs(spec, 129))
    assert gemm.candidates(spec, 2048, 132)[0].progressive
    for name in ("w8a8", "w4a8", "w4g128", "w8g64a8"):
        assert not any(
            config.progressive for config in gemm.configs(LinearSpec(4096, 4096, QuantScheme.parse(name)), 512)
        )


def test_every_cut_fits_a_multiprocessor() -> None:
    for scheme in SCHEMES:
        spec = LinearSpec(4096, 4096, scheme)
        for tokens in (16, 64, 2048):
            assert gemm.configs(spec, tokens)
            for config in gemm.configs(spec, tokens):
                assert config.ring(spec).stages >= 3
                assert config.shared_bytes(spec) <= 226 * 1024


def test_a_choice_survives_the_table() -> None:
    for config in (GemmConfig(128, 2), GemmConfig(64, 3, EVEN, progressive=True)):
        assert decode(encode(config)) == config
