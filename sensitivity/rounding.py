"""How candidates and plans are rounded while they are measured: to the nearest code, or by GPTQ.

GPTQ is calibrated on the first half of the batches of samples and measured on the rest: on the tokens that it made up
for its errors on, it looks better than it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.quant.algorithms.hessian import Hessian, InverseFactor, invert
from qtool.quant.blockwise import Settings, capture_inputs, quantize_block, round_weight
from qtool.quant.calibration import Block, BlockWalker
from qtool.quant.errors import QtoolError
from qtool.quant.job import scale_dtype
from qtool.quant.numerics import check_finite
from qtool.quant.scheme import QuantScheme
from qtool.quant.structure import ModelStructure
from qtool.sensitivity.candidates import Group, fake_quantize
from qtool.sensitivity.record import check_rounding

BATCH_TOKENS = 1024

Round = Callable[[str, Tensor, QuantScheme], Tensor]
"""Layer, its weight [N, K], scheme → the rounded weight in the weight's dtype."""


@dataclass(frozen=True)
class Rounding:
    """How to round; the default is to nearest, with signed scales.

    Attributes:
        gptq: the quantizer's settings for GPTQ; None: to nearest.
        held: how many of the first batches calibrate it, and are not measured on.
    """

    gptq: Settings | None = None
    held: int = 0


NEAREST = Rounding()


def batch_tokens(tokens: Tensor) -> int:
    """How many tokens of `tokens` [num_sequences, seq_len] to run at a time: BATCH_TOKENS at most, in two halves."""
    halves = -(-tokens.numel() // (2 * BATCH_TOKENS))
    return -(-len(tokens) // (2 * halves)) * tokens.shape[1]


def rounding_for(name: str, walker: BlockWalker) -> Rounding:
    """The rounding of that name for the samples that walk.

    Raises:
        QtoolError: GPTQ with a single sequence, which leaves nothing to measure on.
    """
    check_rounding(name)
    if name == "rtn":
        return NEAREST
    if len(walker.states) < 2:
        raise QtoolError(
            "--rounding gptq calibrates on one half of the sequences and measures on the other: give two or more"
        )
    stored = walker.checkpoint.tensor(
        f"{walker.structure.block_name(0)}.{walker.structure.groups[0].members[0]}.weight"
    )
    settings = Settings(method="gptq", grid="mse", scale_dtype=scale_dtype(stored.dtype))
    return Rounding(settings, len(walker.states) // 2)


def block_rounding(block: Block, groups: Sequence[Group], rounding: Rounding) -> Round:
    """How the groups of `block` are rounded, each by itself; GPTQ takes the Hessians of `block.inputs`, which run
    through the block when a group's turn comes. A group that no token reaches is rounded to nearest.

    The function that is returned raises QtoolError for NaN or infinite activations or weights, and names the layer.
    """
    settings = rounding.gptq
    if settings is None:
        return fake_quantize
    group_of = {member: group for group in groups for member in group.members}
    kept: dict[str, tuple[Tensor, InverseFactor] | None] = {}  # of one group at a time

    def by_gptq(layer: str, weight: Tensor, scheme: QuantScheme) -> Tensor:
        group = group_of[layer]
        if group.name not in kept:
            kept.clear()
            kept[group.name] = _hessian_and_factor(block, group.members[0], settings)
        if (known := kept[group.name]) is None:
            return fake_quantize(layer, weight, scheme)
        check_finite(weight, f"layer {layer}: the weight")
        return round_weight(weight, scheme, *known, settings).weight.dequantize(weight.dtype)

    return by_gptq


def _hessian_and_factor(block: Block, layer: str, settings: Settings) -> tuple[Tensor, InverseFactor] | None:
    """Of the inputs of `layer`; None where no token reaches it."""
    linear = block.linears[layer]
    running = Hessian(linear.in_features, linear.weight.device)
    with torch.no_grad():
        capture_inputs(block, layer, running.add)
    if not running.tokens:
        return None
    hessian = running.matrix()
    check_finite(hessian, f"layer {layer}: the Hessian of its calibration inputs")
    return hessian, invert(hessian, damping=settings.damping, act_order=settings.act_order, layer=f"layer {layer}")


def round_block(
    block: Block, structure: ModelStructure, schemes: Mapping[str, QuantScheme | None], rounding: Rounding
) -> None:
    """Leave the rounded weights in the block; GPTQ goes group by group, each on inputs that the groups before it
    already changed, as the quantizer does.

    Args:
        block: its inputs are those of the quantized model so far.
        schemes: of all its linears.
    """
    if rounding.gptq is not None:
        quantize_block(block, structure, schemes, rounding.gptq)
        return
    for name, linear in block.linears.items():
        if (scheme := schemes[name]) is not None:
            linear.weight.data = fake_quantize(name, linear.weight.data, scheme)
