"""AWQ: scale input channels so that those with large activations are rounded finely; undo it in what feeds them.

Lin et al. 2023 (arXiv 2306.00978). W x = (W·s)(x/s): the weight is quantized as W·s, and the division by s goes into
the norm or linear that produces x. s = x̄^r / w̄^(1−r) with r from a grid, judged by the output error of what consumes
the layer. The identity is in the grid, so the search cannot do worse than no scaling on what it measures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.quant.numerics import find_grid, quantize
from qtool.quant.scheme import QuantScheme

STEPS = 20  # ratios tried: 0, 1/20 .. 19/20


@dataclass(frozen=True)
class ScaleSearch:
    """What was found: `scale` [channels] float32, its ratio (None: identity), its loss, and the identity's loss."""

    scale: Tensor
    ratio: float | None
    loss: float
    identity_loss: float


def simulate(weight: Tensor, scale: Tensor, scheme: QuantScheme, scale_dtype: torch.dtype) -> Tensor:
    """[N, K] weight as it would act after quantization of weight·scale with inputs divided by scale."""
    scaled = weight * scale
    grid = find_grid(scaled, scheme, "signed", scale_dtype=scale_dtype)
    return quantize(scaled, grid, scheme).dequantize() / scale


def weight_magnitude(weights: Sequence[Tensor], schemes: Sequence[QuantScheme]) -> Tensor:
    """w̄ [K]: mean over all rows of |w| relative to the largest magnitude in the weight's group."""
    parts = []
    for weight, scheme in zip(weights, schemes, strict=True):
        rows, cols = weight.shape
        groups = weight.float().abs().reshape(rows, scheme.num_groups(cols), -1)
        largest = groups.amax(-1, keepdim=True)
        parts.append((groups / torch.where(largest > 0, largest, torch.ones_like(largest))).reshape(rows, cols))
    return torch.cat(parts).mean(0)


def _candidate(x_mean: Tensor, w_mean: Tensor, ratio: float) -> Tensor:
    scale = (x_mean**ratio / (w_mean ** (1 - ratio) + 1e-4)).clamp_min(1e-4)
    scale = scale / (scale.max() * scale.min()).sqrt()
    return torch.where(torch.isfinite(scale) & (scale > 0), scale, torch.ones_like(scale))


def search_scale(
    x_mean: Tensor,
    weights: Sequence[Tensor],
    schemes: Sequence[QuantScheme],
    loss: Callable[[list[Tensor]], float],
    *,
    spread: Tensor | None = None,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> ScaleSearch:
    """Find the channel scales under which the quantized `weights` change the consumer's output least.

    Args:
        x_mean: [K] mean |x| of each input channel over the calibration tokens.
        weights: [N_i, K] of every projection that reads this input; each is simulated with its own scheme.
        loss: output error of the consumer with the given stand-ins for `weights`.
        spread: [K] int64, for inputs that repeat the channels of their source (grouped-query attention: value channel
            of each input); scales are then chosen per source channel, and `scale` has one entry for each of those.
    """
    w_mean = weight_magnitude(weights, schemes)
    if spread is not None:
        # magnitudes of a source channel: the mean over the inputs that repeat it
        x_mean, w_mean = _gather_mean(x_mean, spread), _gather_mean(w_mean, spread)

    def score(scale: Tensor) -> float:
        wide = scale if spread is None else scale[spread]
        return loss([simulate(w, wide, s, scale_dtype) for w, s in zip(weights, schemes, strict=True)])

    best = torch.ones_like(x_mean)
    identity_loss = best_loss = score(best)
    best_ratio: float | None = None
    for step in range(STEPS):
        scale = _candidate(x_mean, w_mean, step / STEPS)
        value = score(scale)
        if value < best_loss:
            best, best_ratio, best_loss = scale, step / STEPS, value
    return ScaleSearch(best, best_ratio, best_loss, identity_loss)


def _gather_mean(values: Tensor, index: Tensor) -> Tensor:
    """Mean of the values of each index; every index occurs equally often. Not by index_add_, whose sums come out
    differently from run to run on a GPU.
    """
    size = int(index.max()) + 1
    return values[torch.argsort(index, stable=True)].view(size, -1).mean(1)


def absorb_into_norm(weight: Tensor, scale: Tensor, offset: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Divide a norm by `scale` and round it to its stored dtype.

    Norms that multiply by `offset` + weight (1 in Gemma) keep that form. Returns the new weight in `dtype`, and the
    scale that it really amounts to after rounding: multiplied into the linears' inputs, the two cancel.
    """
    gain = weight.float() + offset
    stored = (gain / scale - offset).to(dtype)
    new_gain = stored.float() + offset
    usable = (gain != 0) & (new_gain != 0) & torch.isfinite(new_gain)
    stored = torch.where(usable, stored, weight.to(dtype))
    one = torch.ones_like(gain)
    return stored, torch.where(usable, gain / torch.where(usable, new_gain, one), one)


def repeated_channels(sources: int, inputs: int, head_dim: int) -> Tensor | None:
    """[inputs] int64: the value channel behind every input of the attention output projection.

    Under grouped-query attention each key-value head feeds several consecutive query heads. None where the sizes do not
    allow such a reading.
    """
    if head_dim <= 0 or sources % head_dim or inputs % sources:
        return None
    repeats = inputs // sources
    heads = torch.arange(inputs) // head_dim
    return (heads // repeats) * head_dim + torch.arange(inputs) % head_dim
