"""AWQ's channel scales on one decoder block: gather statistics, search, fold them into their source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qtool.quant.algorithms.awq import search_scale
from qtool.quant.algorithms.hessian import Hessian
from qtool.quant.algorithms.rows import row_errors
from qtool.quant.calibration import Block
from qtool.quant.folding import ScaledBlock, absorbing_edge, fold, group_layers
from qtool.quant.scheme import QuantScheme
from qtool.quant.structure import ModelStructure

LOSS_TOKENS = 2048  # calibration tokens on which the search runs the consumer


class _InputStatistics:
    """Mean |x| per input channel, and the Hessian where the layer itself is the consumer."""

    def __init__(self, features: int, device: torch.device, with_hessian: bool) -> None:
        self._total = torch.zeros(features, device=device)
        self._tokens = 0
        self.hessian = Hessian(features, device) if with_hessian else None

    def add(self, x: Tensor) -> None:
        self._total += x.abs().sum(0, dtype=torch.float32)
        self._tokens += len(x)
        if self.hessian is not None:
            self.hessian.add(x)

    def mean(self) -> Tensor:
        return self._total / max(1, self._tokens)


def _consumer_calls(block: Block, names: set[str]) -> dict[str, list[_Call]]:
    """The calls that the block makes to its modules `names` on a few batches: arguments and outputs."""
    calls: dict[str, list[_Call]] = {name: [] for name in names}

    def hook(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            calls[name].append(_Call(args, kwargs, _first(output)))

        return keep

    handles = [block.module.get_submodule(n).register_forward_hook(hook(n), with_kwargs=True) for n in names]
    try:
        for inputs in _spread(block.inputs, LOSS_TOKENS):
            block.run(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


@dataclass(frozen=True)
class _Call:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor


def _first(output: Any) -> Tensor:
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result


def _spread(batches: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """Batches evenly spaced over all, enough for `tokens`; of large ones, the first samples."""
    samples, seq_len = batches[0].shape[:2]
    count = min(len(batches), -(-tokens // (samples * seq_len)))
    each = min(samples, -(-tokens // (count * seq_len)))
    return [batches[i * len(batches) // count][:each] for i in range(count)]


def _consumer_loss(
    block: Block, consumer: str, linears: list[nn.Linear], calls: list[_Call], stand_ins: list[Tensor]
) -> float:
    """Squared output error of the block's module `consumer` with `stand_ins` for the weights of `linears`."""
    module = block.module.get_submodule(consumer)
    originals = [linear.weight.data for linear in linears]
    try:
        for linear, stand_in in zip(linears, stand_ins, strict=True):
            linear.weight.data = stand_in
        with block.precision():
            outputs = [_first(module(*call.args, **call.kwargs)) for call in calls]
        pairs = zip(outputs, calls, strict=True)
        return sum(float((found.float() - call.output.float()).square().sum()) for found, call in pairs)
    finally:
        for linear, original in zip(linears, originals, strict=True):
            linear.weight.data = original


def scale_channels(
    block: Block,
    structure: ModelStructure,
    schemes: Mapping[str, QuantScheme | None],
    *,
    head_dim: int,
    dtype: torch.dtype,
) -> ScaledBlock:
    """Apply AWQ's channel scales to the block, in place.

    Groups whose source cannot absorb a scale, or of which some member stays in 16 bits, are left as they are, and that
    is noted. `head_dim` is that of attention, for the edge from values to the output projection; `dtype` the 16-bit
    dtype of scales and norms.
    """
    done = ScaledBlock({}, {}, [])
    groups = [g for g in structure.groups if all(schemes[n] is not None for n in group_layers(block, g))]
    statistics: dict[str, _InputStatistics] = {}
    for group in groups:
        linear = block.linears[group_layers(block, group)[0]]
        alone = group.consumer in group.members
        statistics[group_layers(block, group)[0]] = _InputStatistics(linear.in_features, linear.weight.device, alone)
    block.capture(statistics, lambda name, x: statistics[name].add(x))
    calls = _consumer_calls(block, {g.consumer for g in groups if g.consumer not in g.members})

    for group in groups:
        layers = group_layers(block, group)
        linears = [block.linears[name] for name in layers]
        stats = statistics[layers[0]]
        edge = absorbing_edge(block, group, head_dim)
        if edge is None:
            done.notes.append(f"{', '.join(layers)}: nothing before them can absorb channel scales, none applied")
            continue
        weights = [linear.weight.data for linear in linears]
        if stats.hessian is None:
            loss = partial(_consumer_loss, block, group.consumer, linears, calls[group.consumer])
        else:
            loss = partial(_linear_loss, weights[0], stats.hessian.matrix())
        found = search_scale(
            stats.mean(),
            weights,
            [s for s in (schemes[n] for n in layers) if s is not None],
            loss,
            spread=edge.spread,
            scale_dtype=dtype,
        )
        done.ratios[group.kind] = found.ratio
        if found.ratio is not None:
            fold(edge, found.scale, linears, structure.norm_offset, dtype, done.changed)
    return done


def _linear_loss(weight: Tensor, hessian: Tensor, stand_ins: list[Tensor]) -> float:
    return float(row_errors(stand_ins[0] - weight, hessian).sum())
