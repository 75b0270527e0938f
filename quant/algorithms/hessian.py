"""The Hessian of a layer's output error, and the factor of its inverse that GPTQ walks along.

For y = x Wᵀ the squared output error of a change Δ of one row is Δ H Δᵀ with H = (2/n) Σ xᵀx over n calibration tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.quant.errors import QtoolError

_TILE = 512  # columns of the Hessian updated at once: the lower triangle is mirrored, not computed
_MAX_DAMPING = 1.0


class Hessian:
    """Running mean H = (2/n) Σ xᵀx [K, K] in float32 (Frantar et al. 2022, arXiv 2210.17323, eq. 2)."""

    def __init__(self, features: int, device: torch.device | str = "cpu") -> None:
        self._upper = torch.zeros(features, features, device=device)
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        """Take in `x` [tokens, K]."""
        x = x.reshape(-1, x.shape[-1]).to(self._upper)
        total = self.tokens + len(x)
        if total == 0:
            return
        cols = x.shape[1]
        for start in range(0, cols, _TILE):
            stop = min(start + _TILE, cols)
            tile = self._upper[start:stop, start:]
            tile.mul_(self.tokens / total).addmm_(x[:, start:stop].T, x[:, start:], alpha=2.0 / total)
        self.tokens = total

    def matrix(self) -> Tensor:
        """The symmetric [K, K] matrix so far."""
        upper = self._upper.triu()
        return upper + upper.triu(1).T


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
    if not bool(torch.isfinite(hessian).all()):
        raise QtoolError(f"{layer}: calibration activations hold NaN or infinite values, or overflow float32")
    dead = diagonal <= 0
    order = (
        torch.argsort(torch.where(dead, 0, diagonal), descending=True, stable=True)
        if act_order
        else (torch.arange(len(diagonal), device=hessian.device))
    )
    mean = diagonal[~dead].double().mean().item() if not bool(dead.all()) else 1.0
    # scaled by its own mean, the matrix can be neither tiny nor huge; GPTQ's steps do not depend on the scale of H
    scaled = (hessian / mean)[order][:, order]
    scaled.diagonal()[dead[order]] = 1.0
    used = damping
    while used <= _MAX_DAMPING:
        damped = scaled.clone()
        damped.diagonal().add_(used)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed) and bool(torch.isfinite(upper).all()):
                return InverseFactor(upper, order, dead, used)
        used = max(used, 1e-4) * 10
    raise QtoolError(f"{layer}: the Hessian stays singular at a damping of {_MAX_DAMPING}: use more calibration data")


def diagonal_blocks(hessian: Tensor, size: int) -> Tensor:
    """[K, K] → [K/size, size, size]: each group's own block, the metric of a group-wise search."""
    count = len(hessian) // size
    index = torch.arange(count, device=hessian.device)
    return hessian.view(count, size, count, size).transpose(1, 2)[index, index]
