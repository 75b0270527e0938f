"""Launch of dequantize.cu, and the product for many tokens: a slab of rows to 16 bits, then cuBLAS."""

from __future__ import annotations

import torch
from torch import Tensor

from qtool.runtime.kernels.cuda.driver import has_clusters, load_kernel
from qtool.runtime.kernels.cuda.layout import CHUNK_COLS, TILE_ROWS, PackedWeight
from qtool.runtime.kernels.cuda.skinny import weight_macros
from qtool.runtime.kernels.interface import LinearSpec

_WARPS = 8  # of a block, as in dequantize.cu
SLAB_BYTES = 64 << 20  # of 16-bit weights held at once


def dequantize_rows(packed: PackedWeight, spec: LinearSpec, first_tile: int, num_tiles: int) -> Tensor:
    """Rows 16 first_tile ... of the weight in spec.dtype, columns in kernel order. [rows, 64 chunks]"""
    rows = min(spec.rows - first_tile * TILE_ROWS, num_tiles * TILE_ROWS)
    device = packed.codes.device
    out = torch.empty(rows, packed.chunks * CHUNK_COLS, dtype=spec.dtype, device=device)
    kernel = load_kernel(device, "dequantize.cu", "dequantize", weight_macros(spec, packed.scales.dtype))
    kernel.launch(
        (-(-packed.chunks // _WARPS), num_tiles, 1),
        _WARPS * 32,
        (packed.codes, packed.scales, packed.zeros, out, spec.rows, packed.chunks, first_tile),
        overlap=has_clusters(device.index),
    )
    return out


def multiply(x: Tensor, packed: PackedWeight, spec: LinearSpec, out: Tensor) -> None:
    """out [M, N] = x [M, 64 chunks] @ weight.T, any M, holding at most SLAB_BYTES of 16-bit weights at a time."""
    slab = max(1, SLAB_BYTES // (packed.chunks * CHUNK_COLS * 2 * TILE_ROWS))
    for first in range(0, packed.tiles, slab):
        weight = dequantize_rows(packed, spec, first, min(slab, packed.tiles - first))
        start = first * TILE_ROWS
        torch.mm(x, weight.t(), out=out[:, start : start + len(weight)])
