"""AWQ's scales: the identity is in the grid, folding changes no float output, grouped-query attention is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qtool.quant.algorithms.awq import absorb_into_norm, repeated_channels, search_scale
from qtool.quant.calibration import BlockWalker
from qtool.quant.channel_scales import scale_channels
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.scheme import QuantScheme
from qtool.quant.structure import linear_shapes, structure_of


def test_search_beats_the_identity_where_some_channels_are_heavy() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(32, 64, generator=generator), torch.randn(512, 64, generator=generator)
    x[:, :3] *= 30
    scheme = QuantScheme(4, 32)

    def loss(stand_ins: list[torch.Tensor]) -> float:
        return float((x @ (stand_ins[0] - weight).T).square().sum())

    found = search_scale(x.abs().mean(0), [weight], [scheme], loss)
    assert found.loss < 0.5 * found.identity_loss
    assert found.ratio is not None
    assert float(found.scale[:3].min()) > float(found.scale[3:].max())


def test_search_keeps_the_identity_where_nothing_is_better() -> None:
    # the loss punishes every departure from plain rounding
    generator = torch.Generator().manual_seed(0)
    weight, x_mean = torch.randn(8, 32, generator=generator), torch.rand(32, generator=generator)
    first: list[torch.Tensor] = []

    def loss(stand_ins: list[torch.Tensor]) -> float:
        first.append(stand_ins[0])
        return float((stand_ins[0] - first[0]).square().sum())

    found = search_scale(x_mean, [weight], [QuantScheme(4, 32)], loss)
    assert found.ratio is None
    assert bool((found.scale == 1).all())


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_and_linear_cancel_after_rounding(offset: float) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = torch.randn(64, generator=generator).to(torch.bfloat16)
    scale = torch.exp(torch.randn(64, generator=generator))
    stored, effective = absorb_into_norm(norm, scale, offset, torch.bfloat16)
    torch.testing.assert_close((stored.float() + offset) * effective, norm.float() + offset, rtol=1e-6, atol=1e-7)
    if offset == 0:
        torch.testing.assert_close(effective, scale, rtol=2**-7, atol=0.0)  # but for one bf16 rounding


def test_repeated_channels_are_those_of_repeat_kv() -> None:
    from transformers.models.llama.modeling_llama import repeat_kv

    values = torch.arange(2 * 8).reshape(1, 2, 1, 8)  # [batch, kv heads, seq, head_dim]
    expected = repeat_kv(values, 3).transpose(1, 2).flatten()
    found = repeated_channels(16, 48, 8)
    assert found is not None
    assert torch.equal(found, expected)
    assert repeated_channels(16, 40, 8) is None


def test_scaling_a_block_changes_no_float_output(tiny_llama: Path) -> None:
    tokens = torch.randint(0, 128, (4, 32), generator=torch.Generator().manual_seed(0))
    with Checkpoint(tiny_llama) as checkpoint:
        structure = structure_of(checkpoint.config)
        plan = dict.fromkeys(linear_shapes(checkpoint), QuantScheme(4, 32))
        for block in BlockWalker(checkpoint, tokens):
            before = block.run(block.inputs[0])
            weights = {name: linear.weight.data.clone() for name, linear in block.linears.items()}
            done = scale_channels(block, structure, plan, head_dim=16, dtype=torch.bfloat16)
            torch.testing.assert_close(block.run(block.inputs[0]), before, rtol=1e-4, atol=1e-4)
            assert set(done.ratios) == {"qkv", "o", "gate_up", "down"}
            assert any(r is not None for r in done.ratios.values())
            assert any(not torch.equal(block.linears[n].weight, w) for n, w in weights.items())
