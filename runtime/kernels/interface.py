"""What a kernel for quantized linears is: four plain functions behind a name. The dispatch table picks among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.quant.scheme import QuantScheme
from qtool.quant.weight import QuantizedWeight

Packed = tuple[Tensor, ...]
"""A weight in the layout that one kernel wants; opaque to everyone else."""


@dataclass(frozen=True)
class LinearSpec:
    """The static facts of one quantized linear: y [M, rows] = x [M, cols] @ weight.T."""

    rows: int
    cols: int
    scheme: QuantScheme
    act_order: bool = False  # the weight carries a g_idx
    dtype: torch.dtype = torch.bfloat16  # of activations and output


@dataclass(frozen=True)
class LinearKernel:
    """One way to multiply by a packed weight.

    Attributes:
        name: shown in logs and benchmarks.
        supports: (spec, device) → None where the kernel can run, else the reason it cannot, as a phrase. May try the
            kernel once on the device; must never raise.
        pack: (weight, spec, device) → the packed weight on `device`. Called once, at load.
        apply: (x [M, cols] in spec.dtype, packed, spec) → [M, rows] in spec.dtype. Any M ≥ 0.
    """

    name: str
    supports: Callable[[LinearSpec, torch.device], str | None]
    pack: Callable[[QuantizedWeight, LinearSpec, torch.device], Packed]
    apply: Callable[[Tensor, Packed, LinearSpec], Tensor]


@dataclass(frozen=True)
class QuantLinear:
    """One packed linear and the kernel that multiplies by it; called with x [tokens, cols]."""

    kernel: LinearKernel
    packed: Packed
    spec: LinearSpec
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        out = self.kernel.apply(x, self.packed, self.spec)
        return out if self.bias is None else out + self.bias
