"""GPTQ against the algorithm that it speeds up (OBQ, in float64), and its promises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qtool.quant.algorithms.gptq import gptq
from qtool.quant.algorithms.hessian import Hessian, diagonal_blocks, invert
from qtool.quant.algorithms.rows import row_errors
from qtool.quant.algorithms.rtn import rtn
from qtool.quant.blockwise import Settings, round_weight
from qtool.quant.errors import QtoolError
from qtool.quant.numerics import Grid, find_grid
from qtool.quant.scheme import QuantScheme


def sample(rows: int, cols: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight, and a Hessian of correlated inputs, in float64."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(cols, cols, generator=generator, dtype=torch.float64)
    x = torch.randn(4 * cols, cols, generator=generator, dtype=torch.float64) @ mix
    return torch.randn(rows, cols, generator=generator, dtype=torch.float64), 2 * x.T @ x / len(x)


def optimal_brain_quantization(weight: Tensor, hessian: Tensor, order: list[int], grid: Grid, group: int) -> Tensor:
    """Codes by the textbook: after each column, solve anew for the best change of all columns that are still free."""
    left, codes = weight.clone(), torch.zeros_like(weight)
    free = list(order)
    for column in order:
        scale = grid.scale[:, column // group].double()
        zero = 8.0 if grid.zero is None else grid.zero[:, column // group].double()
        codes[:, column] = (torch.round(left[:, column] / scale) + zero).clamp(0, 15)
        error = (codes[:, column] - zero) * scale - left[:, column]
        left[:, column] += error
        free.remove(column)
        if free:
            solved = torch.linalg.solve(hessian[free][:, free], hessian[free][:, column])
            left[:, free] -= error[:, None] * solved[None]
    return codes


@pytest.mark.parametrize("name", ["w4g8", "w4g8-asym", "w4"])
@pytest.mark.parametrize("act_order", [True, False])
def test_codes_are_those_of_optimal_brain_quantization(name: str, act_order: bool) -> None:
    scheme = QuantScheme.parse(name)
    weight, hessian = sample(6, 24)
    grid = find_grid(weight, scheme, scale_dtype=torch.float16)
    factor = invert(hessian, damping=0.01, act_order=act_order)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(24, dtype=torch.float64)
    group = 24 if scheme.group_size < 0 else scheme.group_size
    expected = optimal_brain_quantization(weight, damped, factor.order.tolist(), grid, group)
    assert torch.equal(gptq(weight, factor, grid, scheme).codes.double(), expected)


@pytest.mark.parametrize("block_size", [1, 3, 8, 17, 64, 4096])
def test_block_size_changes_no_code(block_size: int) -> None:
    scheme = QuantScheme(4, 8, symmetric=False)
    weight, hessian = sample(12, 64, seed=5)
    grid, factor = find_grid(weight, scheme, "mse"), invert(hessian)
    reference = gptq(weight, factor, grid, scheme, block_size=32)
    assert torch.equal(gptq(weight, factor, grid, scheme, block_size=block_size).codes, reference.codes)


def test_independent_inputs_reduce_gptq_to_rounding() -> None:
    scheme = QuantScheme(4, 16)
    weight, _ = sample(8, 32)
    factor = invert(torch.diag(torch.linspace(0.1, 5, 32, dtype=torch.float64)))
    assert torch.equal(gptq(weight, factor, find_grid(weight, scheme), scheme).codes, rtn(weight, scheme).codes)


def test_hessian_is_the_mean_over_all_batches() -> None:
    x = torch.randn(70, 1100, generator=torch.Generator().manual_seed(0))  # wider than one tile
    running = Hessian(1100)
    for part in x.split([1, 32, 0, 37]):
        running.add(part)
    expected = 2 * x.double().T @ x.double() / 70
    torch.testing.assert_close(running.matrix().double(), expected, rtol=1e-4, atol=1e-5)
    blocks = diagonal_blocks(running.matrix(), 100)
    assert torch.equal(blocks[3], running.matrix()[300:400, 300:400])


def test_singular_hessian_raises_damping_and_says_so() -> None:
    row = torch.ones(1, 16)
    assert invert((row.T @ row).float(), damping=0.0).damping > 0
    assert invert(torch.eye(16), damping=0.0).damping == 0.0
    with pytest.raises(QtoolError, match=r"layer q: .*NaN or infinite"):
        invert(torch.full((4, 4), torch.nan), layer="layer q")


def test_dead_inputs_are_rounded_to_nearest_and_disturb_nobody() -> None:
    scheme = QuantScheme(4, 8)
    weight, hessian = sample(4, 16)
    hessian[3], hessian[:, 3] = 0, 0
    factor = invert(hessian)
    assert factor.dead.nonzero().flatten().tolist() == [3]
    assert torch.equal(
        gptq(weight, factor, find_grid(weight, scheme), scheme).codes[:, 3], rtn(weight, scheme).codes[:, 3]
    )


@settings(max_examples=60, deadline=None)
@given(
    method=st.sampled_from(["rtn", "gptq"]),
    name=st.sampled_from(["w4g8", "w4g8-asym", "w4", "w8"]),
    inputs=st.sampled_from(["plain", "few", "dead", "zero", "repeated", "outlier"]),
    exponent=st.integers(-12, 12),
    seed=st.integers(0, 10_000),
)
def test_no_method_is_worse_than_plain_rounding_on_the_calibration_inputs(
    method: str, name: str, inputs: str, exponent: int, seed: int, hard_inputs: Callable[..., torch.Tensor]
) -> None:
    scheme = QuantScheme.parse(name)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 24, generator=generator) * 10.0**exponent
    x = hard_inputs(inputs, 10.0 ** (exponent / 2), generator)
    running = Hessian(24)
    running.add(x)
    hessian = running.matrix()
    factor = invert(hessian) if method == "gptq" else None
    chosen = Settings(method=method, grid="mse", scale_dtype=torch.bfloat16)
    found = round_weight(weight, scheme, hessian, factor, chosen)
    found.weight.check("layer")
    values = found.weight.dequantize()
    assert bool(torch.isfinite(values).all())
    plain = rtn(weight, scheme).dequantize()
    ours, baseline = row_errors(weight - values, hessian), row_errors(weight - plain, hessian)
    assert bool((ours <= baseline * (1 + 1e-6)).all())
    torch.testing.assert_close(found.error, ours, rtol=1e-6, atol=0.0)
