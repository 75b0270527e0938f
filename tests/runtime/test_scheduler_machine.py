"""Block pool, KV-cache manager, scheduler and core as a state machine: 10,000 random steps of arrivals, cancellations,
failures and preemptions in caches of a few blocks, under every policy."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qtool.runtime.engine.core import EngineCore
from qtool.runtime.engine.kv_cache_manager import KVCacheManager
from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.engine.policy import POLICIES
from qtool.runtime.engine.request import Request, ScheduledRequest, Status, StepResult
from qtool.runtime.engine.scheduler import SchedulerConfig

BLOCK = 8
SHARED = list(range(40))  # prompts that begin alike, so that blocks are shared


class Ledger:
    """An executor that computes nothing and watches who writes where."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.kv: KVCacheManager | None = None
        self.fail_next = False

    def submit(self, batch: Sequence[ScheduledRequest]) -> list[StepResult]:
        assert self.kv is not None
        assert len({work.request for work in batch}) == len(batch), "a request twice in one step"
        assert 0 < sum(work.num_tokens for work in batch) <= self.limit
        writers: dict[int, Request] = {}
        for work in batch:
            assert work.num_tokens > 0
            end = work.start + work.num_tokens
            assert end <= len(work.block_table) * BLOCK, "tokens without a block"
            for block_id in work.block_table[work.start // BLOCK : -(-end // BLOCK)]:
                assert writers.setdefault(block_id, work.request) is work.request, "two writers of a block"
                block = self.kv.pool.blocks[block_id]
                assert block.refs == 1, "a block that is written is shared"
                assert block.digest is None, "a block that others may read is written"
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("device lost")
        return [StepResult(work.start % 50) if work.sample else StepResult() for work in batch]

    def collect(self, step: list[StepResult]) -> list[StepResult]:
        return step


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        num_blocks=st.integers(3, 16),
        seqs=st.integers(1, 6),
        budget=st.integers(6, 40),
        share=st.sampled_from([0.1, 0.5, 1.0]),
        ahead=st.booleans(),
        prefix=st.booleans(),
    )
    def start(
        self, policy: str, num_blocks: int, seqs: int, budget: int, share: float, ahead: bool, prefix: bool
    ) -> None:
        self.ledger = Ledger(budget)
        kv = self.ledger.kv = KVCacheManager(num_blocks, BLOCK, prefix_caching=prefix)
        config = SchedulerConfig(seqs, budget, 256, policy=policy, request_share=share)
        self.core = EngineCore(config, kv, self.ledger, run_ahead=ahead)
        self.alive: dict[str, Request] = {}
        self.now = 0.0
        self.count = 0

    @rule(
        shared=st.integers(0, 40),
        own=st.lists(st.integers(0, 49), min_size=1, max_size=10),
        output=st.integers(1, 20),
        priority=st.integers(-2, 2),
        stop=st.sets(st.integers(0, 49), max_size=3),
        logprobs=st.sampled_from([None, None, None, 0]),  # one that wants them does not let steps run ahead
    )
    def arrive(
        self, shared: int, own: list[int], output: int, priority: int, stop: set[int], logprobs: int | None
    ) -> None:
        self.count += 1
        self.now += 0.01
        prompt = [*SHARED[:shared], *own][: self.core.scheduler.room - 1]
        params = SamplingParams(max_tokens=output, temperature=0, priority=priority, logprobs=logprobs)
        request = Request(str(self.count), prompt, params, stop_token_ids=frozenset(stop), arrival=self.now)
        self.core.add_request(request)
        self.alive[request.request_id] = request

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        assert self.core.abort(name) is self.alive.pop(name)

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self._step()

    @precondition(lambda self: self.alive)
    @rule()
    def fail(self) -> None:
        self.ledger.fail_next = True
        self._step()
        self.ledger.fail_next = False

    def _step(self) -> None:
        for request in self.core.step():
            if request.status is Status.FINISHED:
                assert self.alive.pop(request.request_id) is request
                assert request.finish_reason in ("stop", "length", "error")
                if request.finish_reason == "length":
                    full = request.num_tokens == self.core.scheduler.room
                    assert full or request.num_output_tokens == request.params.max_tokens

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check_integrity()
        scheduler = self.core.scheduler
        assert {r.request_id for r in (*scheduler.waiting, *scheduler.running)} == set(self.alive)
        for queue in (scheduler.waiting, scheduler.running):
            assert [r.rank for r in queue] == sorted(r.rank for r in queue)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(40 * (len(self.alive) + 1) ** 2):
            if not self.core.has_unfinished():
                break
            self._step()
        assert not self.alive, "an admitted request never ended"
        pool = self.core.kv.pool
        assert (pool.num_used, pool.num_free) == (0, pool.num_blocks)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
