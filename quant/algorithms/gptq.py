"""GPTQ: round one input column after another, and let the columns not yet rounded make up for the error.

Frantar et al. 2022 (arXiv 2210.17323), with activation order and static groups: the grid of every group is fixed from
the original weight, so columns can be taken in any order and the stored weight needs no index of groups.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from qtool.quant.algorithms.hessian import InverseFactor
from qtool.quant.numerics import Grid, nearest_codes
from qtool.quant.scheme import QuantScheme
from qtool.quant.weight import QuantizedWeight

log = logging.getLogger(__name__)


def gptq(
    weight: Tensor, factor: InverseFactor, grid: Grid, scheme: QuantScheme, *, block_size: int = 128
) -> QuantizedWeight:
    """Quantize `weight` [N, K] on `grid` against the inverse Hessian `factor` of its inputs.

    Rows do not interact: projections that share their input and scheme may be stacked and quantized together.
    `block_size` is how many columns are finished before the rest is updated by one matrix product: a matter of speed
    alone (on a GPU 128 at most). Inputs that calibration never excited keep their weight, rounded to nearest: there is
    nothing to weigh them by, and at run time they may be excited.
    """
    cols = weight.shape[1]
    group_size = cols // grid.scale.shape[1]
    groups = factor.order // group_size
    # transposed and in processing order: a column is contiguous   [K, N]
    left = weight.to(factor.upper.dtype)[:, factor.order].T.contiguous()
    codes = torch.empty_like(left, dtype=torch.uint8)
    scales = grid.scale.to(left.dtype).T.contiguous()  # [G, N]
    zeros = None if grid.zero is None else grid.zero.to(left.dtype).T.contiguous()
    finish, block_size = _finisher(left, block_size)

    for start in range(0, cols, block_size):
        stop = min(start + block_size, cols)
        upper = factor.upper[start:stop]
        errors = finish(
            left[start:stop],
            upper[:, start:stop],
            scales,
            zeros,
            groups[start:stop],
            codes[start:stop],
            float(scheme.midpoint),
            scheme.max_code,
        )
        left[stop:].addmm_(upper[:, stop:].T, errors, alpha=-1)

    restored = torch.empty_like(codes)
    restored[factor.order] = codes
    return QuantizedWeight(restored.T.contiguous(), grid.scale, grid.zero, scheme)


Finish = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, float, int], Tensor]


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
    """Round the columns of one block in turn, each after the errors of those before it were made up for.

    Args:
        block: [b, N] weights of b columns; used up.
        upper: [b, b] the block of the inverse factor on the diagonal.
        scales, zeros: [G, N] steps and zero codes (None: `midpoint` everywhere) of all groups.
        groups: [b] int64 group of each column.
        codes: [b, N] uint8, written.

    Returns:
        [b, N] error of each column over its pivot, for the columns after the block.
    """
    pivots, places = upper.diagonal().tolist(), groups.tolist()
    errors = torch.empty_like(block)
    for i, (pivot, place) in enumerate(zip(pivots, places, strict=True)):
        column, scale = block[i], scales[place]
        zero: Tensor | float = midpoint if zeros is None else zeros[place]
        code = nearest_codes(column, scale, zero, max_code)
        codes[i] = code
        errors[i] = (column - (code - zero) * scale) / pivot
        block[i + 1 :].addr_(upper[i, i + 1 :], errors[i], alpha=-1)
    return errors


def _finisher(left: Tensor, block_size: int) -> tuple[Finish, int]:
    """How to finish a block of `left`, and of how many columns: the fused kernel for float32 on a GPU where it runs."""
    fused = _fused_finish(left.device) if left.is_cuda and left.dtype == torch.float32 else None
    if fused is None:
        return finish_block, block_size
    finish, most = fused
    return finish, min(block_size, most)


@functools.cache
def _fused_finish(device: torch.device) -> tuple[Finish, int] | None:
    """The Triton kernel and its largest block, tried once on each device; None where Triton is missing or cannot build.

    Triton compiles a launcher with the machine's C compiler, so being installed is not enough.
    """
    try:
        from qtool.quant.algorithms import gptq_triton

        one = torch.ones(1, 1, device=device)
        index = torch.zeros(1, dtype=torch.int64, device=device)
        gptq_triton.finish_block(one, one, one, None, index, torch.zeros_like(one, dtype=torch.uint8), 8.0, 15)
    except Exception as error:  # what a missing compiler or driver raises differs by release
        log.warning("GPTQ runs column by column, which is slow on a GPU: its Triton kernel does not run (%s)", error)
        return None
    return gptq_triton.finish_block, gptq_triton.MAX_COLUMNS
