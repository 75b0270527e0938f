"""GPTQ's Triton kernel against the torch loop: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from qtool.quant.algorithms import gptq_triton
from qtool.quant.algorithms.gptq import finish_block
from qtool.quant.algorithms.hessian import Hessian, invert
from qtool.quant.numerics import find_grid
from qtool.quant.scheme import QuantScheme

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("name", ["w4g16", "w4g16-asym", "w8", "w4"])
@pytest.mark.parametrize(("rows", "start", "stop"), [(40, 0, 64), (5, 64, 96), (33, 17, 50), (32, 3, 4)])
def test_a_block_is_finished_as_by_the_torch_loop(name: str, rows: int, start: int, stop: int) -> None:
    scheme = QuantScheme.parse(name)
    generator = torch.Generator().manual_seed(rows)
    running = Hessian(96)
    running.add(torch.randn(200, 96, generator=generator) @ torch.randn(96, 96, generator=generator))
    factor = invert(running.matrix())
    weight = torch.randn(rows, 96, generator=generator)
    grid = find_grid(weight, scheme, "mse")
    groups = factor.order // (96 // grid.scale.shape[1])
    arguments = [
        weight[:, factor.order].T[start:stop].contiguous(),
        factor.upper[start:stop, start:stop],
        grid.scale.float().T.contiguous(),
        None if grid.zero is None else grid.zero.float().T.contiguous(),
        groups[start:stop],
    ]
    arguments = [None if a is None else a.to(DEVICE) for a in arguments]
    want_codes, codes = (torch.full((stop - start, rows), 255, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    errors = gptq_triton.finish_block(*arguments, codes, float(scheme.midpoint), scheme.max_code)
    want = finish_block(*arguments, want_codes, float(scheme.midpoint), scheme.max_code)
    # equal but for ties: a column whose sum lands half a step from two codes may fall either way, and its row then
    # goes another way; none does for these seeds
    assert torch.equal(codes, want_codes)
    torch.testing.assert_close(errors, want, rtol=1e-4, atol=1e-4)


def test_halves_are_rounded_to_even_and_far_weights_clipped() -> None:
    scheme = QuantScheme(4)
    steps = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 6.5, 7.5, -8.5, 1e30, -1e30, 3e6, 0.0], device=DEVICE)
    one = torch.ones(1, 1, device=DEVICE)
    codes = torch.empty(1, 12, dtype=torch.uint8, device=DEVICE)
    index = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    gptq_triton.finish_block(steps[None], one, torch.ones(1, 12, device=DEVICE), None, index, codes, 8.0, 15)
    assert codes[0].tolist() == [8, 10, 10, 8, 6, 14, 15, 0, 15, 0, 15, 8]
    assert scheme.midpoint == 8
