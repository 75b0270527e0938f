"""Rows of a weight are independent under every layer-wise objective: measure, compare, stack and split them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qtool.quant.weight import QuantizedWeight

_CHUNK = {"cpu": 1 << 22, "cuda": 1 << 26}  # elements measured at once: what is made of them is float32 and several


def _row_counts(weight: Tensor) -> list[int]:
    """How many rows of [N, K] to take at a time."""
    rows, cols = weight.shape
    step = max(1, _CHUNK.get(weight.device.type, 1 << 22) // max(1, cols))
    return [min(step, rows - start) for start in range(0, rows, step)]


def row_errors(delta: Tensor, hessian: Tensor) -> Tensor:
    """[N] squared output error ΔHΔᵀ of every row of `delta` [N, K], in float64."""
    return torch.cat([_errors(part, hessian) for part in torch.split(delta, _row_counts(delta))])


def rounding_errors(weight: Tensor, rounded: QuantizedWeight, hessian: Tensor) -> Tensor:
    """[N] squared output error of every row of `weight` [N, K] as it was rounded, in float64."""
    counts = _row_counts(weight)
    parts = zip(torch.split(weight, counts), split_rows(rounded, counts), strict=True)
    return torch.cat([_errors(part - values.dequantize(), hessian) for part, values in parts])


def _errors(delta: Tensor, hessian: Tensor) -> Tensor:
    # by a power of two, which rounds nothing, so that squares of huge or tiny weights stay within float32
    exponent = torch.frexp(delta.abs().amax()).exponent.clamp(-126, 126)
    unit = torch.ldexp(delta.new_ones(()), -exponent)
    scaled = delta * unit
    return ((scaled @ hessian) * scaled).sum(-1, dtype=torch.float64).clamp_min(0) / unit.double().square()


def pick_rows(pick: Tensor, first: QuantizedWeight, second: QuantizedWeight) -> QuantizedWeight:
    """Rows of `first` where `pick` [N] bool is true, of `second` elsewhere; both of one scheme."""
    rows = pick[:, None]
    zero = None
    if first.zero is not None and second.zero is not None:
        zero = torch.where(rows, first.zero, second.zero)
    return QuantizedWeight(
        codes=torch.where(rows, first.codes, second.codes),
        scale=torch.where(rows, first.scale, second.scale),
        zero=zero,
        scheme=first.scheme,
    )


def split_rows(weight: QuantizedWeight, sizes: Sequence[int]) -> list[QuantizedWeight]:
    """The inverse of stacking: one weight for every size."""
    lengths = list(sizes)
    zeros = [None] * len(lengths) if weight.zero is None else torch.split(weight.zero, lengths)
    parts = zip(torch.split(weight.codes, lengths), torch.split(weight.scale, lengths), zeros, strict=True)
    return [QuantizedWeight(codes, scale, zero, weight.scheme) for codes, scale, zero in parts]
