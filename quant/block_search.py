"""The rounding search on one decoder block: what its output should be, how errors of it count, and in what to compute.

The block runs on the inputs that the quantized blocks before it give, and is drawn towards what the 16-bit model has
at this place, so that it also makes up for errors made before it. An error counts relative to the token's norm where
that is above the median, because the next norm divides by it (attention sinks would outweigh all other tokens).
Weighting it by the Fisher metric of the model's answer as well was tried, and won on one block what it lost on another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from qtool.quant.algorithms.rounding import SearchResult, SearchSettings, search_rounding
from qtool.quant.calibration import Block
from qtool.quant.hidden_states import draw
from qtool.quant.weight import QuantizedWeight


class _Runner(nn.Module):
    """Block.run as a module, so that functional_call can put stand-ins in the place of the block's weights."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.module = block.module
        self._run = block.run

    def forward(self, inputs: Tensor) -> Tensor:
        return self._run(inputs)


def _fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device multiplies it faster than float32, else float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def _token_weights(outputs: Sequence[Tensor]) -> Tensor:
    """[n, seq, 1] float32: 1, or median norm / norm for tokens above the median."""
    norms = torch.cat([batch.norm(dim=-1, keepdim=True) for batch in outputs])
    share: Tensor = norms.median() / norms.clamp_min(torch.finfo(norms.dtype).tiny)
    return share.clamp_max(1.0)


def search_block(
    block: Block,
    originals: Mapping[str, Tensor],
    starts: Mapping[str, QuantizedWeight],
    targets: Sequence[Tensor],
    settings: SearchSettings,
) -> SearchResult:
    """Search the rounding of `starts` (full layer name → weight) with the block's output error as objective.

    Args:
        originals: the unrounded [N, K] weights, with channel scales where such were applied.
        targets: [b, seq, hidden] each, the 16-bit model's own hidden states after this block.

    The block's own weights are given up: the search puts stand-ins in their place, and the caller what it found.
    """
    for name in starts:
        weight = block.linears[name].weight
        weight.data = weight.data.new_empty(0)  # one copy of the block less in memory
    token_weights = _token_weights(targets)
    device = token_weights.device
    dtype = _fast_dtype(device)
    runner = _Runner(block)
    prefix = f"{block.name}."

    def loss(stand_ins: dict[str, Tensor], drawn: Tensor) -> Tensor:
        parameters: dict[str, Any] = {f"module.{n.removeprefix(prefix)}.weight": w for n, w in stand_ins.items()}
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            got = functional_call(runner, parameters, (draw(block.inputs, drawn),))
        error = (got.float() - draw(targets, drawn)) * token_weights[drawn.to(device)]
        value: Tensor = error.square().sum() / len(drawn)
        return value

    return search_rounding(originals, starts, loss, len(token_weights), settings, dtype=dtype)
