"""Rounding search: learn which way every weight is rounded, and its group's scale, from the error of what they produce.

Cheng et al. 2023 (AutoRound, arXiv 2309.05516): Q = s·clip(round(W/s + V)), with V and s moved by descent on the output
error of a whole decoder block, through the rounding as if it were not there. Different here: the search goes out from
any quantized weight, GPTQ's above all, and not from plain rounding; and the best of a few checked iterates is judged on
all samples, not on the batch that happened to be drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtool.quant.numerics import storable_scale
from qtool.quant.weight import QuantizedWeight

MARGIN = 0.45  # how far from its code, in steps, a weight may lie at the start: at 0.5 it is about to change
_MOMENTUM, _DECAY = 0.9, 0.95  # of the gradient's mean and of its square

# stand-ins for the weights by name, and sample numbers [b] int64 → mean loss over those samples, a scalar
Loss = Callable[[dict[str, Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class SearchSettings:
    """How long and how boldly to search.

    Attributes:
        iters: descent steps.
        batch: samples drawn for each step.
        step: how far a weight moves in one step, in steps of its grid; falls linearly to zero.
        scale_step: the same for scales, relative to themselves.
        checks: how often the whole objective is measured on the way, evenly spaced; the end is always among them.
        seed: of the order in which samples are drawn.
    """

    iters: int = 50
    batch: int = 4
    step: float = 0.006
    scale_step: float = 3e-3
    checks: int = 2
    seed: int = 0


@dataclass(frozen=True)
class SearchResult:
    """The best weights found, with their objective and that of the start (mean loss over all samples)."""

    weights: dict[str, QuantizedWeight]
    loss: float
    start_loss: float


@dataclass(frozen=True)
class _Latent:
    """One weight under search.

    Attributes:
        value: [N, G, g] float32, the weight in steps of its grid, free to move; rounded, it is the code less the zero.
        factor: [N, G, 1] float32, what the start's scale is multiplied by; free to move.
        scale: [N, G, 1] float32, the start's.
        zero: [N, G, 1] float32.
    """

    value: Tensor
    factor: Tensor
    scale: Tensor
    zero: Tensor
    start: QuantizedWeight

    def stored_scale(self) -> Tensor:
        """[N, G, 1] in the stored dtype."""
        return storable_scale(self.scale * self.factor, self.start.scheme, self.start.scale.dtype)

    def weight(self, dtype: torch.dtype) -> Tensor:
        """[N, K] in `dtype`: what the latent stands for now, with a gradient to value and factor."""
        scheme = self.start.scheme
        result: Tensor = _StraightThrough.apply(  # type: ignore[no-untyped-call]
            self.value, self.factor, self.scale, self.stored_scale().float(), self.zero, scheme.max_code, dtype
        )
        return result

    def quantized(self) -> QuantizedWeight:
        """What would be stored now."""
        codes = (self.value.round() + self.zero).clamp_(0, self.start.scheme.max_code)
        scale = self.stored_scale().squeeze(-1)
        return QuantizedWeight(
            codes.flatten(1).to(torch.uint8), scale, self.start.zero, self.start.scheme, self.start.g_idx
        )


class _StraightThrough(torch.autograd.Function):
    """Round, clip, scale; backward as if there were no rounding, and nothing through a clipped code."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        factor: Tensor,
        scale: Tensor,
        stored: Tensor,
        zero: Tensor,
        max_code: int,
        dtype: torch.dtype,
    ) -> Tensor:
        code = value.round().add_(zero)
        inside = (code >= 0) & (code <= max_code)
        code.clamp_(0, max_code).sub_(zero)
        ctx.save_for_backward(code.to(torch.int8 if max_code < 128 else torch.int16), inside, scale, stored)
        return code.mul_(stored).flatten(1).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        code, inside, scale, stored = ctx.saved_tensors
        grad = grads[0].float().view(code.shape)
        to_factor = (grad * code).sum(-1, keepdim=True).mul_(scale)
        return (grad * stored).mul_(inside), to_factor, None, None, None, None, None


def _latent(weight: Tensor, start: QuantizedWeight) -> _Latent:
    """The point nearest to `weight` [N, K] that rounds to the codes of `start`."""
    shape = (*start.scale.shape, -1)
    scale = start.scale.float().unsqueeze(-1)
    midpoint = torch.full_like(scale, start.scheme.midpoint)
    zero = midpoint if start.zero is None else start.zero.float().unsqueeze(-1)
    code = start.codes.float().view(shape) - zero
    value = torch.clamp(weight.float().view(shape) / scale, code - MARGIN, code + MARGIN)
    return _Latent(value.requires_grad_(), torch.ones_like(scale).requires_grad_(), scale, zero, start)


class _Descent:
    """Adam (Kingma and Ba 2014, arXiv 1412.6980) without weight decay; its steps do not depend on the loss's scale.

    The running means are kept in bfloat16, a variable moves as soon as its gradient is complete, and the gradient is
    let go then: what a block takes in memory is mostly this.
    """

    def __init__(self, variable: Tensor, step: float) -> None:
        self.step = step
        self.iteration, self.share = 0, 1.0  # counted from 1; how much of a full step to take
        self.mean = torch.zeros_like(variable, dtype=torch.bfloat16)
        self.square = torch.zeros_like(self.mean)
        variable.register_post_accumulate_grad_hook(self._move)  # type: ignore[no-untyped-call]

    def _move(self, variable: Tensor) -> None:
        assert variable.grad is not None
        grad, variable.grad = variable.grad, None
        mean = self.mean.float().lerp_(grad, 1 - _MOMENTUM)
        self.mean.copy_(mean)
        square = grad.square_().mul_(1 - _DECAY).add_(self.square, alpha=_DECAY)
        self.square.copy_(square)
        size = square.div_(1 - _DECAY**self.iteration).sqrt_().add_(1e-20)
        variable.addcdiv_(mean, size, value=-self.step * self.share / (1 - _MOMENTUM**self.iteration))


def _mean_loss(weights: dict[str, Tensor], loss: Loss, samples: int, batch: int) -> float:
    """The objective over all samples, in float64."""
    with torch.no_grad():
        parts = torch.split(torch.arange(samples), batch)
        return sum(float(loss(weights, part).double()) * len(part) for part in parts) / samples


def search_rounding(
    weights: Mapping[str, Tensor],
    starts: Mapping[str, QuantizedWeight],
    loss: Loss,
    samples: int,
    settings: SearchSettings,
    *,
    dtype: torch.dtype = torch.float32,
) -> SearchResult:
    """Search codes and scales of several weights together, such that `loss` falls; never worse than the start.

    The same arguments give the same result on the same machine. Zero points stay as they are.

    Args:
        weights: name → [N, K] original weight, finite.
        starts: name → a quantized weight to start from, without g_idx.
        loss: see Loss; differentiable in the stand-ins, which come in `dtype`.
        samples: how many samples there are to draw from.
        dtype: float32, or bfloat16 where matrix products are faster in it; what is stored does not depend on it.
    """
    latents = {name: _latent(weights[name], start) for name, start in starts.items()}
    best = dict(starts)
    start_loss = best_loss = _mean_loss(
        {n: w.dequantize(dtype) for n, w in best.items()}, loss, samples, settings.batch
    )
    if not 0 < start_loss < float("inf"):
        return SearchResult(best, start_loss, start_loss)
    free = [part for latent in latents.values() for part in (latent.value, latent.factor)]
    descents = [_Descent(v, s) for v, s in zip(free, [settings.step, settings.scale_step] * len(latents), strict=True)]
    generator = torch.Generator().manual_seed(settings.seed)
    batch = min(settings.batch, samples)
    order = torch.empty(0, dtype=torch.int64)
    checked = {settings.iters * (i + 1) // settings.checks for i in range(settings.checks)}
    for iteration in range(1, settings.iters + 1):
        if len(order) < batch:
            order = torch.randperm(samples, generator=generator)
        drawn, order = order[:batch], order[batch:]
        value = loss({name: latent.weight(dtype) for name, latent in latents.items()}, drawn)
        for descent in descents:
            descent.iteration, descent.share = iteration, 1 - (iteration - 1) / settings.iters
        torch.autograd.backward(value / start_loss)  # the variables move in it
        del value
        if iteration in checked:
            with torch.no_grad():
                found = {name: latent.quantized() for name, latent in latents.items()}
            reached = _mean_loss({n: w.dequantize(dtype) for n, w in found.items()}, loss, samples, batch)
            if reached < best_loss:
                best, best_loss = found, reached
    return SearchResult(best, best_loss, start_loss)


def changed_share(before: QuantizedWeight, after: QuantizedWeight) -> float:
    """Share of codes that differ."""
    return float((before.codes != after.codes).double().mean())
