"""CPU and reference kernels against the dequantized weight multiplied in float64."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from qtool.quant.errors import QtoolError
from qtool.quant.scheme import QuantScheme
from qtool.quant.weight import QuantizedWeight
from qtool.runtime.kernels import dispatch
from qtool.runtime.kernels.interface import LinearSpec, QuantLinear
from qtool.runtime.kernels.reference import REFERENCE, pack_nibbles, unpack_nibbles
from qtool.runtime.models.layers import SplitLinear, make_linear

CPU = torch.device("cpu")
SCHEMES = ["w4g32", "w4g64", "w4g128-asym", "w4", "w4-asym", "w8g32", "w8g64-asym", "w8g128", "w8", "w8-asym", "w4g16"]


def random_weight(
    scheme: QuantScheme, rows: int, cols: int, *, act_order: bool = False, seed: int = 0
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    groups = scheme.num_groups(cols)
    codes = torch.randint(0, scheme.max_code + 1, (rows, cols), dtype=torch.uint8, generator=generator)
    scale = torch.randn(rows, groups, generator=generator) * 0.02  # of either sign
    zero = torch.randint(0, scheme.max_code + 1, (rows, groups), dtype=torch.uint8, generator=generator)
    g_idx = (torch.randperm(cols, generator=generator) // (cols // groups)).int() if act_order else None
    return QuantizedWeight(codes, scale, None if scheme.symmetric else zero, scheme, g_idx)


def relative_error(weight: QuantizedWeight, dtype: torch.dtype, tokens: int) -> float:
    rows, cols = weight.shape
    spec = LinearSpec(rows, cols, weight.scheme, weight.g_idx is not None, dtype)
    kernel, spec = dispatch.choose(spec, CPU)
    x = torch.randn(tokens, cols, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = kernel.apply(x, kernel.pack(weight, spec, CPU), spec)
    assert got.shape == (tokens, rows)
    assert got.dtype == dtype
    want = x.double() @ weight.dequantize(torch.float64).T
    return float((got.double() - want).norm() / want.norm()) if tokens else 0.0


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(("rows", "cols"), [(48, 256), (40, 384), (7, 128)])
def test_products_agree_with_float64(name: str, rows: int, cols: int) -> None:
    weight = random_weight(QuantScheme.parse(name), rows, cols)
    for tokens in (0, 1, 5, 70, 600):
        assert relative_error(weight, torch.float32, tokens) < 1e-5
        assert relative_error(weight, torch.bfloat16, tokens) < 8e-3


@pytest.mark.parametrize("cols", [8, 16, 72, 100, 176])
def test_rows_of_any_length_agree_with_float64(cols: int) -> None:
    """torch's int8 product alone reads beyond the end of rows that are no multiple of 16 inputs, or crashes."""
    weight = random_weight(QuantScheme(8), 33, cols)
    for tokens in (1, 3, 70):
        assert relative_error(weight, torch.bfloat16, tokens) < 8e-3


@pytest.mark.parametrize("name", ["w4g32", "w4g64-asym", "w8g64"])
def test_act_order_agrees_with_float64(name: str) -> None:
    weight = random_weight(QuantScheme.parse(name), 48, 256, act_order=True)
    assert relative_error(weight, torch.float32, 5) < 1e-5
    assert relative_error(weight, torch.bfloat16, 5) < 8e-3


def test_uneven_act_order_groups_are_refused() -> None:
    weight = random_weight(QuantScheme(4, 32), 32, 64, act_order=True)
    assert weight.g_idx is not None
    damaged = replace(weight, g_idx=torch.zeros_like(weight.g_idx))
    with pytest.raises(QtoolError, match="g_idx does not give every group 32 columns"):
        make_linear([damaged], [None], torch.bfloat16, CPU)


def test_four_bit_codes_lie_two_in_a_byte() -> None:
    codes = torch.arange(64, dtype=torch.uint8).view(4, 16) % 16
    packed = pack_nibbles(codes)
    assert packed.numel() * 2 == codes.numel()
    assert torch.equal(unpack_nibbles(packed), codes)
    weight = random_weight(QuantScheme(4, 32), 32, 64)
    spec = LinearSpec(32, 64, weight.scheme, dtype=torch.float32)
    assert REFERENCE.pack(weight, spec, CPU)[0].numel() == 32 * 64 // 2


def test_a_chunk_boundary_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qtool.runtime.kernels.reference.CHUNK_ELEMENTS", 300)
    assert relative_error(random_weight(QuantScheme(4, 32, False), 40, 128), torch.float32, 3) < 1e-5


def test_the_portable_kernel_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    dispatch._say_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="qtool"):
        for _ in range(3):
            dispatch.choose(LinearSpec(32, 64, QuantScheme(4, 16), dtype=torch.bfloat16), CPU)
    assert len([r for r in caplog.records if "portable kernel" in r.message]) == 1


def quantized_inputs(x: torch.Tensor) -> torch.Tensor:
    """Float64 of x as compressed-tensors' symmetric int8 codes hold it, one scale a token."""
    scale = x.float().abs().amax(1, keepdim=True) / 127.5
    codes = (x.float() / scale).round().clamp(-128, 127)
    return codes.nan_to_num().double() * scale.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 5, 300])
def test_int8_products_are_those_of_the_quantized_inputs(tokens: int, dtype: torch.dtype) -> None:
    weight = random_weight(QuantScheme(8, act_bits=8), 40, 1029)
    weight = replace(weight, scale=weight.scale.bfloat16())  # as it is stored: products with codes are exact in float32
    spec = LinearSpec(40, 1029, weight.scheme, dtype=dtype)
    kernel, chosen = dispatch.choose(spec, CPU)
    assert kernel.name == "torch int8 x int8 (CPU)"
    assert chosen == spec
    x = torch.randn(tokens, 1029, generator=torch.Generator().manual_seed(1)).to(dtype)
    if tokens > 3:
        x[1], x[2], x[3, 7] = 0.0, x[2] * 1e-30, 1e30
    want = quantized_inputs(x) @ weight.dequantize(torch.float64).T
    for one in (kernel, REFERENCE):
        got = one.apply(x, one.pack(weight, spec, CPU), spec)
        assert got.dtype == dtype
        # float32 rounds what is exact in int32 and float64 three times; bfloat16 the result once
        torch.testing.assert_close(got.double(), want, rtol=4e-7 if dtype == torch.float32 else 2**-8, atol=0.0)


@pytest.mark.parametrize("name", ["w4g32a8", "w4g64a8-asym", "w8g64a8"])
def test_the_portable_kernel_quantizes_activations_for_every_scheme(name: str) -> None:
    weight = random_weight(QuantScheme.parse(name), 24, 128)
    spec = LinearSpec(24, 128, weight.scheme, dtype=torch.float32)
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(1))
    got = REFERENCE.apply(x, REFERENCE.pack(weight, spec, CPU), spec)
    want = quantized_inputs(x) @ weight.dequantize(torch.float64).T
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_activation_quantization_falls_back_to_the_weight_only_product(caplog: pytest.LogCaptureFixture) -> None:
    dispatch._say_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="qtool"):
        _, spec = dispatch.choose(LinearSpec(32, 64, QuantScheme(4, 32, act_bits=8)), CPU)
    assert spec.scheme == QuantScheme(4, 32)
    assert any("no kernel quantizes activations" in r.message for r in caplog.records)


def test_projections_fuse_where_stored_alike_and_split_otherwise() -> None:
    alike = [random_weight(QuantScheme(4, 64), n, 128, seed=n) for n in (48, 32)]
    mixed = [alike[0], random_weight(QuantScheme(8), 32, 128), torch.randn(16, 128)]
    bias = torch.randn(48)
    x = torch.randn(3, 128)
    fused = make_linear(alike, [bias, None], torch.float32, CPU)
    split = make_linear(mixed, [bias, None, None], torch.float32, CPU)
    assert isinstance(fused, QuantLinear)
    assert isinstance(split, SplitLinear)
    dense = [w if isinstance(w, torch.Tensor) else w.dequantize() for w in mixed]
    want = torch.cat([x @ w.T for w in dense], dim=1)
    want[:, :48] += bias
    torch.testing.assert_close(split(x), want, atol=1e-5, rtol=1e-4)
    want = torch.cat([x @ w.dequantize().T for w in alike], dim=1)
    want[:, :48] += bias
    torch.testing.assert_close(fused(x), want, atol=1e-5, rtol=1e-4)
