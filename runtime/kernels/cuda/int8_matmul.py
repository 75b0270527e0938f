"""Products of int8 activations and int8 weights for many tokens, in Triton: bound by the int8 tensor cores."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtool.runtime.kernels.cuda.driver import has_clusters, load_kernel
from qtool.runtime.kernels.cuda.layout import CHUNK_COLS, PackedWeight
from qtool.runtime.kernels.cuda.rows import Int8Rows


@dataclass(frozen=True)
class MatmulConfig:
    """How the work is cut: tokens, rows and columns of a tile, warps, steps whose loads are in flight."""

    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int


_BAND = 8  # tiles of tokens whose programs run together: they share weights in the L2 cache
_FEW = MatmulConfig(64, 128, 128, 4, 4)
_MANY = MatmulConfig(128, 128, 128, 4, 3)
_FEW_TOKENS = 384  # up to which _FEW was the faster on an H200


@triton.jit(do_not_specialize=["m"])  # one compilation for any number of tokens
def _int8_matmul(
    x, w, x_scales, w_scales, out, m, n, k,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, band: tl.constexpr,
):  # fmt: skip
    """out [m, n] = (x [m, k] @ w [n, k].T) * x_scales [m] * w_scales [n]; exact int32 sums; k a multiple of block_k."""
    tiles_m, tiles_n = tl.cdiv(m, block_m), tl.cdiv(n, block_n)
    program = tl.program_id(0)
    first = program // (band * tiles_n) * band
    height = tl.minimum(tiles_m - first, band)
    inside = program % (band * tiles_n)
    tile_m, tile_n = first + inside % height, inside // height
    rows = tile_m * block_m + tl.arange(0, block_m)
    cols = tile_n * block_n + tl.arange(0, block_n)
    depth = tl.arange(0, block_k)
    x_at = x + (rows % m).to(tl.int64)[:, None] * k + depth[None, :]
    w_at = w + (cols % n).to(tl.int64)[:, None] * k + depth[None, :]
    total = tl.zeros([block_m, block_n], tl.int32)
    for _ in range(0, k, block_k):
        total = tl.dot(tl.load(x_at), tl.trans(tl.load(w_at)), total, out_dtype=tl.int32)
        x_at += block_k
        w_at += block_k
    row_scales = tl.load(x_scales + rows, mask=rows < m, other=0)
    col_scales = tl.load(w_scales + cols, mask=cols < n, other=0)
    result = total.to(tl.float32) * row_scales[:, None] * col_scales[None, :]
    target = out + rows.to(tl.int64)[:, None] * n + cols[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=(rows < m)[:, None] & (cols < n)[None, :])


def int8_matmul(
    rows: Int8Rows, weight: Tensor, scales: Tensor, out: Tensor, config: MatmulConfig | None = None
) -> None:
    """out [M, N] = rows @ weight.T * scales.

    Args:
        rows: M tokens, codes [M, K] row-major, K a multiple of 128.
        weight: [N, K] int8.
        scales: [N] float32.
        out: float16 or bfloat16, contiguous.
    """
    m, k = rows.codes.shape
    n = len(weight)
    block_m, block_n, block_k, warps, stages = astuple(config or (_FEW if m <= _FEW_TOKENS else _MANY))
    grid = (triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)
    _int8_matmul[grid](
        rows.codes, weight, rows.scales, scales, out, m, n, k,
        block_m=block_m, block_n=block_n, block_k=block_k, band=_BAND, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def unpack_rows(packed: PackedWeight, num_rows: int) -> Tensor:
    """Codes of an int8 weight that was packed for int8 activations, as [num_rows, 64 chunks] int8."""
    device = packed.codes.device
    out = torch.empty(num_rows, packed.chunks * CHUNK_COLS, dtype=torch.int8, device=device)
    load_kernel(device, "unpack.cu", "unpack", {"BF16": 0, "WEIGHT_BITS": 8}).launch(
        (-(-packed.chunks // 8), packed.tiles, 1),
        256,
        (packed.codes, out, num_rows, packed.chunks),
        overlap=has_clusters(device.index),
    )
    return out
