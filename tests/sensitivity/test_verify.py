"""Joint measurements and expansions against the whole model in transformers; the correction against closed forms."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from qtool.quant.algorithms.rtn import rtn
from qtool.quant.calibration import CalibrationSet
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.scheme import QuantPlan, scheme_name
from qtool.sensitivity.allocate import Keep, Limits, allocate, describe, greedy
from qtool.sensitivity.frontier import frontier
from qtool.sensitivity.probe import analyze
from qtool.sensitivity.record import Sensitivity
from qtool.sensitivity.verify import check, correct_curve, fit_correction, joint_kl, misses

CPU = torch.device("cpu")
SCHEMES = ("fp16", "w8", "w4g32")
TOKENS = torch.randint(1, 257, (6, 40), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def folder(tiny_model: Any) -> Path:
    made: Path = tiny_model("llama")
    return made


@pytest.fixture(scope="module")
def found(folder: Path) -> Sensitivity:
    calibration = CalibrationSet(TOKENS, "random tokens", "c" * 64)
    return analyze(folder, schemes=SCHEMES, metric="fisher", calibration=calibration, device="cpu")


@torch.no_grad()
def whole_kl(folder: Path, plan: QuantPlan) -> float:
    """KL of the whole model in float64, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    log_p = model(TOKENS).logits.log_softmax(-1)
    for name, scheme in plan.layers.items():
        if scheme is not None:
            weight = model.get_submodule(name).weight
            weight.copy_(rtn(weight.float(), scheme, search="signed").dequantize())
    log_q = model(TOKENS).logits.log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def test_joint_kl_is_that_of_the_whole_model(folder: Path, found: Sensitivity) -> None:
    names = [["fp16"] * 8, ["w8"] * 8, ["w4g32"] * 8, ["w8", "w4g32", "fp16", "w4g32"] * 2]
    plans = [describe(found, n).plan for n in names]
    with Checkpoint(folder) as checkpoint:
        got = joint_kl(checkpoint, TOKENS, plans, device=CPU)
    assert got[0] == 0
    for plan, kl in zip(plans[1:], got[1:], strict=True):
        assert kl == pytest.approx(whole_kl(folder, plan), rel=1e-3, abs=1e-7)


def test_a_power_law_is_found_again() -> None:
    points = [(d, 1.3 * d**1.1) for d in (0.01, 0.03, 0.1, 0.3)]
    got = fit_correction(points)
    assert (got.scale, got.exponent) == pytest.approx((1.3, 1.1))
    assert got.kl(0.05) == pytest.approx(1.3 * 0.05**1.1)
    assert got.damage(got.kl(0.07)) == pytest.approx(0.07)
    assert got.kl(0.0) == 0.0


@pytest.mark.parametrize(
    ("points", "scale", "exponent"),
    [
        ([], 1, 1),
        ([(0.0, 0.0)], 1, 1),
        ([(0.2, 0.3)], 1.5, 1),  # a scale alone
        ([(0.2, 0.3), (0.2, 0.3)], 1.5, 1),
        ([(0.1, 0.2), (0.2, 0.1)], 1, 1),  # falling: noise
    ],
)
def test_what_points_do_not_determine_stays_one(
    points: list[tuple[float, float]], scale: float, exponent: float
) -> None:
    got = fit_correction(points)
    assert (got.scale, got.exponent) == pytest.approx((scale, exponent))


def law(found: Sensitivity, measured: list[QuantPlan]) -> Any:
    """A measurement that follows 1.4 · damage^1.2 exactly, and notes what was measured."""

    def measure(plans: Any) -> list[float]:
        measured.extend(plans)
        names = [[scheme_name(p[g.members[0]]) for g in found.groups] for p in plans]
        return [float(1.4 * describe(found, n).damage ** 1.2) for n in names]

    return measure


def test_a_prediction_that_misses_is_corrected(found: Sensitivity) -> None:
    measured: list[QuantPlan] = []
    got = check(found, Limits(avg_bits=6), law(found, measured))
    assert got.allocation == allocate(found, Limits(avg_bits=6))
    assert misses(got.allocation.damage, got.measured)
    assert got.predicted == pytest.approx(got.measured, rel=1e-6)
    assert got.allocation.damage not in [d for d, _ in got.correction.points]  # it was predicted, not fitted
    assert len(measured) == len(got.measurements) == 1 + len(got.correction.points)


def test_the_greedy_plan_is_taken_where_it_measures_less(found: Sensitivity) -> None:
    budgets = [Limits(avg_bits=4.6 + 0.1 * i) for i in range(80)]
    limits = next(b for b in budgets if greedy(found, b).plan != allocate(found, b).plan)
    rule = greedy(found, limits)

    def measure(plans: Any) -> list[float]:
        names = [[scheme_name(p[g.members[0]]) for g in found.groups] for p in plans]
        sums = [describe(found, n).damage for n in names]
        return [0.5 * s if p == rule.plan else s for s, p in zip(sums, plans, strict=True)]

    got = check(found, limits, measure)
    assert got.allocation == rule
    assert got.measured == pytest.approx(0.5 * rule.damage)


def test_a_prediction_that_holds_is_left_alone(found: Sensitivity) -> None:
    got = check(found, Limits(avg_bits=6), lambda plans: [1.05 * allocate(found, Limits(avg_bits=6)).damage])
    assert not got.correction.points
    assert got.predicted == got.allocation.damage


def test_max_kl_is_solved_again_under_the_corrected_limit(found: Sensitivity) -> None:
    damages = sorted(p.damage for p in frontier(found) if p.damage > 0)
    goal = 1.4 * damages[len(damages) // 2] ** 1.2 * 1.001
    got = check(found, Limits(max_damage=goal), law(found, []))
    want = allocate(found, Limits(max_damage=(goal / 1.4) ** (1 / 1.2)))
    assert got.allocation == want
    assert got.measured <= goal
    assert got.predicted == pytest.approx(got.measured, rel=1e-6)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_max_kl_may_be_less_than_the_least_sum(found: Sensitivity, share: float) -> None:
    """Sums that overshoot ten times: what measures within the limit is found all the same."""
    keep = [Keep("layers.0", "w4g32")]
    least = allocate(found, Limits(max_bytes=1 << 30), keep=keep).damage
    goal = share * least

    def measure(plans: Any) -> list[float]:
        return [0.1 * describe(found, [scheme_name(p[g.members[0]]) for g in found.groups]).damage for p in plans]

    got = check(found, Limits(max_damage=goal), measure, keep=keep)
    assert got.measured <= goal
    assert got.allocation.linear_bytes == allocate(found, Limits(max_damage=10 * goal), keep=keep).linear_bytes
    assert got.predicted == pytest.approx(got.measured)


@pytest.mark.parametrize("seed", range(6))
def test_a_noisy_measurement_is_kept_within_max_kl(found: Sensitivity, seed: int) -> None:
    """Up to 1.5 times off the law: the plan measures within the limit, as do the other limits hold."""

    def measure(plans: Any) -> list[float]:
        names = [[scheme_name(p[g.members[0]]) for g in found.groups] for p in plans]
        noise = [math.exp(random.Random(f"{seed} {n}").uniform(-0.4, 0.4)) for n in names]
        return [float(1.4 * describe(found, n).damage ** 1.2) * e for n, e in zip(names, noise, strict=True)]

    damages = sorted(p.damage for p in frontier(found) if p.damage > 0)
    goal = 1.4 * damages[len(damages) // 2] ** 1.2
    got = check(found, Limits(max_damage=goal, avg_bits=24.0), measure)
    assert got.measured == measure([got.allocation.plan])[0] <= goal
    assert got.allocation.average_bits <= 24


def test_a_max_kl_that_nothing_measures_within_is_refused(found: Sensitivity) -> None:
    with pytest.raises(QtoolError, match=r"--max-kl 0.5: no plan measures within it, the most precise one has 0.7"):
        check(found, Limits(max_damage=0.5), lambda plans: [0.7] * len(plans))


def test_plans_of_one_sum_keep_measurements_of_their_own(found: Sensitivity) -> None:
    alike = replace(found, groups=tuple(replace(g, damage={"w8": 0.01, "w4g32": 0.1}) for g in found.groups))
    budgets = [Limits(avg_bits=4.6 + 0.05 * i) for i in range(70)]
    limits = next(b for b in budgets if greedy(alike, b).plan != allocate(alike, b).plan)
    exact, rule = allocate(alike, limits), greedy(alike, limits)
    assert exact.damage == rule.damage
    for better in (exact, rule):
        got = check(alike, limits, lambda plans, p=better.plan: [0.1 if q == p else 0.2 for q in plans])
        assert got.allocation == better
        assert got.measured == 0.1


def test_the_frontier_is_exact_ascending_and_corrected(found: Sensitivity) -> None:
    curve = frontier(found, points=9)
    assert len(curve) >= 3
    sizes = [p.linear_bytes for p in curve]
    damages = [p.damage for p in curve]
    assert sizes == sorted(sizes)
    assert damages == sorted(damages, reverse=True)
    assert sizes[0] == describe(found, ["w4g32"] * 8).linear_bytes
    assert damages[-1] == 0  # 16 bits everywhere
    for plan in curve:
        assert plan == allocate(found, Limits(max_bytes=plan.total_bytes))
    correction = correct_curve(curve, law(found, []))
    assert (correction.scale, correction.exponent) == pytest.approx((1.4, 1.2))
    assert correction.points[0][0] == damages[0]


def test_the_frontier_of_time(found: Sensitivity) -> None:
    latency = {g.name: {"fp16": 4.0, "w8": 3.0, "w4g32": 1.0} for g in found.groups}
    curve = frontier(found, latency=latency, points=7)
    times = [p.latency_ms or 0.0 for p in curve]
    assert times == sorted(times)
    assert (times[0], times[-1]) == (8.0, 32.0)
    assert curve[-1].damage == 0


def test_the_frontier_of_times_between_nanoseconds(found: Sensitivity) -> None:
    latency = {g.name: {"fp16": 0.4000001, "w8": 0.2000003, "w4g32": 0.1000007} for g in found.groups}
    curve = frontier(found, latency=latency, points=7)
    assert curve[0].latency_ms == pytest.approx(8 * 0.1000007)
    assert curve[-1].damage == 0
