"""The runtime's own layers: linears over dense or packed weights, alone or fused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from qtool.quant.weight import QuantizedWeight, concat_rows
from qtool.runtime.kernels.dispatch import choose
from qtool.runtime.kernels.interface import LinearSpec, QuantLinear

LinearFn = Callable[[Tensor], Tensor]
"""x [tokens, in_features] → [tokens, out_features]."""


@dataclass(frozen=True)
class DenseLinear:
    weight: Tensor  # [out_features, in_features]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class SplitLinear:
    """Projections of one input that are stored differently, so that they cannot run as one."""

    parts: tuple[LinearFn, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def _quant_linear(
    weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, device: torch.device
) -> QuantLinear:
    rows, cols = weight.shape
    spec = LinearSpec(rows, cols, weight.scheme, act_order=weight.g_idx is not None, dtype=dtype)
    kernel, spec = choose(spec, device)
    return QuantLinear(kernel, kernel.pack(weight, spec, device), spec, bias)


def make_linear(
    weights: Sequence[Tensor | QuantizedWeight],
    biases: Sequence[Tensor | None],
    dtype: torch.dtype,
    device: torch.device,
) -> LinearFn:
    """One linear out of projections that read the same input, their outputs side by side.

    They are fused into one product where they are stored alike, and run one by one otherwise.
    """
    ready = [None if b is None else b.to(device, dtype) for b in biases]
    dense = [w for w in weights if isinstance(w, Tensor)]
    packed = [w for w in weights if isinstance(w, QuantizedWeight)]
    if (dense and packed) or (packed and concat_rows(packed) is None and len(packed) > 1):
        return SplitLinear(tuple(make_linear([w], [b], dtype, device) for w, b in zip(weights, ready)))
    bias = None
    if any(b is not None for b in ready):
        rows = [w.shape[0] for w in weights]
        bias = torch.cat([torch.zeros(n, dtype=dtype, device=device) if b is None else b for n, b in zip(rows, ready)])
    if dense:
        weight = dense[0] if len(dense) == 1 else torch.cat(dense)
        return DenseLinear(weight.to(device, dtype), bias)
    fused = packed[0] if len(packed) == 1 else concat_rows(packed)
    assert fused is not None
    return _quant_linear(fused, bias, dtype, device)
