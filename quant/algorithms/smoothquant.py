"""SmoothQuant: move the outliers of activations into weights, so that both can be held in 8 bits.

Xiao et al. 2022 (arXiv 2211.10438), eq. 4: W x = (W·s)(x/s) with s = max|x|^α / max|W|^(1−α) for each input channel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qtool.quant.errors import QtoolError

ALPHA = 0.5


def check_alpha(alpha: float) -> None:
    """Raise QtoolError for an α that is not from 0 to 1."""
    if not 0.0 <= alpha <= 1.0:
        raise QtoolError(f"smoothquant's alpha {alpha} is not from 0 (weights stay) to 1 (activations all alike)")


def smoothing_scale(x_max: Tensor, weights: Sequence[Tensor], alpha: float = ALPHA) -> Tensor:
    """Scale [K] float32 by which weights are multiplied and activations divided, channel by channel.

    A common factor of all channels changes neither per-token nor per-row rounding, so the scales are centred: the
    product of the largest and the smallest is 1. Channels without activations or without weights keep theirs (1).

    Args:
        x_max: [K] largest |x| of each channel over the calibration tokens.
        weights: [N_i, K] of every projection that reads this input.
        alpha: how much of the difficulty goes from activations to weights.
    """
    w_max = torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0)
    usable = (x_max > 0) & (w_max > 0)
    if not bool(usable.any()):
        return torch.ones_like(x_max, dtype=torch.float32)
    # by logarithms, so that neither huge nor tiny magnitudes leave float32
    one = torch.ones_like(x_max)
    log = (
        alpha * torch.where(usable, x_max, one).double().log()
        - (1 - alpha) * torch.where(usable, w_max, one).double().log()
    )
    log = log - (log[usable].amax() + log[usable].amin()) / 2
    return torch.where(usable, log.exp(), 1.0).float()
