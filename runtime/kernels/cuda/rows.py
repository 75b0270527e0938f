"""Launches of the kernels over whole rows: RMSNorm with the residual, the gated activation, rounding to int8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.runtime.kernels.cuda.driver import has_clusters, load_kernel
from qtool.runtime.kernels.cuda.nvrtc import Macros

ROW_MAJOR = -1
"""An order of int8 rows, see rows.cuh: as they are. 0: that of skinny.cu; above: that of wide.cu with such blocks."""

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


def _int8_rows(tokens: int, columns: int, order: int, device: torch.device) -> tuple[Int8Rows, int]:
    """Room for int8 rows, and how many rows the kernel writes (with those that fill up a block of tokens)."""
    rows = -(-tokens // order) * order if order > 0 else tokens
    shape = (rows // order, columns // 128, order, 128) if order > 0 else (tokens, columns)
    codes = torch.empty(shape, dtype=torch.int8, device=device)
    return Int8Rows(codes, torch.empty(tokens, dtype=torch.float32, device=device)), rows


def _launch(device: torch.device, name: str, entry: str, macros: Macros, grid: tuple[int, int], *args: object) -> None:
    kernel = load_kernel(device, f"{name}.cu", entry, macros)
    kernel.launch((*grid, 1), macros["THREADS"], args, overlap=has_clusters(device.index))  # type: ignore[arg-type]


def quantize_rows(x: Tensor, order: int) -> Int8Rows:
    """Round x [M, K] (contiguous, K a multiple of 64; of 128 for wide.cu) to int8 per token, in `order`."""
    tokens, columns = x.shape
    rows, count = _int8_rows(tokens, columns, order, x.device)
    macros = _macros(columns, x.dtype, order)
    _launch(x.device, "quantize", "quantize_rows", macros, (count, 1), x, rows.codes, rows.scales, tokens, columns)
    return rows


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, order: int | None) -> Tensor | Int8Rows:
    """hidden += delta, in place; returns hidden / rms(hidden) * weight in 16 bits (`order` None) or int8 in `order`.

    Args:
        hidden, delta: [M, K] contiguous; K a multiple of 64, at most MAX_COLUMNS.
        weight: [K].
    """
    tokens, columns = hidden.shape
    macros = _macros(columns, hidden.dtype, order) | {"ADD": int(delta is not None), "QUANT": int(order is not None)}
    count = tokens
    out: Tensor | Int8Rows
    if order is None:
        out = torch.empty_like(hidden)
        to, scales = out, out
    else:
        out, count = _int8_rows(tokens, columns, order, hidden.device)
        to, scales = out.codes, out.scales
    added = hidden if delta is None else delta
    args = (hidden, added, weight, to, scales, tokens, columns, float(eps))
    _launch(hidden.device, "norm", "add_norm", macros, (count, 1), *args)
    return out


def silu_mul(gate_up: Tensor, order: int | None) -> Tensor | Int8Rows:
    """silu(gate) * up [M, K] of gate and up side by side [M, 2 K] (contiguous), in 16 bits or int8 as in add_norm."""
    tokens, columns = gate_up.shape[0], gate_up.shape[1] // 2
    macros = _macros(columns, gate_up.dtype, order) | {"QUANT": int(order is not None)}
    out: Tensor | Int8Rows
    if order is None:
        out = gate_up.new_empty(tokens, columns)
        macros |= {"THREADS": 128, "UNITS": 1}
        to, scales, grid = out, out, (tokens, -(-columns // 1024))
    else:
        out, count = _int8_rows(tokens, columns, order, gate_up.device)
        to, scales, grid = out.codes, out.scales, (count, 1)
    _launch(gate_up.device, "silu", "silu_mul", macros, grid, gate_up, to, scales, tokens, columns)
    return out
