"""Block pool, KV-cache manager, swap space, scheduler and core as a state machine: 10,000 random steps of arrivals,
cancellations, failures and preemptions in caches of a few blocks, under every policy."""

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
from qtool.runtime.engine.swap import BlockCopy, PreemptionMode, SwapCosts, SwapSpace

BLOCK = 8
SHARED = list(range(40))  # prompts that begin alike, so that blocks are shared


class Ledger:
    """An executor that computes nothing, watches who writes where, and knows which token lies in which slot."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.kv: KVCacheManager | None = None
        self.fail_next = False
        self.fail_copy = False
        self.wrong: list[str] = []  # the core takes an assertion for a failing device
        self.device: dict[int, list[int]] = {}  # block → tokens
        self.host: dict[int, list[int]] = {}
        self.last: dict[Request, int] = {}  # sampled by the step before

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        if self.fail_copy:
            self.fail_copy = False
            raise RuntimeError("host lost")
        for copy in copies:
            assert len(copy.device_blocks) == len(copy.host_blocks)
            source, target = (self.device, self.host) if copy.out else (self.host, self.device)
            here, there = (copy.device_blocks, copy.host_blocks)[:: 1 if copy.out else -1]
            for a, b in zip(here, there):
                target[b] = list(source[a])

    def _enter(self, work: ScheduledRequest) -> None:
        """Write the tokens of a piece of work, once all before them are found where they belong."""
        known = [*work.request.token_ids, self.last.get(work.request, -1)]
        for position in range(work.start + work.num_tokens):
            block = self.device.setdefault(work.block_table[position // BLOCK], [-1] * BLOCK)
            if position >= work.start:
                block[position % BLOCK] = known[position]
            assert block[position % BLOCK] == known[position], "the cache holds another token"

    def submit(self, batch: Sequence[ScheduledRequest]) -> list[StepResult]:
        try:
            self._check(batch)
        except AssertionError as error:
            self.wrong.append(str(error))
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("device lost")
        self.last = {work.request: work.start % 50 for work in batch if work.sample}
        return [StepResult(work.start % 50) if work.sample else StepResult() for work in batch]

    def _check(self, batch: Sequence[ScheduledRequest]) -> None:
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
        for work in batch:
            self._enter(work)

    def collect(self, step: list[StepResult]) -> list[StepResult]:
        return step


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        num_blocks=st.integers(3, 12),
        seqs=st.integers(1, 6),
        budget=st.integers(6, 40),
        share=st.sampled_from([0.1, 0.5, 1.0]),
        ahead=st.booleans(),
        prefix=st.booleans(),
        host=st.sampled_from([0, 4, 40, 40]),
        mode=st.sampled_from(["auto", "recompute", "swap", "swap"]),
        token_s=st.sampled_from([None, 0.26, 10.0]),  # of a block of 8 tokens, copied twice in 2 seconds
    )
    def start(
        self,
        policy: str,
        num_blocks: int,
        seqs: int,
        budget: int,
        share: float,
        ahead: bool,
        prefix: bool,
        host: int,
        mode: PreemptionMode,
        token_s: float | None,
    ) -> None:
        self.ledger = Ledger(budget)
        kv = self.ledger.kv = KVCacheManager(num_blocks, BLOCK, prefix_caching=prefix)
        config = SchedulerConfig(seqs, budget, 256, policy=policy, request_share=share)
        swap = SwapSpace(host, SwapCosts(1.0, token_s), mode) if host else None
        self.core = EngineCore(config, kv, self.ledger, run_ahead=ahead, swap=swap)
        self.alive: dict[str, Request] = {}
        self.now = 0.0
        self.count = 0

    @rule(
        shared=st.integers(0, 40),
        own=st.lists(st.integers(0, 49), min_size=1, max_size=10),
        crowd=st.sampled_from([1, 1, 2, 4]),
        output=st.integers(1, 40),
        priority=st.integers(-2, 2),
        stop=st.sets(st.integers(0, 49), max_size=3),
        logprobs=st.sampled_from([None, None, None, 0]),  # one that wants them does not let steps run ahead
    )
    def arrive(
        self, shared: int, own: list[int], crowd: int, output: int, priority: int, stop: set[int], logprobs: int | None
    ) -> None:
        for member in range(crowd):
            self.count += 1
            self.now += 0.01
            prompt = [*SHARED[:shared], *own, *[member] * member][: self.core.scheduler.room - 1]
            params = SamplingParams(max_tokens=output, temperature=0, priority=priority, logprobs=logprobs)
            request = Request(str(self.count), prompt, params, stop_token_ids=frozenset(stop), arrival=self.now)
            self.core.add_request(request)
            self.alive[request.request_id] = request

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        assert self.core.abort(name) is self.alive.pop(name)

    @rule(times=st.integers(1, 9))
    def step(self, times: int) -> None:
        for _ in range(times):
            self._step()

    @precondition(lambda self: self.alive)
    @rule(copying=st.booleans())
    def fail(self, copying: bool) -> None:
        self.ledger.fail_next, self.ledger.fail_copy = not copying, copying
        self._step()
        self.ledger.fail_next = self.ledger.fail_copy = False

    def _step(self) -> None:
        finished = self.core.step()
        assert not self.ledger.wrong
        for request in finished:
            if request.status is Status.FINISHED:
                assert self.alive.pop(request.request_id) is request
                assert request.finish_reason in ("stop", "length", "error")
                assert 0 <= request.num_swaps <= request.num_preemptions
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
        assert self.core.stats().host_blocks_used == 0


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=110, stateful_step_count=50, deadline=None)
