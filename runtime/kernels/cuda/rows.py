"""Launches of the kernels over whole rows: RMSNorm with the residual, the gated activation, rounding to int8."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from qtool.runtime.kernels.cuda.driver import has_clusters, load_kernel
from qtool.runtime.kernels.cuda.nvrtc import Macros


class Form(Enum):
    """In which form rows are left for the product that follows."""

    PLAIN = "in 16 bits"
    INT8 = "as Int8Rows"
    ROUNDED = "as what Int8Rows stand for, code times scale, in 16 bits"


MAX_COLUMNS = 1 << 15  # of a row held by one block


@dataclass(frozen=True)
class Int8Rows:
    """Activations rounded per token, value = code * scale with scale = max |x| / 127.

    Attributes:
        codes: [M, K] int8.
        scales: [M] float32.
    """

    codes: Tensor
    scales: Tensor

    def __len__(self) -> int:
        return len(self.scales)


def _threads(columns: int) -> int:
    """Of a block: one 16-byte unit each where that is at most 512, more units and threads for long rows."""
    return next((t for t in (128, 256, 512) if columns <= 8 * t), 512 if columns <= 1 << 14 else 1024)


def _macros(columns: int, dtype: torch.dtype, form: Form) -> dict[str, int]:
    threads = _threads(columns)
    return {
        "BF16": int(dtype == torch.bfloat16),
        "THREADS": threads,
        "UNITS": -(-columns // (8 * threads)),
        "QUANT": int(form is not Form.PLAIN),
        "ROUNDED": int(form is Form.ROUNDED),
        "WEIGHT_BITS": 8,
    }


def _room(like: Tensor, columns: int, form: Form) -> tuple[Tensor | Int8Rows, Tensor, Tensor]:
    """Room for the rows of `like` with so many columns: the result, and its two parts as kernels want them."""
    if form is not Form.INT8:
        out = like.new_empty(len(like), columns)
        return out, out, out
    codes = torch.empty(len(like), columns, dtype=torch.int8, device=like.device)
    found = Int8Rows(codes, torch.empty(len(like), dtype=torch.float32, device=like.device))
    return found, found.codes, found.scales


def _launch(device: torch.device, name: str, entry: str, macros: Macros, grid: tuple[int, int], *args: object) -> None:
    kernel = load_kernel(device, f"{name}.cu", entry, macros)
    kernel.launch((*grid, 1), macros["THREADS"], args, overlap=has_clusters(device.index))  # type: ignore[arg-type]


def _quantize(x: Tensor, form: Form) -> Tensor | Int8Rows:
    out, to, scales = _room(x, x.shape[1], form)
    macros = _macros(x.shape[1], x.dtype, form)
    _launch(x.device, "quantize", "quantize_rows", macros, (len(x), 1), x, to, scales, x.shape[1])
    return out


def quantize_rows(x: Tensor) -> Int8Rows:
    """Round x [M, K] (contiguous, K a multiple of 64) to int8 per token."""
    rows = _quantize(x, Form.INT8)
    assert isinstance(rows, Int8Rows)
    return rows


def round_rows(x: Tensor) -> Tensor:
    """x [M, K] (as in quantize_rows) with every token rounded to the 255 values that int8 can take, in x's type."""
    rows = _quantize(x, Form.ROUNDED)
    assert isinstance(rows, Tensor)
    return rows


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, form: Form) -> Tensor | Int8Rows:
    """hidden += delta, in place; returns hidden / rms(hidden) * weight in `form`.

    Args:
        hidden, delta: [M, K] contiguous; K a multiple of 64, at most MAX_COLUMNS.
        weight: [K].
    """
    tokens, columns = hidden.shape
    macros = _macros(columns, hidden.dtype, form) | {"ADD": int(delta is not None)}
    out, to, scales = _room(hidden, columns, form)
    added = hidden if delta is None else delta
    args = (hidden, added, weight, to, scales, columns, float(eps))
    _launch(hidden.device, "norm", "add_norm", macros, (tokens, 1), *args)
    return out


def silu_mul(gate_up: Tensor, form: Form) -> Tensor | Int8Rows:
    """silu(gate) * up [M, K] of gate and up side by side [M, 2 K] (contiguous), in `form`."""
    tokens, columns = gate_up.shape[0], gate_up.shape[1] // 2
    macros = _macros(columns, gate_up.dtype, form)
    out, to, scales = _room(gate_up, columns, form)
    pieces = 1
    if form is Form.PLAIN:  # no row has to be seen as a whole
        macros |= {"THREADS": 128, "UNITS": 1}
        pieces = -(-columns // 1024)
    _launch(gate_up.device, "silu", "silu_mul", macros, (tokens, pieces), gate_up, to, scales, columns)
    return out
