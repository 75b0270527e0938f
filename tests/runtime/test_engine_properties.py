"""Block pool, KV-cache manager, scheduler and core under random traffic, with an executor that computes no model."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.quant.errors import QtoolError
from qtool.runtime.engine.block_pool import BlockPool
from qtool.runtime.engine.core import EngineCore
from qtool.runtime.engine.kv_cache_manager import KVCacheManager
from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.engine.request import Request, ScheduledRequest, Status, StepResult
from qtool.runtime.engine.scheduler import SchedulerConfig
from qtool.runtime.engine.swap import BlockCopy, SwapCosts, SwapSpace


def next_token(tokens: Sequence[int]) -> int:
    """The 'model': the next token depends on all tokens before it."""
    value = 7
    for token in tokens:
        value = (value * 31 + token) % 10_007
    return value % 50


class FakeExecutor:
    """Keeps what a real one would keep in its KV cache (the token in each slot) and answers from that alone."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, int] = {}
        self.fail_next = False
        self.most_tokens = 0
        self.last: dict[Request, int] = {}  # sampled by the step before
        self.host: dict[int, int] = {}  # slots in host memory

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            for block, host in zip(copy.device_blocks, copy.host_blocks, strict=True):
                for i in range(self.block_size):
                    here, there = block * self.block_size + i, host * self.block_size + i
                    if copy.out:
                        self.host[there] = self.slots.get(here, -1)
                    else:
                        self.slots[here] = self.host[there]

    def collect(self, step: list[StepResult]) -> list[StepResult]:
        return step

    def submit(self, batch: Sequence[ScheduledRequest]) -> list[StepResult]:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("device lost")
        self.most_tokens = max(self.most_tokens, sum(w.num_tokens for w in batch))
        written: set[int] = set()
        for work in batch:
            for position in range(work.start, work.start + work.num_tokens):
                slot = self._slot(work, position)
                assert slot not in written, "two writers of one slot"
                written.add(slot)
                known = work.request.token_ids
                self.slots[slot] = known[position] if position < len(known) else self.last[work.request]
        results = []
        for work in batch:
            context = [self.slots[self._slot(work, p)] for p in range(work.start + work.num_tokens)]
            results.append(StepResult(next_token(context)) if work.sample else StepResult())
        self.last = {w.request: r.token_id for w, r in zip(batch, results) if r.token_id is not None}
        return results

    def _slot(self, work: ScheduledRequest, position: int) -> int:
        return work.block_table[position // self.block_size] * self.block_size + position % self.block_size


def expected_output(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def make_core(
    num_blocks: int,
    block_size: int,
    budget: int,
    seqs: int,
    *,
    static: bool = False,
    prefix: bool = True,
    ahead: bool = False,
    swap: SwapSpace | None = None,
):
    executor = FakeExecutor(block_size)
    config = SchedulerConfig(seqs, max(budget, seqs), max_model_len=256, static_batching=static)
    kv = KVCacheManager(num_blocks, block_size, prefix_caching=prefix)
    return EngineCore(config, kv, executor, run_ahead=ahead and not static, swap=swap), executor


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(2, 24),
    budget=st.integers(4, 40),
    seqs=st.integers(1, 6),
    static=st.booleans(),
    prefix=st.booleans(),
    ahead=st.booleans(),
    host=st.sampled_from([0, 3, 30]),
)
def test_every_request_ends_right_under_random_traffic(
    seed: int, num_blocks: int, budget: int, seqs: int, static: bool, prefix: bool, ahead: bool, host: int
) -> None:
    """Arrivals, aborts and preemptions in any order: outputs are what each prompt alone gives, and no block leaks."""
    rng = random.Random(seed)
    swap = SwapSpace(host, SwapCosts(1.0, rng.choice([0.2, 0.3, 9.0]))) if host else None
    core, executor = make_core(num_blocks, 8, budget, seqs, static=static, prefix=prefix, ahead=ahead, swap=swap)
    shared = [rng.randrange(50) for _ in range(40)]
    room = num_blocks * 8
    alive: dict[str, Request] = {}
    finished: list[Request] = []
    for step in range(120):
        if step < 60 and rng.random() < 0.4:
            prompt = shared[: rng.randrange(1, 40)] + [rng.randrange(50) for _ in range(rng.randrange(1, 12))]
            logprobs = 0 if rng.random() < 0.2 else None  # such a request does not let steps run ahead
            params = SamplingParams(max_tokens=rng.randrange(1, 20), temperature=0, logprobs=logprobs)
            stops = frozenset(rng.sample(range(50), 2)) if rng.random() < 0.5 else frozenset()
            request = Request(f"r{step}", prompt, params, stop_token_ids=stops)
            if len(prompt) + 1 > room:
                with pytest.raises(QtoolError, match="the context is"):
                    core.add_request(request)
            else:
                core.add_request(request)
                alive[request.request_id] = request
        if alive and rng.random() < 0.08:
            victim = rng.choice(sorted(alive))
            assert core.abort(victim) is alive.pop(victim)
        for request in core.step():
            if request.status is Status.FINISHED:
                finished.append(alive.pop(request.request_id))
        core.check_integrity()
    for _ in range(5000):
        if not core.has_unfinished():
            break
        for request in core.step():
            if request.status is Status.FINISHED:
                finished.append(alive.pop(request.request_id))
    assert not alive, "an admitted request never ended"
    for request in finished:
        count = min(request.params.max_tokens, room - request.num_prompt_tokens, 256 - request.num_prompt_tokens)
        want = expected_output(request.prompt_token_ids, count)
        end = next((i for i, token in enumerate(want) if token in request.stop_token_ids), None)
        assert request.output_token_ids == (want if end is None else want[: end + 1])
        assert request.finish_reason == ("length" if end is None else "stop")
    assert core.kv.pool.num_used == 0
    assert core.kv.pool.num_free == num_blocks
    assert executor.most_tokens <= max(budget, seqs)


def test_running_ahead_submits_a_step_before_the_last_one_is_known() -> None:
    core, executor = make_core(64, 8, 64, 4, ahead=True)
    core.add_request(request := Request("r", [1, 2, 3], SamplingParams(max_tokens=3, temperature=0)))
    assert core.step() == []  # the prompt is on the device
    assert executor.last[request] == expected_output([1, 2, 3], 1)[0]
    assert core.step() == [request]  # and now the second token too, while the first becomes known
    assert request.output_token_ids == expected_output([1, 2, 3], 1)
    assert executor.last[request] == expected_output([1, 2, 3], 2)[1]
    while core.has_unfinished():
        core.step()
    assert request.output_token_ids == expected_output([1, 2, 3], 3)
    assert core.stats().num_steps == 3  # nothing was computed in vain: the length was known beforehand


@pytest.mark.parametrize("host", [0, 4, 12])
@pytest.mark.parametrize("ahead", [False, True])
def test_ten_thousand_steps_in_a_tiny_cache(ahead: bool, host: int) -> None:
    """A long run at the edge of the memory, with preemptions and aborts all the way."""
    rng = random.Random(5)
    swap = SwapSpace(host, SwapCosts(1.0), "swap") if host else None
    core, _ = make_core(12, 8, 24, 6, ahead=ahead, swap=swap)
    swaps = 0
    alive: dict[str, Request] = {}
    preemptions = 0
    for step in range(10_000):
        if len(alive) < 10 and rng.random() < 0.5:
            prompt = [rng.randrange(50) for _ in range(rng.randrange(1, 30))]
            request = Request(f"r{step}", prompt, SamplingParams(max_tokens=rng.randrange(1, 40), temperature=0))
            core.add_request(request)
            alive[request.request_id] = request
        if alive and rng.random() < 0.02:
            core.abort(victim := rng.choice(sorted(alive)))
            del alive[victim]
        for request in core.step():
            if request.status is Status.FINISHED:
                preemptions += request.num_preemptions
                swaps += request.num_swaps
                want = expected_output(request.prompt_token_ids, request.num_output_tokens)
                assert request.output_token_ids == want
                del alive[request.request_id]
    core.check_integrity()
    assert preemptions > 100, "the run was meant to be short of memory"
    assert (swaps > 50) == (host > 0)
    assert core.stats().num_swaps >= swaps


def test_the_last_request_to_end_finds_a_leak_without_looking_at_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    core, _ = make_core(64, 8, 8, 2)

    def walk(references: dict[int, int]) -> None:
        raise AssertionError("a step walked over all blocks")

    monkeypatch.setattr(core.kv.pool, "check_integrity", walk)
    core.add_request(Request("well", [1, 2, 3], SamplingParams(max_tokens=2, temperature=0)))
    while core.has_unfinished():
        core.step()
    core.kv.pool.allocate()
    core.add_request(Request("leak", [1, 2, 3], SamplingParams(max_tokens=2, temperature=0)))
    core.step()
    with pytest.raises(RuntimeError, match="1 KV-cache blocks are in use while no request runs"):
        core.step()


def test_a_failing_step_ends_its_own_requests_alone() -> None:
    core, executor = make_core(64, 8, 8, 1)
    first = Request("first", [1, 2, 3], SamplingParams(max_tokens=4, temperature=0))
    second = Request("second", [4, 5, 6], SamplingParams(max_tokens=4, temperature=0))
    core.add_request(first)
    core.add_request(second)
    executor.fail_next = True
    assert core.step() == [first]
    assert first.finish_reason == "error"
    assert "device lost" in str(first.stop_reason)
    while core.has_unfinished():
        core.step()
    assert second.output_token_ids == expected_output([4, 5, 6], 4)
    assert core.kv.pool.num_used == 0


def test_decodes_are_not_held_up_by_a_long_prompt() -> None:
    core, _ = make_core(64, 8, 16, 4)
    core.add_request(chatty := Request("chatty", [1, 2], SamplingParams(max_tokens=30, temperature=0)))
    core.step()
    core.add_request(long := Request("long", list(range(50)) * 3, SamplingParams(max_tokens=2, temperature=0)))
    for count in range(2, 10):
        core.step()
        assert chatty.num_output_tokens == count
    assert 0 < long.num_computed_tokens < long.num_tokens


def test_a_full_engine_admits_several_at_once() -> None:
    core, _ = make_core(600, 8, 64, 32)
    for i in range(80):
        core.add_request(Request(f"r{i}", [1, 2], SamplingParams(max_tokens=1 + i % 7, temperature=0)))
    joined = []
    waiting = 80
    while core.has_unfinished():
        core.step()
        joined.append(waiting - core.stats().num_waiting)
        waiting = core.stats().num_waiting
    assert joined[0] == 32
    assert 1 not in joined[:-1], "seats are filled in twos, until fewer wait than there are seats"
    assert sum(joined) == 80


def test_static_batching_admits_nobody_until_the_batch_ends() -> None:
    core, _ = make_core(64, 8, 64, 2, static=True)
    core.add_request(short := Request("short", [1], SamplingParams(max_tokens=2, temperature=0)))
    core.add_request(long := Request("long", [2], SamplingParams(max_tokens=9, temperature=0)))
    core.add_request(late := Request("late", [3], SamplingParams(max_tokens=2, temperature=0)))
    while long.status is not Status.FINISHED:
        core.step()
        assert late.status is Status.WAITING
        if short.status is Status.FINISHED and long.status is Status.RUNNING:
            assert core.stats().num_running == 2, "the finished row keeps its place"
    while core.has_unfinished():
        core.step()
    assert late.output_token_ids == expected_output([3], 2)


def test_a_shared_prefix_is_computed_once() -> None:
    core, _ = make_core(64, 8, 64, 4)
    prompt = list(range(40))
    for name in ("cold", "warm"):
        core.add_request(request := Request(name, [*prompt, 7], SamplingParams(max_tokens=3, temperature=0)))
        while core.has_unfinished():
            core.step()
        assert request.output_token_ids == expected_output([*prompt, 7], 3)
        assert request.num_cached_tokens == (0 if name == "cold" else 40)


def test_a_whole_cached_prompt_still_computes_its_last_block() -> None:
    core, _ = make_core(64, 8, 64, 4)
    for cached in (0, 8):
        core.add_request(request := Request("r", list(range(16)), SamplingParams(max_tokens=2, temperature=0)))
        while core.has_unfinished():
            core.step()
        assert request.num_cached_tokens == cached


def test_kv_waste_is_below_four_percent_on_a_mixed_load() -> None:
    """Prompts and outputs of the lengths that chat traffic has; waste is averaged over all steps."""
    rng = random.Random(0)
    core, _ = make_core(4096, 16, 512, 32, prefix=False)
    core.scheduler.room = 4096
    for i in range(96):
        prompt = [rng.randrange(50) for _ in range(int(rng.lognormvariate(5.6, 0.8)) % 1500 + 16)]
        core.add_request(Request(str(i), prompt, SamplingParams(max_tokens=500 if i % 5 == 0 else 50, temperature=0)))
    allocated = filled = 0
    while core.has_unfinished():
        core.step()
        stats = core.stats()
        allocated += stats.kv_slots_allocated
        filled += stats.kv_slots_filled
    assert 0 <= 1 - filled / allocated < 0.04
    assert core.kv.pool.num_used == 0


def test_pool_reuses_tails_before_prefixes_and_refuses_a_double_free() -> None:
    pool = BlockPool(3)
    head, tail = pool.allocate(), pool.allocate()
    pool.publish(head, b"head")
    pool.publish(tail, b"tail")
    pool.release([tail, head])
    assert pool.allocate() == 2, "the block that was never used is the oldest"
    assert pool.allocate() == tail
    assert pool.lookup(b"tail") is None
    assert pool.lookup(b"head") == head
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.release([head])
    pool.allocate()
    with pytest.raises(IndexError):
        pool.allocate()


def test_integrity_check_sees_a_leak() -> None:
    core, _ = make_core(8, 8, 8, 1)
    core.kv.pool.allocate()
    with pytest.raises(RuntimeError, match="1 references counted, 0 held"):
        core.check_integrity()


def test_limits_are_checked() -> None:
    with pytest.raises(QtoolError, match="max_num_batched_tokens"):
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=4)
    with pytest.raises(QtoolError, match="max_num_seqs"):
        SchedulerConfig(max_num_seqs=0)


def test_continuous_batching_needs_less_than_half_the_steps_of_static_batching() -> None:
    """The 80/20 mix: four in five requests give 50 tokens, one in five gives 500; the same rows in every step."""
    steps = {}
    for static in (False, True):
        core, _ = make_core(2048, 16, 512, 16, static=static)
        core.scheduler.room = 1024
        for i in range(80):
            count = 500 if i % 5 == 0 else 50
            core.add_request(Request(str(i), [i % 50] * 20, SamplingParams(max_tokens=count, temperature=0)))
        while core.has_unfinished():
            core.step()
        steps[static] = core.stats().num_steps
    assert steps[True] > 2 * steps[False]
