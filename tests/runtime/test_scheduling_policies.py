"""Who is served first, that nobody starves, and what one request may take of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from qtool.quant.errors import QtoolError
from qtool.runtime.engine.core import EngineCore
from qtool.runtime.engine.kv_cache_manager import KVCacheManager
from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.engine.request import Request, ScheduledRequest, Status, StepResult
from qtool.runtime.engine.scheduler import SchedulerConfig


class Recorder:
    """An executor that answers 1 to everything and keeps what it was given: (request id, tokens) of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []

    def submit(self, batch: Sequence[ScheduledRequest]) -> list[StepResult]:
        self.steps.append({w.request.request_id: w.num_tokens for w in batch})
        return [StepResult(1) if w.sample else StepResult() for w in batch]

    def collect(self, step: list[StepResult]) -> list[StepResult]:
        return step


def make_core(
    policy: str = "fcfs", *, seqs: int = 1, budget: int = 64, blocks: int = 64, share: float = 0.5
) -> tuple[EngineCore, Recorder]:
    executor = Recorder()
    config = SchedulerConfig(seqs, budget, 512, policy=policy, request_share=share)
    return EngineCore(config, KVCacheManager(blocks, 8, prefix_caching=False), executor), executor


def request(name: str, arrival: float, *, prompt: int = 4, priority: int = 0, output: int = 1) -> Request:
    params = SamplingParams(max_tokens=output, temperature=0, priority=priority)
    return Request(name, [2] * prompt, params, arrival=arrival)


def order_of_ends(core: EngineCore) -> list[str]:
    ends = []
    while core.has_unfinished():
        ends += [r.request_id for r in core.step() if r.status is Status.FINISHED]
    return ends


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", ["long", "short", "urgent", "patient"]),
        ("priority", ["urgent", "long", "short", "patient"]),
        ("shortest", ["short", "urgent", "patient", "long"]),
    ],
)
def test_the_policy_decides_who_is_served_first(policy: str, order: list[str]) -> None:
    core, _ = make_core(policy)
    core.add_request(request("long", 0.0, prompt=60))
    core.add_request(request("short", 0.1, prompt=4))
    core.add_request(request("urgent", 0.2, prompt=8, priority=-1))
    core.add_request(request("patient", 0.3, prompt=9, priority=2))
    assert order_of_ends(core) == order


@pytest.mark.parametrize(
    ("policy", "victim", "rival", "bound"),
    [
        ("priority", {"priority": 5}, {"priority": 0}, 50.0),  # five levels of ten seconds
        ("shortest", {"prompt": 54}, {"prompt": 4}, 0.5),  # fifty tokens more
    ],
)
def test_nobody_starves(policy: str, victim: dict[str, int], rival: dict[str, int], bound: float) -> None:
    """A rival that would be preferred arrives before each step, for ever: the victim waits for those alone that came
    within the bound, however busy the engine is."""
    core, _ = make_core(policy)
    core.add_request(last := request("victim", 0.0, **victim))
    gap = bound / 20
    served = 0
    while last.status is not Status.FINISHED:
        served += 1
        core.add_request(request(f"r{served}", gap * (served + 0.5), **rival))
        core.step()
        assert served < 100
    assert served == 20, "the 19 that arrived within the bound, then the victim"


def test_the_lowest_rank_is_never_preempted() -> None:
    core, _ = make_core("priority", seqs=4, blocks=8)
    names = {"d": 3, "c": 2, "b": 1, "a": 0}
    requests = {n: request(n, 0.0, prompt=8, priority=p, output=40) for n, p in names.items()}
    for each in requests.values():
        core.add_request(each)
    assert order_of_ends(core) == ["a", "b", "c", "d"]
    assert requests["a"].num_preemptions == 0
    assert core.stats().num_preemptions > 0
    assert all(r.num_output_tokens == 40 for r in requests.values())


def test_a_long_prompt_shares_the_step_with_those_behind_it() -> None:
    core, executor = make_core(seqs=4, budget=32)
    core.add_request(request("long", 0.0, prompt=100))
    core.add_request(request("short", 0.1, prompt=5))
    core.add_request(request("other", 0.2, prompt=6))
    order_of_ends(core)
    assert executor.steps[0] == {"long": 32 - 5 - 6, "short": 5, "other": 6}, (
        "half is promised, the rest is what is left"
    )
    assert executor.steps[1] == {"long": 32}, "alone, it takes the whole step"


def test_two_long_prompts_get_half_each() -> None:
    core, executor = make_core(seqs=4, budget=32)
    core.add_request(request("one", 0.0, prompt=100))
    core.add_request(request("two", 0.1, prompt=100))
    order_of_ends(core)
    assert executor.steps[0] == {"one": 16, "two": 16}


def test_a_request_joins_once_all_of_its_prompt_fits() -> None:
    """Else a long prompt would take the last blocks chunk by chunk, to be thrown out by those that run."""
    core, _ = make_core(seqs=4, budget=16, blocks=8)
    core.add_request(request("first", 0.0, prompt=20, output=20))
    core.add_request(big := request("big", 0.1, prompt=48))
    core.add_request(small := request("small", 0.2, prompt=2))
    core.step()
    core.step()
    assert big.status is Status.WAITING
    assert small.status is Status.WAITING, "nobody overtakes the first in line"
    assert set(order_of_ends(core)) == {"first", "big", "small"}
    assert core.stats().num_preemptions == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SchedulerConfig(policy="lottery"), "fcfs, priority, shortest, got 'lottery'"),
        (lambda: SchedulerConfig(request_share=0.0), "request_share"),
        (lambda: SamplingParams(priority=101), "priority must be between -100 and 100"),
        (lambda: SamplingParams(priority=True), "priority must be an integer"),
    ],
)
def test_bad_values_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(QtoolError, match=message):
        make()
