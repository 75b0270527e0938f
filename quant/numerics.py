"""Scales, zero points and codes: how a float weight becomes a QuantizedWeight, with the rounding of every stored part.

A grid is chosen per row and group of columns. Its scales are rounded to the 16-bit dtype in which they are stored
before any code is chosen, so that what is measured here is what a reader gets back. Zero is always representable.

Symmetric grids are those of GPTQ and compressed-tensors: step max/7.5 at 4 bits, codes 0 .. 15, zero fixed at 8. A
signed grid maps the weight of largest magnitude to code 0, the lowest (step max/8, negative where that weight is
positive), and so uses the sixteenth code as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qtool.quant.errors import QtoolError
from qtool.quant.scheme import QuantScheme
from qtool.quant.weight import QuantizedWeight

GridSearch = Literal["minmax", "signed", "mse"]
GRID_SEARCHES: tuple[GridSearch, ...] = ("minmax", "signed", "mse")

SHRINK = tuple(1 - i / 32 for i in range(18))  # clip factors tried by the mse search: 1 down to 0.47
_ZERO_SHIFTS = (0, -1, 1, -2, 2)  # zero points tried beside the range's own, where a step is coarse enough to matter
_CHUNK = {"cpu": 1 << 19, "cuda": 1 << 25}  # elements searched at once: bounds memory, and stays in a CPU's cache
_CHECK = 1 << 24  # elements looked at together for NaN and infinity


@dataclass(frozen=True)
class Grid:
    """Step and offset per row and group.

    Attributes:
        scale: [N, G] in the stored 16-bit dtype; negative in signed grids, never zero, NaN or infinite.
        zero: [N, G] uint8 code that stands for 0.0, or None for the scheme's midpoint everywhere.
    """

    scale: Tensor
    zero: Tensor | None


def concat_grids(parts: list[Grid]) -> Grid:
    """Stack grids along their rows; they must be all symmetric or all asymmetric."""
    zeros = [p.zero for p in parts if p.zero is not None]
    return Grid(torch.cat([p.scale for p in parts]), torch.cat(zeros) if zeros else None)


def check_finite(tensor: Tensor, what: str) -> None:
    """Raise QtoolError where a tensor holds NaN or infinity; `what` names it."""
    pieces = torch.split(tensor.reshape(-1), _CHECK)  # the test makes copies
    if not all(bool(torch.isfinite(piece).all()) for piece in pieces):
        bad = sum(int((~torch.isfinite(piece)).sum()) for piece in pieces)
        raise QtoolError(f"{what} holds {bad} NaN or infinite values: the model cannot be quantized as it is")


def nearest_codes(weight: Tensor, scale: Tensor, zero: Tensor | float, max_code: int) -> Tensor:
    """Codes (as floats, 0 .. max_code) nearest to `weight`; all arguments broadcast."""
    return torch.round(weight / scale).add_(zero).clamp_(0, max_code)


def storable_scale(scale: Tensor, scheme: QuantScheme, dtype: torch.dtype) -> Tensor:
    """Round float32 steps to `dtype`: bounded so that no dequantized weight overflows it, never zero."""
    levels = 1 << (scheme.bits - 1 if scheme.symmetric else scheme.bits)
    info = torch.finfo(dtype)
    limit = info.max / levels
    stored = scale.clamp(-limit, limit).to(dtype)
    smallest = max(info.eps * info.smallest_normal, torch.finfo(torch.float32).tiny)
    tiny = torch.copysign(torch.full_like(scale, smallest), scale).to(dtype)
    return torch.where(stored.float().abs() < smallest, tiny, stored)


def _grouped(weight: Tensor, scheme: QuantScheme) -> Tensor:
    """[N, K] → [N, G, g] in float32."""
    rows, cols = weight.shape
    return weight.to(torch.float32).reshape(rows, scheme.num_groups(cols), -1)


def _minmax(groups: Tensor, scheme: QuantScheme, shrink: float = 1.0) -> tuple[Tensor, Tensor | None]:
    """The step that just spans the group (times `shrink`), and the asymmetric zero: both [N, G] float32."""
    if scheme.symmetric:
        return groups.abs().amax(-1) * (shrink / (scheme.max_code / 2)), None
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    step = high / scheme.max_code - low / scheme.max_code  # divided first: the span itself may overflow
    ratio = torch.where(step > 0, -low / step.clamp_min(torch.finfo(torch.float32).tiny), torch.zeros_like(step))
    return step * shrink, ratio.round().clamp(0, scheme.max_code)


def _signed(groups: Tensor, scheme: QuantScheme) -> Tensor:
    """The step that maps the largest magnitude to code 0: −w/8 at 4 bits. [N, G] float32."""
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    return -extreme / scheme.midpoint


class _Best:
    """The best grid so far per row and group, under a squared error weighted by `metric` (see find_grid)."""

    def __init__(self, groups: Tensor, metric: Tensor | None, scheme: QuantScheme, dtype: torch.dtype) -> None:
        # errors are taken relative to the group's largest magnitude, so that their squares neither over- nor underflow
        self.norm = groups.abs().amax(-1, keepdim=True)
        self.norm = torch.where(self.norm > 0, self.norm, torch.ones_like(self.norm))
        self.groups, self.metric, self.scheme, self.dtype = groups, metric, scheme, dtype
        self.scale = torch.ones(groups.shape[:2], dtype=dtype, device=groups.device)
        self.zero: Tensor | None = None if scheme.symmetric else torch.zeros_like(self.scale, dtype=torch.float32)
        self.error = torch.full(groups.shape[:2], torch.inf, device=groups.device)

    def codes(self, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Signed codes (code − zero) under a grid: [N, G, g]."""
        offset: Tensor | float = float(self.scheme.midpoint) if zero is None else zero.unsqueeze(-1)
        return nearest_codes(self.groups, scale.float().unsqueeze(-1), offset, self.scheme.max_code).sub_(offset)

    def offer(self, step: Tensor, zero: Tensor | None) -> None:
        """Try a grid; it is taken where it is better."""
        scale = storable_scale(step, self.scheme, self.dtype)
        delta = (self.codes(scale, zero).mul_(scale.float().unsqueeze(-1)).sub_(self.groups)).div_(self.norm)
        if self.metric is None:
            error = delta.square_().sum(-1)
        elif self.metric.ndim == 2:
            error = delta.square_().mul_(self.metric).sum(-1)
        else:
            # [G, N, g] @ [G, g, g]: the error of the group's own part of the layer's output
            flat = delta.transpose(0, 1)
            error = (torch.bmm(flat, self.metric) * flat).sum(-1).T
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.scale = torch.where(better, scale, self.scale)
        if self.zero is not None and zero is not None:
            self.zero = torch.where(better, zero, self.zero)

    def refine(self) -> None:
        """Offer the least-squares step for the codes of the best grid (weighted by the metric's diagonal)."""
        codes = self.codes(self.scale, self.zero)
        weight = codes
        if self.metric is not None:
            weight = codes * (self.metric if self.metric.ndim == 2 else self.metric.diagonal(dim1=-2, dim2=-1))
        step = (weight * (self.groups / self.norm)).sum(-1) / (weight * codes).sum(-1)
        step = torch.where(torch.isfinite(step), step * self.norm.squeeze(-1), self.scale.float())
        self.offer(step, self.zero)


def _search(groups: Tensor, scheme: QuantScheme, search: GridSearch, metric: Tensor | None, dtype: torch.dtype) -> Grid:
    if search == "minmax":
        step, zero = _minmax(groups, scheme)
        return Grid(storable_scale(step, scheme, dtype), None if zero is None else zero.to(torch.uint8))
    if search == "signed":
        if scheme.symmetric:
            return Grid(storable_scale(_signed(groups, scheme), scheme, dtype), None)
        return _search(groups, scheme, "minmax", metric, dtype)
    best = _Best(groups, metric, scheme, dtype)
    best.offer(*_minmax(groups, scheme))  # first, so that ties keep the plain grid
    signed = _signed(groups, scheme)
    for shrink in SHRINK:
        if scheme.symmetric:
            best.offer(signed * shrink, None)
            best.offer(signed * -shrink, None)
        else:
            step, zero = _minmax(groups, scheme, shrink)
            assert zero is not None
            for shift in _ZERO_SHIFTS if scheme.bits == 4 else (0,):
                best.offer(step, (zero + shift).clamp(0, scheme.max_code))
    for _ in range(2):
        best.refine()
    return Grid(best.scale, None if best.zero is None else best.zero.to(torch.uint8))


def _row_chunks(weight: Tensor) -> Iterator[slice]:
    rows, cols = weight.shape
    step = max(1, _CHUNK.get(weight.device.type, 1 << 22) // max(1, cols))
    return (slice(start, min(rows, start + step)) for start in range(0, rows, step))


def find_grid(
    weight: Tensor,
    scheme: QuantScheme,
    search: GridSearch = "minmax",
    *,
    metric: Tensor | None = None,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> Grid:
    """Choose step and zero for every row and group of `weight`.

    Args:
        weight: [N, K] floating point, finite.
        scheme: bits, group size, symmetric or not.
        search: `minmax` spans the group (GPTQ's and compressed-tensors' grid); `signed` maps the largest magnitude to
            the lowest code (asymmetric schemes: the same as minmax); `mse` takes the best of minmax, both signs and a
            range of clip factors, then the least-squares step for the codes found (after HQQ and llama.cpp).
        metric: what the mse search minimises. None: Σ Δ²; [G, g]: Σ metric·Δ², a weight per input (the diagonal of a
            Hessian); [G, g, g]: ΔᵀHΔ with the group's own block of the Hessian, the error of its part of the output.
        scale_dtype: float16 or bfloat16, the dtype in which scales are stored.

    Raises:
        QtoolError: the group size does not divide K.
    """
    groups = _grouped(weight, scheme)
    if metric is not None:
        metric = metric.to(groups)
    return concat_grids([_search(groups[rows], scheme, search, metric, scale_dtype) for rows in _row_chunks(weight)])


def quantize(weight: Tensor, grid: Grid, scheme: QuantScheme) -> QuantizedWeight:
    """Round every weight [N, K] to the nearest code of `grid`."""
    groups = _grouped(weight, scheme)
    offset: Tensor | float = float(scheme.midpoint) if grid.zero is None else grid.zero.float().unsqueeze(-1)
    codes = nearest_codes(groups, grid.scale.float().unsqueeze(-1), offset, scheme.max_code)
    return QuantizedWeight(codes.reshape(weight.shape).to(torch.uint8), grid.scale, grid.zero, scheme)


def clipped_share(weight: Tensor, quantized: QuantizedWeight) -> float:
    """Share of the values of `weight` [N, K] that lie beyond the grid's first or last code by more than half a step."""
    clipped = 0
    for rows in _row_chunks(weight):
        groups = _grouped(weight[rows], quantized.scheme)
        zero = quantized.scheme.midpoint if quantized.zero is None else quantized.zero[rows].float().unsqueeze(-1)
        code = groups.div(quantized.scale[rows].float().unsqueeze(-1)).add_(zero)
        clipped += int(((code < -0.5) | (code > quantized.scheme.max_code + 0.5)).sum())
    return clipped / max(1, weight.numel())


def weight_error(weight: Tensor, quantized: Tensor) -> float:
    """‖W − Q‖ / ‖W‖ (Frobenius) in float64; 0 for a zero weight. What there is to say without calibration data."""
    norm = float(torch.linalg.vector_norm(weight, dtype=torch.float64))
    delta = float(torch.linalg.vector_norm(weight.float() - quantized.float(), dtype=torch.float64))
    return delta / norm if norm > 0 else 0.0
