"""Grids and codes against closed forms, compressed-tensors' own arithmetic and hostile input."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.quant.errors import QtoolError
from qtool.quant.numerics import GRID_SEARCHES, check_finite, find_grid, quantize
from qtool.quant.scheme import QuantScheme

SCHEMES = [QuantScheme.parse(n) for n in ("w4g32", "w4g32-asym", "w4", "w8", "w8-asym", "w8g32")]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_minmax_is_the_grid_of_compressed_tensors(scheme: QuantScheme, dtype: torch.dtype) -> None:
    args_module = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.utils import calculate_qparams

    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    groups = weight.reshape(16, scheme.num_groups(64), -1)
    args = args_module.QuantizationArgs(num_bits=scheme.bits, symmetric=scheme.symmetric, strategy="channel")
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    ours = find_grid(weight, scheme, scale_dtype=dtype)
    torch.testing.assert_close(ours.scale, scale.to(dtype))
    if scheme.symmetric:
        assert ours.zero is None
    else:
        assert ours.zero is not None
        assert torch.equal(ours.zero.int(), zero.int() + scheme.midpoint)


def test_signed_grid_maps_the_largest_magnitude_to_code_zero() -> None:
    scheme = QuantScheme(4, 8)
    weight = torch.tensor([[0.5, -0.25, 2.0, 0.0, 1.0, -1.5, 0.25, -0.5], [-4.0, 0.5, 3.5, 0, 1, -1, 2, -2]])
    grid = find_grid(weight, scheme, "signed", scale_dtype=torch.float16)
    assert grid.scale.flatten().tolist() == [-0.25, 0.5]
    q = quantize(weight, grid, scheme)
    assert q.codes[0, 2] == 0
    assert q.codes[1, 0] == 0
    assert torch.equal(q.dequantize(), weight)  # every value here is a multiple of its step


@pytest.mark.parametrize("scheme", SCHEMES[:3], ids=lambda s: s.name)
def test_mse_comes_close_to_the_best_of_a_dense_scan(scheme: QuantScheme) -> None:
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(2))
    found = quantize(weight, find_grid(weight, scheme, "mse", scale_dtype=torch.float16), scheme).dequantize()
    error = (found - weight).square().sum(1)
    # float64 scan over steps (both signs) and, asymmetric, every zero
    best = torch.full((6,), torch.inf, dtype=torch.float64)
    top = weight.abs().amax(1, keepdim=True).double()
    for zero in [scheme.midpoint] if scheme.symmetric else range(0, 16, 1):
        for step in torch.linspace(0.03, 0.14, 60, dtype=torch.float64):
            for sign in (1, -1) if scheme.symmetric else (1,):
                scale = top * step * sign
                codes = (torch.round(weight / scale) + zero).clamp(0, scheme.max_code)
                best = torch.minimum(best, ((codes - zero) * scale - weight).square().sum(1))
    assert bool((error <= best * 1.15).all())
    assert error.sum() <= best.sum() * 1.05


def test_mse_follows_its_metric() -> None:
    scheme = QuantScheme(4, 32)
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(8, 64, generator=generator), torch.randn(256, 64, generator=generator)
    x[:, ::7] *= 20
    hessian = (x.T @ x).reshape(2, 32, 2, 32)
    blocks = torch.stack([hessian[0, :, 0], hessian[1, :, 1]])

    def loss(q: torch.Tensor) -> float:
        delta = (q - weight).reshape(8, 2, 32)
        return float(torch.einsum("ngi,gij,ngj->", delta, blocks, delta))

    def found(metric: torch.Tensor | None) -> float:
        return loss(quantize(weight, find_grid(weight, scheme, "mse", metric=metric), scheme).dequantize())

    diagonal = blocks.diagonal(dim1=-2, dim2=-1)
    assert found(blocks) < found(diagonal) < found(None)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["zero", "constant", "normal", "one-hot", "denormal", "huge", "mixed"]),
    exponent=st.integers(-45, 38),
    scheme=st.sampled_from(SCHEMES),
    search=st.sampled_from(GRID_SEARCHES),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_hostile_weights_stay_finite_and_zero_stays_zero(
    kind: str, exponent: int, scheme: QuantScheme, search: str, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scale = min(10.0**exponent, float(torch.finfo(dtype).max) / 8)
    weight = torch.randn(4, 64, generator=generator).clamp(-4, 4) * scale
    if kind == "zero":
        weight = torch.zeros(4, 64)
    elif kind == "constant":
        weight = torch.full((4, 64), scale)
    elif kind == "one-hot":
        weight = torch.zeros(4, 64)
        weight[:, 5] = scale
    elif kind == "denormal":
        weight = torch.full((4, 64), 1e-45)
    elif kind == "huge":
        weight = torch.full((4, 64), float(torch.finfo(dtype).max)) * torch.randn(4, 64, generator=generator).sign()
    weight[:, 9] = 0.0
    q = quantize(weight, find_grid(weight, scheme, search, scale_dtype=dtype), scheme)  # type: ignore[arg-type]
    q.check("layer")
    values = q.dequantize()
    assert bool(torch.isfinite(values).all())
    assert bool(torch.isfinite(q.dequantize(dtype)).all())
    assert bool((values[:, 9] == 0).all())
    assert bool((values - weight).abs().amax() <= weight.abs().amax())


def test_groups_must_divide_and_nan_is_named() -> None:
    with pytest.raises(QtoolError, match="does not divide"):
        find_grid(torch.zeros(2, 48), QuantScheme(4, 32))
    with pytest.raises(QtoolError, match=r"tensor x\.weight holds 1 NaN"):
        check_finite(torch.tensor([1.0, torch.nan]), "tensor x.weight")
