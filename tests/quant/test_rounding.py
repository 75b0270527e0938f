"""The rounding search against brute force, and its promises."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qtool.quant.algorithms.rounding import SearchSettings, changed_share, search_rounding
from qtool.quant.algorithms.rtn import rtn
from qtool.quant.scheme import QuantScheme
from qtool.quant.weight import QuantizedWeight

BOLD = SearchSettings(iters=300, batch=8, step=0.05, scale_step=0.0, checks=30)


def output_loss(weight: Tensor, x: Tensor) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    """Mean squared error of x Wᵀ over the drawn rows of `x`."""

    def loss(stand_ins: dict[str, Tensor], drawn: Tensor) -> Tensor:
        return ((x[drawn] @ (stand_ins["w"].float() - weight).T).square().sum(-1)).mean()

    return loss


def total(weight: Tensor, x: Tensor, values: Tensor) -> float:
    return float(((x.double() @ (values.double() - weight.double()).T).square().sum(-1)).mean())


def best_of_all(weight: Tensor, x: Tensor, start: QuantizedWeight) -> float:
    """The least error over the four codes around every weight of [1, K], on the start's grid."""
    scale = start.scale.float()  # [1, 1]
    floor = torch.floor(weight / scale)
    ways = torch.tensor(list(itertools.product((-1.0, 0.0, 1.0, 2.0), repeat=weight.shape[1])))
    values = ((floor + ways + 8).clamp(0, 15) - 8) * scale
    return float((x.double() @ (values - weight).double().T).square().mean(0).min())


def test_small_layers_come_close_to_the_best_of_all_roundings() -> None:
    closed = []
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(1, 6, generator=generator)
        x = torch.randn(8, 6, generator=generator) @ torch.randn(6, 6, generator=generator)
        start = rtn(weight, QuantScheme(4))
        found = search_rounding({"w": weight}, {"w": start}, output_loss(weight, x), len(x), BOLD)
        ours, plain = total(weight, x, found.weights["w"].dequantize()), total(weight, x, start.dequantize())
        best = best_of_all(weight, x, start)
        assert torch.equal(found.weights["w"].scale, start.scale)
        assert best * (1 - 1e-5) <= ours <= plain
        assert found.loss == pytest.approx(ours, rel=1e-4)
        assert found.start_loss == pytest.approx(plain, rel=1e-4)
        closed.append((plain - ours) / (plain - best) if plain > best else 1.0)
    assert sum(closed) / len(closed) > 0.7  # of the way from plain rounding to the best


def test_scales_are_learned_where_the_start_has_a_wrong_one() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(4, 16, generator=generator), torch.randn(32, 16, generator=generator)
    good = rtn(weight, QuantScheme(4, 8))
    bad = QuantizedWeight(good.codes, (good.scale.float() * 1.04).to(torch.bfloat16), None, good.scheme)
    steps = SearchSettings(iters=200, batch=32, step=0.0, scale_step=2e-3)
    found = search_rounding({"w": weight}, {"w": bad}, output_loss(weight, x), 32, steps).weights["w"]
    assert found.scale.dtype == torch.bfloat16
    assert changed_share(bad, found) == 0.0
    # least squares over the eight scales, in float64
    columns = [
        torch.stack([x[:, g * 8 : g * 8 + 8].double() @ (row[g * 8 : g * 8 + 8].double() - 8) for g in range(2)], 1)
        for row in good.codes
    ]
    y = x.double() @ weight.double().T
    best = torch.stack([torch.linalg.lstsq(a, y[:, i]).solution for i, a in enumerate(columns)])
    torch.testing.assert_close(found.scale.double(), best, rtol=8e-3, atol=0.0)  # two units of bfloat16


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["w4g8", "w4g8-asym", "w4", "w8"]),
    inputs=st.sampled_from(["plain", "few", "dead", "zero", "repeated", "outlier"]),
    exponent=st.integers(-12, 12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 10_000),
)
def test_never_worse_than_its_start_finite_and_the_same_every_time(
    name: str, inputs: str, exponent: int, dtype: torch.dtype, seed: int, hard_inputs: Callable[..., torch.Tensor]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 24, generator=generator) * 10.0**exponent
    weight[0] = 0
    x = hard_inputs(inputs, 10.0 ** (exponent / 2), generator, samples=24)
    start = rtn(weight, QuantScheme.parse(name))
    steps = SearchSettings(iters=8, batch=4, seed=seed)
    runs = [
        search_rounding({"w": weight}, {"w": start}, output_loss(weight, x), len(x), steps, dtype=dtype)
        for _ in range(2)
    ]
    found = runs[0].weights["w"]
    found.check("layer")
    assert bool(torch.isfinite(found.dequantize()).all())
    assert runs[0].loss <= runs[0].start_loss
    if dtype == torch.float32:
        plain = total(weight, x, start.dequantize())
        assert total(weight, x, found.dequantize()) <= plain * (1 + 1e-5)
    assert torch.equal(found.codes, runs[1].weights["w"].codes)
    assert torch.equal(found.scale, runs[1].weights["w"].scale)


def test_an_overflowing_objective_keeps_the_start() -> None:
    weight, x = torch.full((2, 8), 1e20), torch.full((4, 8), 1e20)
    start = rtn(weight, QuantScheme(4, 8))
    found = search_rounding({"w": weight * 1.01}, {"w": start}, output_loss(weight * 1.01, x), 4, SearchSettings())
    assert torch.equal(found.weights["w"].codes, start.codes)
