"""Launches of the kernels over whole rows: RMSNorm with the residual, the gated activation, rounding to int8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.runtime.kernels.cuda.driver import has_clusters, load_kernel
from qtool.runtime.kernels.cuda.nvrtc import Macros

ROW_MAJOR = -1
"""An order of int8 rows, see rows.cuh: as they are. 0: that of skinny.cu; above: that of wide.cu with such blocks."""
ROUNDED = -2
"""No int8 rows: what they stand for, code times scale, in 16 bits (a tensor [M, K])."""

MAX_COLUMNS = 1 << 15  # of a row held by one block


@dataclass(frozen=True)
class Int8Rows:
    """Activations rounded per token, value = code * scale with scale = max |x| / 127.

    Attributes:
        codes: [M, K] int8 in the order of skinny.cu or row-major, or [blocks, K / 128, block_tokens, 128] for wide.cu.
        scales: [M] float32.
    """

    codes: Tensor
    scales: Tensor


def _threads(columns: int) -> int:
    """Of a block: one 16-byte unit each where that is at most 512, more units and threads for long rows."""
    return next((t for t in (128, 256, 512) if columns <= 8 * t), 512 if columns <= 1 << 14 else 1024)


def _macros(columns: int, dtype: torch.dtype, order: int | None) -> dict[str, int]:
    threads = _threads(columns)
    return {
        "BF16": int(dtype == torch.bfloat16),
        "THREADS": threads,
        "UNITS": -(-columns // (8 * threads)),
        "TOKENS": order or 0,
        "WEIGHT_BITS": 8,
    }


def _room(like: Tensor, columns: int, order: int | None) -> tuple[Tensor | Int8Rows, Tensor, Tensor, int]:
    """Room for the rows of `like` with so many columns: the result, its two parts as kernels want them, and how many
    rows are written (with those that fill up a block of tokens)."""
    tokens, device = len(like), like.device
    if order is None or order == ROUNDED:
        out = like.new_empty(tokens, columns)
        return out, out, out, tokens
    rows = -(-tokens // order) * order if order > 0 else tokens
    shape = (rows // order, columns // 128, order, 128) if order > 0 else (tokens, columns)
    codes = torch.empty(shape, dtype=torch.int8, device=device)
    found = Int8Rows(codes, torch.empty(tokens, dtype=torch.float32, device=device))
    return found, found.codes, found.scales, rows


def _launch(device: torch.device, name: str, entry: str, macros: Macros, grid: tuple[int, int], *args: object) -> None:
    kernel = load_kernel(device, f"{name}.cu", entry, macros)
    kernel.launch((*grid, 1), macros["THREADS"], args, overlap=has_clusters(device.index))  # type: ignore[arg-type]


def quantize_rows(x: Tensor, order: int) -> Int8Rows:
    """Round x [M, K] (contiguous, K a multiple of 64; of 128 for wide.cu) to int8 per token, in `order`."""
    tokens, columns = x.shape
    rows, codes, scales, count = _room(x, columns, order)
    macros = _macros(columns, x.dtype, order)
    _launch(x.device, "quantize", "quantize_rows", macros, (count, 1), x, codes, scales, tokens, columns)
    assert isinstance(rows, Int8Rows)
    return rows


def round_rows(x: Tensor) -> Tensor:
    """x [M, K] (as in quantize_rows) with every token rounded to the 255 values that int8 can take, in x's type."""
    tokens, columns = x.shape
    out = torch.empty_like(x)
    macros = _macros(columns, x.dtype, ROUNDED)
    _launch(x.device, "quantize", "quantize_rows", macros, (tokens, 1), x, out, out, tokens, columns)
    return out


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, order: int | None) -> Tensor | Int8Rows:
    """hidden += delta, in place; returns hidden / rms(hidden) * weight in 16 bits (`order` None) or int8 in `order`.

    Args:
        hidden, delta: [M, K] contiguous; K a multiple of 64, at most MAX_COLUMNS.
        weight: [K].
    """
    tokens, columns = hidden.shape
    macros = _macros(columns, hidden.dtype, order) | {"ADD": int(delta is not None), "QUANT": int(order is not None)}
    out, to, scales, count = _room(hidden, columns, order)
    added = hidden if delta is None else delta
    args = (hidden, added, weight, to, scales, tokens, columns, float(eps))
    _launch(hidden.device, "norm", "add_norm", macros, (count, 1), *args)
    return out


def silu_mul(gate_up: Tensor, order: int | None) -> Tensor | Int8Rows:
    """silu(gate) * up [M, K] of gate and up side by side [M, 2 K] (contiguous), in 16 bits or int8 as in add_norm."""
    tokens, columns = gate_up.shape[0], gate_up.shape[1] // 2
    macros = _macros(columns, gate_up.dtype, order) | {"QUANT": int(order is not None)}
    out, to, scales, count = _room(gate_up, columns, order)
    grid = (count, 1)
    if order is None:  # no row has to be seen as a whole
        macros |= {"THREADS": 128, "UNITS": 1}
        grid = (tokens, -(-columns // 1024))
    _launch(gate_up.device, "silu", "silu_mul", macros, grid, gate_up, to, scales, tokens, columns)
    return out
