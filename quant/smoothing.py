"""SmoothQuant on one decoder block: the largest activation of each channel, scales, folded into norms."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from qtool.quant.algorithms.smoothquant import smoothing_scale
from qtool.quant.calibration import Block
from qtool.quant.folding import ScaledBlock, absorbing_edge, fold, group_layers
from qtool.quant.scheme import QuantScheme
from qtool.quant.structure import ModelStructure


def smooth_channels(
    block: Block,
    structure: ModelStructure,
    schemes: Mapping[str, QuantScheme | None],
    *,
    alpha: float,
    head_dim: int,
    dtype: torch.dtype,
) -> ScaledBlock:
    """Apply SmoothQuant's scales to the block, in place: to the groups that a norm feeds and whose scheme quantizes
    activations.

    `dtype` is the 16-bit dtype of norms, `head_dim` that of attention.
    """
    done = ScaledBlock({}, {}, [])
    edges = {}
    for group in structure.groups:
        layers = group_layers(block, group)
        edge = absorbing_edge(block, group, head_dim)
        if edge is None or isinstance(edge.module, nn.Linear):
            continue
        if all((scheme := schemes[name]) is not None and scheme.act_bits for name in layers):
            edges[layers[0]] = (edge, [block.linears[name] for name in layers])
    largest = {
        name: torch.zeros(linears[0].in_features, device=linears[0].weight.device)
        for name, (_, linears) in edges.items()
    }

    def observe(name: str, x: Tensor) -> None:
        largest[name] = torch.maximum(largest[name], x.abs().amax(0).float())

    block.capture(edges, observe)
    for name, (edge, linears) in edges.items():
        scale = smoothing_scale(largest[name], [linear.weight.data for linear in linears], alpha)
        fold(edge, scale, linears, structure.norm_offset, dtype, done.changed)
    return done
