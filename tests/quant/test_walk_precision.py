"""A walk that multiplies in 16 bits over float32 states, as on a GPU; on the CPU's own bfloat16 here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qtool.quant.algorithms.awq import _gather_mean
from qtool.quant.algorithms.hessian import InverseFactor, _invert_lower, invert
from qtool.quant.calibration import BlockWalker, compute_dtype
from qtool.quant.channel_scales import _spread
from qtool.quant.checkpoint import Checkpoint

TOKENS = torch.randint(0, 128, (6, 32), generator=torch.Generator().manual_seed(0))


def test_products_are_rounded_and_states_are_not(tiny_llama: Path) -> None:
    outputs, seen = {}, {}
    for compute in (None, torch.bfloat16):
        with Checkpoint(tiny_llama) as checkpoint:
            walker = BlockWalker(checkpoint, TOKENS, compute=compute)
            for block in walker:
                name = "model.layers.0.self_attn.o_proj"
                if block.index == 0:
                    found: list[torch.Tensor] = []
                    block.capture([name], lambda _, x, found=found: found.append(x))  # type: ignore[misc]
                    seen[compute] = torch.cat(found)
            outputs[compute] = torch.cat(list(walker.states))
    assert seen[torch.bfloat16].dtype == torch.bfloat16
    assert seen[torch.bfloat16].shape == (6 * 32, 64)
    assert outputs[torch.bfloat16].dtype == torch.float32
    error = (outputs[torch.bfloat16] - outputs[None]).norm() / outputs[None].norm()
    assert 1e-4 < float(error) < 5e-2  # bfloat16 keeps 8 bits


def test_cpus_and_float32_models_stay_in_float32() -> None:
    assert compute_dtype(torch.bfloat16, torch.device("cpu")) is None
    assert compute_dtype(torch.float32, torch.device("cuda")) is None
    assert compute_dtype(torch.float16, torch.device("cuda")) == torch.float16


@pytest.mark.parametrize("size", [4, 16, 64])
def test_a_consumer_sees_as_many_tokens_whatever_the_batch(size: int) -> None:
    batches = list(torch.randn(64, 512, 1).split(size))  # samples of 512 tokens
    taken = _spread(batches, 2048)
    assert sum(len(batch) for batch in taken) == 4
    assert len(_spread(batches, 1 << 20)) == len(batches)


def test_mean_over_repeated_channels() -> None:
    index = torch.tensor([0, 1, 0, 1, 2, 3, 2, 3])
    assert _gather_mean(torch.arange(8.0), index).tolist() == [1.0, 2.0, 5.0, 6.0]


@pytest.mark.parametrize("size", [1, 7, 511, 1300])
def test_triangular_inverse_and_factor_of_the_inverse(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(2 * size + 5, size, generator=generator, dtype=torch.float64)
    hessian = 2 * x.T @ x / len(x)
    lower = torch.linalg.cholesky(hessian)
    inverse = lower.clone()
    _invert_lower(inverse)
    torch.testing.assert_close(inverse, torch.linalg.inv(lower), rtol=1e-8, atol=1e-8)
    factor: InverseFactor = invert(hessian, damping=0.01)
    damped = hessian / hessian.diagonal().mean() + 0.01 * torch.eye(size, dtype=torch.float64)
    want = torch.linalg.cholesky(torch.linalg.inv(damped[factor.order][:, factor.order]), upper=True)
    torch.testing.assert_close(factor.upper, want, rtol=1e-7, atol=1e-8)
