"""The allocator against brute force, and what it refuses."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.quant.errors import QtoolError
from qtool.quant.scheme import QuantScheme, scheme_name
from qtool.sensitivity.allocate import Keep, Latency, Limits, allocate, greedy, uniform_allocations
from qtool.sensitivity.record import GroupSensitivity, Sensitivity

SCHEMES = ("fp16", "w8", "w4g128", "w4g64", "w4g32")
OTHER = 1000


def make(damages: list[dict[str, float]], shapes: list[tuple[int, int]]) -> Sensitivity:
    """One group a block: q,k,v of the given shape, tied."""
    groups = []
    layers = {}
    for i, (damage, shape) in enumerate(zip(damages, shapes, strict=True)):
        members = tuple(f"model.layers.{i}.self_attn.{p}_proj" for p in "qkv")
        layers.update(dict.fromkeys(members, shape))
        groups.append(GroupSensitivity(f"model.layers.{i}.qkv", i, "qkv", members, damage))
    return Sensitivity("m", "f" * 64, "kl", "rtn", {}, 4.0, layers, {n: {} for n in layers}, 2, OTHER, tuple(groups))


def brute_force(
    sensitivity: Sensitivity,
    *,
    size: float = math.inf,
    latency: Latency | None = None,
    milliseconds: float = math.inf,
    damage: float = math.inf,
) -> tuple[float, int]:
    """(least damage, least bytes) over every combination within all limits."""
    sums = np.zeros((3, 1))  # of bytes, milliseconds and damage; every sum so far with every option of each next group
    for group in sensitivity.groups:
        options = np.array(
            [
                [sensitivity.group_bytes(group, name) for name in group.damage],
                [latency[group.name][name] if latency else 0.0 for name in group.damage],
                list(group.damage.values()),
            ]
        )
        sums = (sums[:, :, None] + options[:, None, :]).reshape(3, -1)
    sums = sums[:, (sums <= np.array([[size], [milliseconds], [damage]])).all(0)]
    return float(sums[2].min()), int(sums[0].min())


@st.composite
def problems(draw: Any) -> tuple[Sensitivity, float]:
    damages, shapes = [], []
    for _ in range(6):
        candidates = draw(st.permutations(SCHEMES))[:4]
        values = draw(st.lists(st.floats(0, 1) | st.floats(1e-9, 1e-4), min_size=4, max_size=4))
        damages.append(dict(zip(candidates, values)) | ({"fp16": 0.0} if "fp16" in candidates else {}))
        shapes.append((draw(st.sampled_from([8, 24, 64, 200])), draw(st.sampled_from([128, 256, 640]))))
    return make(damages, shapes), draw(st.floats(0, 1))


def size_range(sensitivity: Sensitivity) -> tuple[int, int]:
    sizes = [[sensitivity.group_bytes(g, n) for n in g.damage] for g in sensitivity.groups]
    return sum(map(min, sizes)), sum(map(max, sizes))


@settings(max_examples=30, deadline=None)
@given(problems())
def test_equals_brute_force_under_max_bytes(problem: tuple[Sensitivity, float]) -> None:
    sensitivity, share = problem
    low, high = size_range(sensitivity)
    budget = int(low + share * (high - low))
    got = allocate(sensitivity, Limits(max_bytes=budget + OTHER))
    assert got.linear_bytes <= budget
    assert got.total_bytes == got.linear_bytes + OTHER
    assert got.damage == pytest.approx(brute_force(sensitivity, size=budget)[0], rel=1e-9, abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(problems())
def test_equals_brute_force_under_avg_bits(problem: tuple[Sensitivity, float]) -> None:
    sensitivity, share = problem
    low, high = size_range(sensitivity)
    weights = sum(r * c for r, c in sensitivity.shapes.values())
    bits = 8 * (low + share * (high - low)) / weights + 1e-9
    got = allocate(sensitivity, Limits(avg_bits=bits))
    assert got.average_bits <= bits
    assert got.average_bits == pytest.approx(8 * got.linear_bytes / weights)
    assert got.damage == pytest.approx(brute_force(sensitivity, size=int(bits * weights / 8))[0], rel=1e-9, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(problems())
def test_the_greedy_rule_fits_and_is_never_better(problem: tuple[Sensitivity, float]) -> None:
    sensitivity, share = problem
    low, high = size_range(sensitivity)
    limits = Limits(max_bytes=int(low + share * (high - low)) + OTHER)
    rule = greedy(sensitivity, limits)
    assert rule.total_bytes <= (limits.max_bytes or 0)
    assert allocate(sensitivity, limits).damage <= rule.damage * (1 + 1e-9) + 1e-12
    with pytest.raises(QtoolError, match="greedy rule knows budgets of size alone"):
        greedy(sensitivity, Limits(max_damage=1.0))


@st.composite
def times(draw: Any, sensitivity: Sensitivity) -> Latency:
    """Any time for any option: not always the smaller scheme is the faster one."""
    return {
        g.name: {name: draw(st.integers(1, 2000)) / 1e6 for name in g.damage}  # whole nanoseconds, in ms
        for g in sensitivity.groups
    }


@settings(max_examples=30, deadline=None)
@given(problems(), st.data())
def test_equals_brute_force_under_max_latency(problem: tuple[Sensitivity, float], data: st.DataObject) -> None:
    sensitivity, share = problem
    latency = data.draw(times(sensitivity))
    fastest, slowest = (sum(pick(of_group.values()) for of_group in latency.values()) for pick in (min, max))
    # between two whole nanoseconds, so that rounding decides nothing
    limit = (math.floor(1e6 * (fastest + share * (slowest - fastest)) + 1e-3) + 0.5) / 1e6
    got = allocate(sensitivity, Limits(max_latency_ms=limit), latency=latency)
    assert got.latency_ms is not None
    assert got.latency_ms <= limit
    want, _ = brute_force(sensitivity, latency=latency, milliseconds=limit)
    assert got.damage == pytest.approx(want, rel=1e-9, abs=1e-12)


def test_a_limit_of_just_what_the_least_takes_is_kept() -> None:
    """Whole nanoseconds, whatever a product of floats makes of them: 1e6 * 0.000123 > 123, 1e6 * 0.000249 < 249."""
    sensitivity = make([{"w8": 0.0, "w4g128": 1.0}] * 2, [(8, 128)] * 2)
    for nanoseconds in (123, 246, 249, 251):
        of_group = {"w8": 1.0, "w4g128": nanoseconds / 1e6}
        latency = {g.name: dict(of_group) for g in sensitivity.groups}
        got = allocate(sensitivity, Limits(max_latency_ms=2 * nanoseconds / 1e6), latency=latency)
        assert got.damage == 2.0


@settings(max_examples=30, deadline=None)
@given(problems())
def test_equals_brute_force_under_max_kl(problem: tuple[Sensitivity, float]) -> None:
    sensitivity, share = problem
    low, high = (sum(pick(g.damage.values()) for g in sensitivity.groups) for pick in (min, max))
    limit = (low + share * (high - low)) * (1 + 1e-6) + 1e-12
    got = allocate(sensitivity, Limits(max_damage=limit))
    assert got.damage <= limit * (1 + 1e-9)
    _, fewest = brute_force(sensitivity, damage=limit)
    assert got.linear_bytes == fewest
    assert got.damage == pytest.approx(brute_force(sensitivity, size=fewest)[0], rel=1e-9, abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(problems(), st.data())
def test_equals_brute_force_under_all_limits(problem: tuple[Sensitivity, float], data: st.DataObject) -> None:
    sensitivity, share = problem
    latency = data.draw(times(sensitivity))
    low, high = size_range(sensitivity)
    size = int(low + share * (high - low))
    slowest = sum(max(of_group.values()) for of_group in latency.values())
    milliseconds = (math.floor(1e6 * data.draw(st.floats(0.4, 1)) * slowest) + 0.5) / 1e6
    limits = Limits(max_bytes=size + OTHER, max_latency_ms=milliseconds)
    try:
        want, _ = brute_force(sensitivity, size=size, latency=latency, milliseconds=milliseconds)
    except ValueError:  # no combination keeps both
        with pytest.raises(QtoolError, match="the least possible"):
            allocate(sensitivity, limits, latency=latency)
        return
    got = allocate(sensitivity, limits, latency=latency)
    assert got.linear_bytes <= size
    assert got.damage == pytest.approx(want, rel=1e-9, abs=1e-12)


def ladder(blocks: int = 4) -> Sensitivity:
    damages = [{"fp16": 0.0, "w8": 0.01 * (i + 1), "w4g64": 1.0 * (i + 1)} for i in range(blocks)]
    return make(damages, [(64, 128)] * blocks)


LADDER_TIMES: Latency = {f"model.layers.{i}.qkv": {"fp16": 0.04, "w8": 0.02, "w4g64": 0.01} for i in range(4)}


def test_the_most_sensitive_layer_stays_in_int8_and_groups_are_tied() -> None:
    plan = allocate(ladder(), Limits(avg_bits=5.25)).plan  # room for one group of four above 4.25
    names = {layer: scheme_name(scheme) for layer, scheme in plan.layers.items()}
    assert {n for layer, n in names.items() if "layers.3" in layer} == {"w8"}
    assert {n for layer, n in names.items() if "layers.3" not in layer} == {"w4g64"}


def test_both_limits_hold() -> None:
    sensitivity = ladder()
    weights = sum(r * c for r, c in sensitivity.shapes.values())
    loose = allocate(sensitivity, Limits(avg_bits=8.5)).linear_bytes
    got = allocate(sensitivity, Limits(avg_bits=8.5, max_bytes=int(weights * 6 / 8) + OTHER))
    assert got.linear_bytes <= weights * 6 // 8 < loose


def test_keep_fixes_whole_groups() -> None:
    sensitivity = ladder()
    got = allocate(
        sensitivity, Limits(avg_bits=9), keep=[Keep.parse(r"layers\.0\..*k_proj"), Keep.parse("layers.1=w8")]
    )
    assert got.plan["model.layers.0.self_attn.q_proj"] is None
    assert got.plan["model.layers.1.self_attn.v_proj"] == QuantScheme(8)


def test_same_inputs_same_plan() -> None:
    sensitivity = make([{"fp16": 0.0, "w8": 0.1, "w4g64": 0.5}] * 6, [(64, 128)] * 6)  # every tie there is
    plans = {allocate(sensitivity, Limits(avg_bits=bits)).plan.to_json() for bits in (6.0, 6.0, 6.0)}
    assert len(plans) == 1


def test_uniform_plans_to_beat() -> None:
    uniform = uniform_allocations(ladder())
    assert set(uniform) == {"fp16", "w8", "w4g64"}
    assert uniform["w4g64"].damage == pytest.approx(10.0)
    assert uniform["w4g64"].average_bits == pytest.approx(4.25)
    assert uniform["fp16"].linear_bytes == 2 * 4 * 3 * 64 * 128


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no budget: give --avg-bits, --max-bytes, --max-latency-ms or --max-kl"),
        ({"avg_bits": -1.0}, "--avg-bits -1.0: give a number above 0"),
        ({"max_damage": float("nan")}, "--max-kl nan: give a number above 0"),
        ({"max_latency_ms": 0.02}, r"--max-latency-ms 0.02: the least possible .* is 0.04 ms"),
        ({"max_damage": 0.05, "keep": [Keep("q_proj", "w8")]}, r"--max-kl 0.05: the least possible .* is 0.1"),
        (
            {"max_damage": 0.05, "avg_bits": 8.5},
            r"--max-kl 0.05: the least possible .* under --avg-bits 8.5 is 0.1$",
        ),
        (
            {"max_damage": 0.2, "max_latency_ms": 0.05},
            r"--max-kl 0.2: the least possible .* under --max-latency-ms 0.05 is 6.04",
        ),
        ({"avg_bits": 4.0}, r"--avg-bits 4: the least possible with the schemes measured is 4.25 bits"),
        ({"avg_bits": 5.0, "keep": [Keep("q_proj")]}, "the least possible with these --keep wishes is 16 bits"),
        ({"max_bytes": 900}, r"--max-bytes 900: the least possible .* is 53224 bytes .* of which 1000 are"),
        ({"avg_bits": 5.0, "keep": [Keep("lm_head")]}, "matches none of the 12 layers"),
        ({"avg_bits": 9.0, "keep": [Keep("q_proj"), Keep("k_proj", "w8")]}, "wants fp16 for model.layers.0.qkv, .* w8"),
        ({"avg_bits": 9.0, "keep": [Keep("q_proj", "w4g32")]}, "w4g32 was not measured for model.layers.0.qkv"),
    ],
)
def test_impossible_wishes_are_refused(options: dict[str, Any], message: str) -> None:
    keep = options.pop("keep", [])
    with pytest.raises(QtoolError, match=message):
        allocate(ladder(), Limits(**options), keep=keep, latency=LADDER_TIMES)


def test_the_least_possible_is_possible() -> None:
    with pytest.raises(QtoolError) as refusal:
        allocate(ladder(), Limits(max_bytes=900))
    least = int(re.findall(r"is (\d+) bytes", str(refusal.value))[0])
    assert allocate(ladder(), Limits(max_bytes=least)).total_bytes == least


def test_latency_without_times_is_refused() -> None:
    with pytest.raises(QtoolError, match="needs the kernels' times"):
        allocate(ladder(), Limits(max_latency_ms=1.0))


def test_the_least_kl_is_that_of_the_plan_with_the_best_schemes() -> None:
    assert allocate(ladder(), Limits(max_damage=1e-9)).linear_bytes == 2 * 4 * 3 * 64 * 128  # all in 16 bits


def test_broken_keep_is_refused() -> None:
    with pytest.raises(QtoolError, match="not a regular expression"):
        Keep.parse("layers.(0")
    with pytest.raises(QtoolError, match="unknown scheme 'w9z'"):
        Keep.parse("layers.0=w9z")
    with pytest.raises(QtoolError, match="--keep 'o=w5': 5 bits per weight"):
        Keep.parse("o=w5")
    for repeated in ("a{99999999999}", "(" * 5000 + ")" * 5000):
        with pytest.raises(QtoolError, match="not a regular expression"):
            Keep.parse(repeated)
    for empty in ("", "=w8"):
        with pytest.raises(QtoolError, match="write a regular expression of layer names"):
            Keep.parse(empty)


def test_a_lookahead_names_no_scheme() -> None:
    assert Keep.parse(r"layers\.(?=0)") == Keep(r"layers\.(?=0)", "fp16")
    assert Keep.parse("(?=model).*o_proj=W8") == Keep("(?=model).*o_proj", "w8")


def test_threads_get_the_same_plan_and_leave_stdout_open(capfd: pytest.CaptureFixture[str]) -> None:
    problem = make([{"w8": 0.1 * i, "w4g32": 0.3 + 0.1 * i} for i in range(1, 5)], [(64, 64)] * 4)
    alone = allocate(problem, Limits(avg_bits=6.0))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: allocate(problem, Limits(avg_bits=6.0)), range(32)))
    assert all(plan == alone for plan in found)
    os.write(1, b"kept")
    assert capfd.readouterr().out == "kept"


def test_the_solver_runs_where_stdout_is_closed() -> None:
    script = (
        "import os, sys; os.close(1)\n"
        "from qtool.sensitivity.solver import minimize\n"
        "sys.stderr.write(str(minimize([[2.0, 1.0], [1.0, 3.0]])))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], stderr=subprocess.PIPE, text=True, check=True)
    assert done.stderr == "[1, 0]"


def test_what_the_solver_prints_stays_out_of_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    from qtool.sensitivity.solver import _silent_stdout

    with _silent_stdout():
        os.write(1, b"noise from C++")
    os.write(1, b"kept")
    assert capfd.readouterr().out == "kept"
