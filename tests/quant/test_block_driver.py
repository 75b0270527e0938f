"""What the block driver owes for odd inputs: layers that no token reaches, NaN, clipping, states on disk."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtool.quant.algorithms.rounding import SearchSettings
from qtool.quant.algorithms.rtn import rtn
from qtool.quant.blockwise import Settings, quantize_block
from qtool.quant.calibration import Block, BlockWalker
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.hidden_states import HiddenStates, draw
from qtool.quant.numerics import clipped_share, find_grid, quantize
from qtool.quant.scheme import QuantScheme
from qtool.quant.structure import LinearGroup, ModelStructure

W4 = QuantScheme(4, 32)


class Experts(nn.Module):
    """A residual block of two experts and a router that sends every token to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        read = self.norm(x)
        chosen = torch.zeros(read.shape[:-1], dtype=torch.int64)
        y = torch.zeros_like(x)
        for number, expert in enumerate((self.first, self.second)):
            mine = chosen == number
            if bool(mine.any()):
                y = y.masked_scatter(mine[..., None], expert(read[mine]).to(x.dtype))
        return x + y


class NoPositions:
    def arguments(self, block: int, seq_len: int) -> dict[str, Any]:
        return {}


STRUCTURE = ModelStructure(
    model_type="hand-made",
    blocks="blocks",
    num_blocks=1,
    groups=(LinearGroup("first", ("first",), "norm", "first"), LinearGroup("second", ("second",), "norm", "second")),
    embed="",
    norm="",
    head="",
    tied_head=False,
    norm_offset=0.0,
    residual_writers=("first", "second"),
    values="first",
    attention_output="second",
)


def experts_block(inputs: Sequence[Tensor]) -> Block:
    torch.manual_seed(0)
    module = Experts().requires_grad_(False)
    linears = {"blocks.0.first": module.first, "blocks.0.second": module.second}
    return Block(0, "blocks.0", module, linears, inputs, NoPositions())  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["gptq", "awq", "awq+gptq", "rounding"])
def test_a_layer_that_no_token_reaches_is_rounded_to_nearest_and_listed(method: str) -> None:
    inputs = [torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1))]
    block = experts_block(inputs)
    unreached = block.linears["blocks.0.second"].weight.data.clone()
    with torch.no_grad():
        targets = [block.run(x) for x in inputs]
    settings = Settings(method, "mse", torch.bfloat16, head_dim=64, search=SearchSettings(iters=4))
    result = quantize_block(block, STRUCTURE, dict.fromkeys(block.linears, W4), settings, targets)
    plain = rtn(unreached, W4)
    assert torch.equal(result.weights["blocks.0.second"].codes, plain.codes)
    assert torch.equal(result.weights["blocks.0.second"].scale, plain.scale)
    record = result.records["blocks.0.second"]
    assert (record.fallback, record.measured, record.dead_inputs) == ("rtn", "weight", 64)
    assert result.records["blocks.0.first"].fallback is None
    assert result.records["blocks.0.first"].measured == "output"
    assert "blocks.0.second: no calibration token reached them, rounded to nearest" in result.notes


def test_clipping_is_counted() -> None:
    weight = torch.zeros(1, 32)
    weight[0, :4] = torch.tensor([1.0, -1.0, 0.6, 0.1])
    grid = find_grid(weight, W4)  # a step of 1/7.5: codes -8 .. 7 reach from -1.07 to 0.93, and 1.0 rounds to 7.5
    assert clipped_share(weight, quantize(weight, grid, W4)) == 0.0
    narrow = quantize(weight, type(grid)(grid.scale / 2, None), W4)
    assert clipped_share(weight, narrow) == 3 / 32  # 1, -1 and 0.6 lie beyond ±0.53


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, 5, 8, generator=generator) for n in (2, 2, 1)]


@pytest.mark.parametrize("memory", [0, 10**6])
def test_states_on_disk_are_those_in_memory(tmp_path: Path, memory: int) -> None:
    states = HiddenStates(iter(batches()), 5 * 5 * 8 * 4, memory=memory, folder=tmp_path / "cache")
    assert states.on_disk == (memory == 0)
    assert [
        p for p in tmp_path.rglob("*") if p.is_file()
    ] == []  # the file has no name: nothing to clean up after a kill
    assert len(states) == 3
    for got, want in zip(states, batches(), strict=True):
        assert torch.equal(got, want)
    apart, before = states.copy(), states[1]
    states[1] = before + 1
    assert torch.equal(states[1], before + 1)
    assert torch.equal(before, batches()[1])
    assert torch.equal(apart[1], batches()[1])
    want = torch.cat([batches()[0], batches()[1] + 1, batches()[2]])
    assert torch.equal(draw(states, torch.tensor([4, 0, 3])), want[[4, 0, 3]])
    assert [len(b) for b in states[1:]] == [2, 1]


def test_16_bit_states_go_to_disk_bit_for_bit(tmp_path: Path) -> None:
    want = torch.randn(3, 4, 8).to(torch.bfloat16)
    states = HiddenStates([want], want.numel() * 2, memory=0, folder=tmp_path)
    assert torch.equal(states[0], want)
    assert states[0].dtype == torch.bfloat16


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QtoolError, match="activations of the calibration samples do not fit there"):
        HiddenStates(batches(), 1, memory=0, folder=tmp_path / "file")


def test_the_walk_is_the_same_from_disk_and_lets_blocks_go(tiny_llama: Path) -> None:
    tokens = torch.randint(128, (4, 16), generator=torch.Generator().manual_seed(1))
    ends = []
    with Checkpoint(tiny_llama) as checkpoint:
        for limit in (None, 0):
            walker = BlockWalker(checkpoint, tokens, batch_tokens=32, activation_memory=limit)
            assert walker.states.on_disk == (limit == 0)
            blocks = list(walker)
            gc.collect()
            assert all(linear.weight.is_meta for block in blocks for linear in block.linears.values())
            ends.append(torch.cat(list(walker.states)))
    assert torch.equal(*ends)


def test_activations_that_overflow_name_the_block(tiny_llama: Path) -> None:
    with Checkpoint(tiny_llama) as checkpoint:
        walker = BlockWalker(checkpoint, torch.ones(1, 4, dtype=torch.int64))
        blocks = iter(walker)
        next(blocks).linears["model.layers.0.mlp.down_proj"].weight.data.fill_(torch.inf)
        with pytest.raises(QtoolError, match=r"model\.layers\.0: its output on the calibration samples holds"):
            next(blocks)
