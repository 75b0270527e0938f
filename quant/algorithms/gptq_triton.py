"""GPTQ's inner loop as one Triton kernel: a block of columns is finished in registers, a tile of rows at a time.

Rows are independent and share the block's triangular factor. Each column first takes in what the columns before it in
the block left over (the same sum as the column-by-column updates of the torch loop, taken all at once), so the weight
is read once and only codes and errors are written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_COLUMNS = 128  # errors of a whole block are held in registers
_ROWS = 32  # rows a program: one warp, so that a column's sum stays within a thread
_ROUND = tl.constexpr(12582912.0)  # 1.5 · 2²³: adding and subtracting it rounds to the nearest integer, halves to even


@triton.jit
def _finish(
    block,  # [count, rows] float32
    factor,  # [count, count] float32: the block's upper factor, transposed
    scale,  # [groups, rows] float32
    zero,  # [groups, rows] float32, or None
    group,  # [count] int32: group of each column
    codes,  # [count, rows] uint8, written
    errors,  # [count, rows] float32, written
    rows,
    midpoint,
    max_code,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,  # the power of two that holds COUNT
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    index = tl.arange(0, COLUMNS)
    left_over = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
    for i in range(COUNT):
        weights = tl.load(factor + i * COUNT + index, mask=index < i, other=0.0)
        column = tl.load(block + i * rows + row, mask=inside, other=0.0)
        column -= tl.sum(weights[:, None] * left_over, axis=0)
        place = tl.load(group + i) * rows + row
        step = tl.load(scale + place, mask=inside, other=1.0)
        offset = midpoint
        if zero is not None:
            offset = tl.load(zero + place, mask=inside, other=0.0)
        # clamped before rounding, so that the trick holds: no code lies beyond max_code on either side of zero
        steps = tl.minimum(tl.maximum(tl.div_rn(column, step), -max_code - 1.0), max_code + 1.0)
        code = tl.minimum(tl.maximum((steps + _ROUND) - _ROUND + offset, 0.0), max_code)
        error = tl.div_rn(column - (code - offset) * step, tl.load(factor + i * COUNT + i))
        tl.store(codes + i * rows + row, code.to(tl.uint8), mask=inside)
        tl.store(errors + i * rows + row, error, mask=inside)
        left_over = tl.where(index[:, None] == i, error[None, :], left_over)


def finish_block(
    block: Tensor,
    upper: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    groups: Tensor,
    codes: Tensor,
    midpoint: float,
    max_code: int,
) -> Tensor:
    """gptq.finish_block() for float32 on a GPU, at most MAX_COLUMNS columns; `block` stays as it is."""
    count, rows = block.shape
    errors = torch.empty_like(block)
    _finish[(triton.cdiv(rows, _ROWS),)](
        block,
        upper.T.contiguous(),
        scales,
        zeros,
        groups.to(torch.int32),
        codes,
        errors,
        rows,
        midpoint,
        float(max_code),
        COUNT=count,
        COLUMNS=triton.next_power_of_2(count),
        ROWS=_ROWS,
        num_warps=1,
    )
    return errors
