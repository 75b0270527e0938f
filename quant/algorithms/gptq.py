"""GPTQ: round one input column after another, and let the columns not yet rounded make up for the error.

Frantar et al. 2022 (arXiv 2210.17323), with activation order and static groups: the grid of every group is fixed from
the original weight, so columns can be taken in any order and the stored weight needs no index of groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qtool.quant.algorithms.hessian import InverseFactor
from qtool.quant.numerics import Grid, nearest_codes
from qtool.quant.scheme import QuantScheme
from qtool.quant.weight import QuantizedWeight


def gptq(
    weight: Tensor, factor: InverseFactor, grid: Grid, scheme: QuantScheme, *, block_size: int = 128
) -> QuantizedWeight:
    """Quantize `weight` [N, K] on `grid` against the inverse Hessian `factor` of its inputs.

    Rows do not interact: projections that share their input and scheme may be stacked and quantized together.
    `block_size` is how many columns are finished before the rest is updated by one matrix product: a matter of speed
    alone. Inputs that calibration never excited keep their weight, rounded to nearest: there is nothing to weigh them
    by, and at run time they may be excited.
    """
    cols = weight.shape[1]
    group_size = cols // grid.scale.shape[1]
    groups = (factor.order // group_size).tolist()
    # transposed and in processing order: a column is contiguous   [K, N]
    left = weight.to(factor.upper.dtype)[:, factor.order].T.contiguous()
    codes = torch.empty_like(left, dtype=torch.uint8)
    scales = grid.scale.to(left.dtype).T.contiguous()  # [G, N]
    zeros = None if grid.zero is None else grid.zero.to(left.dtype).T.contiguous()
    midpoint = float(scheme.midpoint)

    for start in range(0, cols, block_size):
        stop = min(start + block_size, cols)
        block = left[start:stop]
        upper = factor.upper[start:stop, start:stop]
        pivots = upper.diagonal().tolist()
        errors = torch.empty_like(block)  # [block, N]
        for i in range(stop - start):
            column, scale = block[i], scales[groups[start + i]]
            zero: Tensor | float = midpoint if zeros is None else zeros[groups[start + i]]
            code = nearest_codes(column, scale, zero, scheme.max_code)
            codes[start + i] = code
            errors[i] = (column - (code - zero) * scale) / pivots[i]
            block[i + 1 :].addr_(upper[i, i + 1 :], errors[i], alpha=-1)
        left[stop:].addmm_(factor.upper[start:stop, stop:].T, errors, alpha=-1)

    restored = torch.empty_like(codes)
    restored[factor.order] = codes
    return QuantizedWeight(restored.T.contiguous(), grid.scale, grid.zero, scheme)
