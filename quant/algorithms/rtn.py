"""Round to nearest: every weight to its nearest code, no calibration data. The baseline that the others must beat."""

from __future__ import annotations

import torch
from torch import Tensor

from qtool.quant.numerics import GridSearch, find_grid, quantize
from qtool.quant.scheme import QuantScheme
from qtool.quant.weight import QuantizedWeight


def rtn(
    weight: Tensor,
    scheme: QuantScheme,
    *,
    search: GridSearch = "minmax",
    metric: Tensor | None = None,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> QuantizedWeight:
    """Quantize `weight` [N, K] without compensation. `search` and `metric` as in numerics.find_grid.

    Raises:
        QtoolError: the group size does not divide K.
    """
    grid = find_grid(weight, scheme, search, metric=metric, scale_dtype=scale_dtype)
    return quantize(weight, grid, scheme)
