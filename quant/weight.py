"""The one in-memory form of a quantized weight: every format reads into it and writes from it, kernels pack it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.quant.errors import QtoolError
from qtool.quant.scheme import QuantScheme


def check_zero_shape(zero: Tensor, scale: tuple[int, ...], layer: str) -> None:
    """Raise QtoolError naming `layer` where zero points are not as many as scales."""
    if zero.shape != scale:
        raise QtoolError(f"layer {layer}: zero points have shape {tuple(zero.shape)}, expected {scale}")


@dataclass(frozen=True)
class QuantizedWeight:
    """A [N, K] weight as unsigned codes with one scale (and zero point) per row and group of columns.

    value[n, k] = (codes[n, k] - zero[n, group(k)]) * scale[n, group(k)], group(k) = k // group_size,
    or g_idx[k] for a GPTQ checkpoint with act-order by group.

    Attributes:
        codes: [N, K] uint8, in 0 .. 2^bits - 1.
        scale: [N, G] floating point; may be negative (signed scales), never NaN or inf.
        zero: [N, G] uint8, or None for the midpoint 2^(bits-1) everywhere.
        scheme: bits, group size, symmetric (then `zero` is None).
        g_idx: [K] int32 in 0 .. G - 1, or None.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    scheme: QuantScheme
    g_idx: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, K] in `dtype`, computed in float32 and rounded once."""
        values = self.codes.to(torch.float32, memory_format=torch.contiguous_format)
        scale, zero = self.scale.to(torch.float32), self.zero
        if self.g_idx is not None:
            columns = self.g_idx.long()
            values.sub_(self.scheme.midpoint if zero is None else zero[:, columns]).mul_(scale[:, columns])
        else:  # in place and by groups: nothing else of the weight's size is made
            groups = values.view(*scale.shape, -1)
            groups.sub_(self.scheme.midpoint if zero is None else zero.unsqueeze(-1)).mul_(scale.unsqueeze(-1))
        return values.to(dtype)

    def check(self, layer: str) -> None:
        """Raise QtoolError naming `layer` where the parts do not fit together or a scale is not finite."""
        rows, cols = self.shape
        groups = self.scale.shape[1] if self.scale.ndim == 2 else -1
        want = groups if self.g_idx is not None else self.scheme.num_groups(cols)
        if self.scale.shape != (rows, want):
            raise QtoolError(f"layer {layer}: scales have shape {tuple(self.scale.shape)}, expected ({rows}, {want})")
        if (self.zero is None) != self.scheme.symmetric:
            raise QtoolError(f"layer {layer}: zero points do not agree with the scheme {self.scheme.name}")
        if self.zero is not None:
            check_zero_shape(self.zero, tuple(self.scale.shape), layer)
        if not bool(torch.isfinite(self.scale.float()).all()):
            raise QtoolError(f"layer {layer}: a scale is NaN or infinite")
        if self.g_idx is not None and self.g_idx.shape != (cols,):
            raise QtoolError(f"layer {layer}: g_idx has shape {tuple(self.g_idx.shape)}, expected ({cols},)")
        if self.g_idx is not None and not (0 <= int(self.g_idx.min()) and int(self.g_idx.max()) < groups):
            raise QtoolError(f"layer {layer}: g_idx points outside its {groups} groups")

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """The same weight with every tensor on `device`."""
        return QuantizedWeight(
            codes=self.codes.to(device),
            scale=self.scale.to(device),
            zero=None if self.zero is None else self.zero.to(device),
            scheme=self.scheme,
            g_idx=None if self.g_idx is None else self.g_idx.to(device),
        )


def concat_rows(parts: list[QuantizedWeight]) -> QuantizedWeight | None:
    """Stack weights of one input along their rows (q,k,v → qkv); None where their schemes or g_idx differ."""
    first = parts[0]
    same = all(p.scheme == first.scheme and p.scale.dtype == first.scale.dtype for p in parts)
    if not same or any(p.g_idx is not None for p in parts):
        return None
    return QuantizedWeight(
        codes=torch.cat([p.codes for p in parts]),
        scale=torch.cat([p.scale for p in parts]),
        zero=None if first.zero is None else torch.cat([p.zero for p in parts if p.zero is not None]),
        scheme=first.scheme,
    )
