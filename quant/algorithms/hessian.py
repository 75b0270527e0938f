"""The Hessian of a layer's output error, and the factor of its inverse that GPTQ walks along.

For y = x Wᵀ the squared output error of a change Δ of one row is Δ H Δᵀ with H = (2/n) Σ xᵀx over n calibration tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.quant.errors import QtoolError

# columns of the Hessian updated at once: the lower triangle is mirrored, not computed
_TILE = {"cpu": 512, "cuda": 2048}
_LEAF = 512  # triangles up to this size are inverted by substitution
_PIECE = 1 << 22  # elements that are moved at once
_MAX_DAMPING = 1.0


class Hessian:
    """Running mean H = (2/n) Σ xᵀx [K, K] in float32 (Frantar et al. 2022, arXiv 2210.17323, eq. 2)."""

    def __init__(self, features: int, device: torch.device | str = "cpu") -> None:
        self._upper = torch.zeros(features, features, device=device)
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        """Take in `x` [tokens, K]. On a GPU 16-bit inputs are multiplied as they are: their products are exact in
        float32, in which they are summed.
        """
        x = x.reshape(-1, x.shape[-1])
        total = self.tokens + len(x)
        if total == 0:
            return
        narrow = x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)
        if not narrow:
            x = x.to(self._upper)
        cols, step = x.shape[1], _TILE[x.device.type]
        for start in range(0, cols, step):
            rows, rest = x[:, start : start + step].T, x[:, start:]
            tile = self._upper[start : start + step, start:].mul_(self.tokens / total)
            if narrow:
                tile.add_(torch.mm(rows, rest, out_dtype=torch.float32), alpha=2.0 / total)
            else:
                tile.addmm_(rows, rest, alpha=2.0 / total)
        self.tokens = total

    def matrix(self) -> Tensor:
        """The symmetric [K, K] matrix so far: this object's own memory, so that large ones are there once."""
        cols, step = len(self._upper), _TILE[self._upper.device.type]
        for start in range(0, cols, step):
            stop = min(start + step, cols)
            tile = self._upper[start:stop, start:stop]
            tile.copy_(tile.triu() + tile.triu(1).T)
            self._upper[stop:, start:stop] = self._upper[start:stop, stop:].T
        return self._upper


@dataclass(frozen=True)
class InverseFactor:
    """Upper Cholesky factor U of the damped H⁻¹ (H⁻¹ = UᵀU), with its columns in the order in which GPTQ takes them.

    Attributes:
        upper: [K, K].
        order: [K] int64; position i holds input order[i].
        dead: [K] bool, in the model's own order: inputs that calibration never excited.
        damping: share of mean(diag H) that was added to the diagonal; above the wanted one where H was singular.
    """

    upper: Tensor
    order: Tensor
    dead: Tensor
    damping: float


def invert(hessian: Tensor, *, damping: float = 0.01, act_order: bool = True, layer: str = "layer") -> InverseFactor:
    """Factor the inverse of `hessian` [K, K] for gptq().

    `act_order` takes inputs by descending diagonal. Where the factorisation fails, the damping is raised tenfold up to
    the mean of the diagonal; what was needed is returned and belongs in the report.

    Raises:
        QtoolError: NaN or infinity in the Hessian, or no damping up to 1 makes it positive definite; names `layer`.
    """
    diagonal = hessian.diagonal()
    if not _is_finite(hessian):
        raise QtoolError(f"{layer}: calibration activations hold NaN or infinite values, or overflow float32")
    dead = diagonal <= 0
    order = (
        torch.argsort(torch.where(dead, 0, diagonal), descending=True, stable=True)
        if act_order
        else (torch.arange(len(diagonal), device=hessian.device))
    )
    mean = diagonal[~dead].double().mean().item() if not bool(dead.all()) else 1.0
    # With rows and columns in reverse, H = LLᵀ gives U = L⁻¹ reversed: one factorization, and H⁻¹ is never formed.
    # Scaled by its own mean, the matrix can be neither tiny nor huge; GPTQ's steps do not depend on the scale of H.
    # A wide layer's matrix is larger than the layer: beside `hessian` there is one of its size, all done in place.
    reverse = order.flip(0)
    used = damping
    while used <= _MAX_DAMPING:
        scaled = hessian[reverse[:, None], reverse].div_(mean)
        scaled.diagonal()[dead[reverse]] = 1.0
        scaled.diagonal().add_(used)
        # its transpose has the strides that LAPACK wants, and the same values
        lower, failed = torch.linalg.cholesky_ex(
            scaled.T, out=(scaled.T, torch.empty((), dtype=torch.int32, device=scaled.device))
        )
        if not int(failed):
            _invert_lower(lower)
            _reverse(scaled.view(-1))
            if _is_finite(scaled):
                return InverseFactor(scaled.T, order, dead, used)
        used = max(used, 1e-4) * 10
    raise QtoolError(f"{layer}: the Hessian stays singular at a damping of {_MAX_DAMPING}: use more calibration data")


def _is_finite(matrix: Tensor) -> bool:
    """Whether it holds neither NaN nor infinity; by rows, since the test makes copies."""
    return all(
        bool(torch.isfinite(rows).all()) for rows in torch.split(matrix, _TILE["cpu"] if matrix.is_cpu else len(matrix))
    )


def _reverse(values: Tensor) -> None:
    """Reverse a vector in place: of a matrix's elements, that reverses rows and columns."""
    size = len(values)
    for start in range(0, size // 2, _PIECE):
        stop = min(start + _PIECE, size // 2)
        front, back = values[start:stop], values[size - stop : size - start]
        kept = front.flip(0)
        front.copy_(back.flip(0))
        back.copy_(kept)


def _invert_lower(lower: Tensor) -> None:
    """Invert a lower triangular matrix [K, K] in place, by halves: most of the work is in matrix products."""
    if len(lower) <= _LEAF:
        identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
        lower.copy_(torch.linalg.solve_triangular(lower, identity, upper=False))
        return
    half = len(lower) // 2
    first, second, below = lower[:half, :half], lower[half:, half:], lower[half:, :half]
    _invert_lower(first)
    _invert_lower(second)
    below.copy_(second @ (below @ first)).neg_()


def diagonal_blocks(hessian: Tensor, size: int) -> Tensor:
    """[K, K] → [K/size, size, size]: each group's own block, the metric of a group-wise search."""
    count = len(hessian) // size
    index = torch.arange(count, device=hessian.device)
    return hessian.view(count, size, count, size).transpose(1, 2)[index, index]
