"""Products of random quantized weights by the CUDA kernels, held against float64."""

from __future__ import annotations

import torch
from torch import Tensor

from qtool.quant.scheme import QuantScheme
from qtool.quant.weight import QuantizedWeight
from qtool.runtime.kernels.cuda.choice import Choice
from qtool.runtime.kernels.cuda.layout import pack_weight
from qtool.runtime.kernels.cuda.linear import apply_choice
from qtool.runtime.kernels.interface import LinearSpec

SEED = torch.seed() % (1 << 31)  # fresh inputs every run; printed with every failure through the test's arguments
# Relative error of the norm: rounding of the output to 11 or 8 bits, and where weights are scaled in 16 bits, of those.
TOLERANCE = {torch.float16: 6e-4, torch.bfloat16: 5e-3}


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def hopper() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


def make_weight(
    rows: int, cols: int, scheme: QuantScheme, scale_dtype: torch.dtype = torch.float16, act_order: bool = False
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(SEED)
    groups, levels = scheme.num_groups(cols), 1 << scheme.bits
    sign = torch.randint(0, 2, (rows, groups), generator=generator) * 2 - 1
    scale = sign * (torch.rand(rows, groups, generator=generator) + 0.5) / levels
    zero = None
    if not scheme.symmetric:
        zero = torch.randint(0, levels, (rows, groups), generator=generator, dtype=torch.uint8)
    g_idx = None
    if act_order:
        g_idx = (torch.randperm(cols, generator=generator) * groups // cols).int()
    codes = torch.randint(0, levels, (rows, cols), generator=generator, dtype=torch.uint8)
    return QuantizedWeight(codes, scale.to(scale_dtype), zero, scheme, g_idx)


def activations(tokens: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Random rows without values half-way between two int8 steps, which float32 may round either way: half of the
    largest is 63.5 of 127, and where 127 divides the largest one's significand, there are many."""
    x = torch.randn(tokens, cols, device=device()).to(dtype)
    if not tokens:
        return x
    steps = x.double() / (x.double().abs().amax(dim=1, keepdim=True) / 127)
    return x.masked_fill((steps - steps.floor() - 0.5).abs() < 127 * 2.0**-22, 0.0)


def as_int8(x: Tensor) -> Tensor:
    """Float64 of x rounded per token to int8 with scale max |x| / 127."""
    scale = x.double().abs().amax(dim=1, keepdim=True) / 127
    return (x.double() / scale.clamp_min(1e-300)).round() * scale


def check(y: Tensor, x: Tensor, weight: QuantizedWeight, what: object, *, progressive: bool = False) -> None:
    """`progressive`: int4 weights were rounded anew to 8 bits (gemm.py); test_cuda_gemm.py checks that more closely."""
    scheme = weight.scheme
    exact = as_int8(x) if scheme.act_bits else x.double()
    dense = weight.dequantize(torch.float64).to(x.device).T
    want = exact @ dense
    error = y.double() - want
    size = (exact.pow(2) @ dense.pow(2)).sqrt()  # of a sum with random signs: cancellation does not count as error
    size = size.maximum(want.abs())  # a sum larger than most is rounded in proportion
    tolerance = TOLERANCE[x.dtype] + (1e-3 if scheme.act_bits else 0.0) + (8e-3 if progressive else 0.0)
    assert float(error.norm() / size.norm()) < tolerance, (what, SEED)
    assert float((error.abs() / size.clamp_min(1e-300)).max()) < 12 * tolerance, (what, SEED)


def run(weight: QuantizedWeight, tokens: int, dtype: torch.dtype, choice: Choice) -> None:
    rows, cols = weight.shape
    spec = LinearSpec(rows, cols, weight.scheme, act_order=weight.g_idx is not None, dtype=dtype)
    packed = pack_weight(weight, weight.scheme.act_bits or 16, device())
    x = activations(tokens, cols, dtype)
    poison = torch.full((tokens, rows), torch.nan, dtype=dtype, device=device())
    del poison  # its memory is most likely the output's
    check(apply_choice(x, packed, spec, choice), x, weight, (weight.scheme.name, rows, cols, tokens, dtype, choice))
