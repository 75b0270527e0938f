"""Rotation of what flows through a model, so that no channel holds outliers; every product stays what it was.

Ashkboos et al. 2024 (QuaRot, arXiv 2404.00456), Liu et al. 2024 (SpinQuant, arXiv 2405.16406): with an orthogonal R,
(x R)(W R)ᵀ = x Wᵀ. A randomised Hadamard matrix spreads every channel evenly over all. R is a product of parts that are
never multiplied out: random signs, Sylvester's Hadamard matrices for the power of two in the size, and for the odd rest
the Hartley matrix (Bracewell 1983), which exists for every size and has entries at most √2 times a Hadamard matrix's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 1 << 20  # elements turned at a time, in float64


def hadamard(size: int) -> Tensor:
    """Sylvester's Hadamard matrix over √size, [size, size] float64, orthogonal; `size` is a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)


def hartley(size: int) -> Tensor:
    """(cos + sin)(2π i j / size) / √size: [size, size] float64, orthogonal and symmetric, for any size."""
    index = torch.arange(size, dtype=torch.float64)
    angle = torch.outer(index, index).remainder(size) * (2 * math.pi / size)
    return (angle.cos() + angle.sin()) / math.sqrt(size)


@dataclass(frozen=True)
class Rotation:
    """The orthogonal matrix R = diag(signs) · (F₁ ⊗ F₂ ⊗ …) of [size, size].

    Attributes:
        signs: [size] float64, each 1 or −1.
        factors: orthogonal float64 matrices whose sizes multiply to `size`.
    """

    signs: Tensor
    factors: tuple[Tensor, ...]

    @property
    def size(self) -> int:
        return len(self.signs)

    def apply(self, x: Tensor) -> Tensor:
        """x R in float64; the last dimension of `x` may hold several vectors of `size` one after another (heads)."""
        turned = x.double().reshape(-1, self.size) * self.signs
        for factor in self.factors:
            # turn the leading axis and put it last: after all factors the axes are in their old order
            turned = turned.view(len(turned), len(factor), -1).transpose(1, 2) @ factor
        return turned.reshape(x.shape)


def random_rotation(size: int, seed: int) -> Rotation:
    """A randomised Hadamard rotation of any size; the same `seed` gives the same one everywhere."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    power = (size & -size).bit_length() - 1
    half = power // 2  # two factors of a power of two cost far less than one
    parts = (hadamard(1 << (power - half)), hadamard(1 << half), hartley(size >> power))
    return Rotation(signs, tuple(part for part in parts if len(part) > 1))


def rotate_weight(
    weight: Tensor,
    *,
    gain: Tensor | None = None,
    inputs: Rotation | None = None,
    outputs: Rotation | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The [N, K] weight that reads rotated inputs and gives rotated outputs: Rₒᵀ (W · gain) Rᵢ in `dtype`.

    Computed in float64, a bounded part at a time.

    Args:
        gain: [K] what the norm before it multiplied by, and no longer does.
        inputs, outputs: rotations of sizes that divide K and N; None: not rotated.
    """
    rows, cols = weight.shape
    turned = torch.empty(rows, cols, dtype=dtype if outputs is None else torch.float32)
    step = max(1, _CHUNK // cols)
    for part in (slice(start, start + step) for start in range(0, rows, step)):
        values = weight[part].double()
        if gain is not None:
            values = values * gain.double()
        turned[part] = values if inputs is None else inputs.apply(values)
    if outputs is None:
        return turned
    step = max(1, _CHUNK // rows)
    for part in (slice(start, start + step) for start in range(0, cols, step)):
        turned[:, part] = outputs.apply(turned[:, part].T).T
    return turned.to(dtype)
