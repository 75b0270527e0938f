"""Channel scales in one decoder block: which norm or linear can absorb them, and folding them into it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qtool.quant.algorithms.awq import absorb_into_norm, repeated_channels
from qtool.quant.calibration import Block
from qtool.quant.structure import LinearGroup


@dataclass(frozen=True)
class ScaledBlock:
    """What scaling did to a block.

    Attributes:
        ratios: AWQ's exponent for each kind of group; None: the identity was best. Empty where AWQ did not scale.
        changed: norms and biases that now differ, in their stored dtype, by the name under which they are stored.
        notes: groups that were left as they are, and why.
    """

    ratios: dict[str, float | None]
    changed: dict[str, Tensor]
    notes: list[str]


@dataclass(frozen=True)
class Edge:
    """What produces a group's input: its full name, module, and which of its outputs each input is (None: the same)."""

    name: str
    module: nn.Module
    spread: Tensor | None


def group_layers(block: Block, group: LinearGroup) -> list[str]:
    """Full names of the group's linears in this block."""
    return [f"{block.name}.{member}" for member in group.members]


def absorbing_edge(block: Block, group: LinearGroup, head_dim: int) -> Edge | None:
    """The edge over which `group` can be scaled; None where there is none. `head_dim` is that of attention."""
    if group.source is None:
        return None
    module = block.module.get_submodule(group.source)
    inputs = block.linears[group_layers(block, group)[0]].in_features
    name = f"{block.name}.{group.source}"
    if not isinstance(module, nn.Linear) or module.out_features == inputs:
        return Edge(name, module, None)
    spread = repeated_channels(module.out_features, inputs, head_dim)
    return None if spread is None else Edge(name, module, spread.to(module.weight.device))


def fold(
    edge: Edge,
    scale: Tensor,
    linears: list[nn.Linear],
    norm_offset: float,
    dtype: torch.dtype,
    changed: dict[str, Tensor],
) -> None:
    """Multiply `scale` [channels of the source] into the linears' inputs and divide it out of their source, in place.

    What of the source stays in 16 bits is rounded to `dtype` and put into `changed`.
    """
    source = edge.module
    if isinstance(source, nn.Linear):
        source.weight.data = source.weight.data / scale[:, None]
        if source.bias is not None:
            stored = (source.bias.data / scale).to(dtype)
            source.bias.data = stored.to(source.bias.dtype)
            changed[f"{edge.name}.bias"] = stored
    else:
        weight = source.get_parameter("weight")
        stored, scale = absorb_into_norm(weight.data, scale, norm_offset, dtype)
        weight.data = stored.to(weight.dtype)
        changed[f"{edge.name}.weight"] = stored
    wide = scale if edge.spread is None else scale[edge.spread]
    for linear in linears:
        linear.weight.data = linear.weight.data * wide
