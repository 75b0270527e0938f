"""The portable kernel: dequantize a bounded chunk of rows, multiply, go on. Runs every scheme on every device, those
that quantize activations too (in float64).

Every other kernel is tested against it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from qtool.quant.scheme import QuantScheme
from qtool.quant.weight import QuantizedWeight
from qtool.runtime.kernels.activations import quantize_per_token
from qtool.runtime.kernels.interface import LinearKernel, LinearSpec, Packed

CHUNK_ELEMENTS = 1 << 22  # weights dequantized at a time: 16 MiB in float32


def _supports(spec: LinearSpec, device: torch.device) -> str | None:
    return None


def _is_packed(scheme: QuantScheme, cols: int) -> bool:
    return scheme.bits == 4 and cols % 2 == 0


def pack_nibbles(codes: Tensor) -> Tensor:
    """[N, K] uint8 codes below 16 → [N, K / 2]: column j in the low half, column j + K / 2 in the high half."""
    half = codes.shape[1] // 2
    return codes[:, :half] | (codes[:, half:] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of pack_nibbles."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _pack(weight: QuantizedWeight, spec: LinearSpec, device: torch.device) -> Packed:
    """codes (4-bit: two per byte), scale [N, G], zero [N, G] or empty, g_idx [K] or empty."""
    codes = pack_nibbles(weight.codes) if _is_packed(spec.scheme, spec.cols) else weight.codes
    empty = torch.empty(0, dtype=torch.uint8)
    zero = empty if weight.zero is None else weight.zero
    g_idx = empty if weight.g_idx is None else weight.g_idx.long()
    return codes.to(device), weight.scale.to(device), zero.to(device), g_idx.to(device)


def _apply(x: Tensor, packed: Packed, spec: LinearSpec) -> Tensor:
    codes, scale, zero, g_idx = packed
    out = x.new_empty(x.shape[0], spec.rows)
    values, token_scale = x, None
    if spec.scheme.act_bits:
        # float64 holds products and sums of integers exactly, and those of codes and 16-bit scales nearly so
        codes8, token_scale = quantize_per_token(x)
        values = codes8.double()
    step = max(1, CHUNK_ELEMENTS // spec.cols)
    for start in range(0, spec.rows, step):
        rows = slice(start, min(start + step, spec.rows))
        part = unpack_nibbles(codes[rows]) if _is_packed(spec.scheme, spec.cols) else codes[rows]
        weight = dequantize(part, scale[rows], zero[rows] if zero.numel() else None, g_idx, spec.scheme)
        product = functional.linear(values, weight.to(values.dtype))
        out[:, rows] = product if token_scale is None else product * token_scale
    return out


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor | None, g_idx: Tensor, scheme: QuantScheme) -> Tensor:
    """[N, K] float32 of codes [N, K], scale and zero [N, G]; `g_idx` [K], or empty for groups in order."""
    rows, cols = codes.shape
    values, factor = codes.float(), scale.float()
    if g_idx.numel():
        offset = scheme.midpoint if zero is None else zero.float()[:, g_idx]
        return (values - offset) * factor[:, g_idx]
    offset = scheme.midpoint if zero is None else zero.float().unsqueeze(2)
    return ((values.view(rows, factor.shape[1], -1) - offset) * factor.unsqueeze(2)).view(rows, cols)


REFERENCE = LinearKernel("torch reference", _supports, _pack, _apply)
