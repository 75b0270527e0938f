"""Which tokens of which requests are computed in the next step: one loop under a token budget. No torch here.

Iteration-level scheduling after Orca (Yu et al., OSDI 2022), chunked prefill mixed with decode after Sarathi-Serve
(Agrawal et al., OSDI 2024), paged memory and preemption by recomputation after vLLM (Kwon et al., SOSP 2023).

Requests are served in order of their rank (engine/policy.py), which never changes. The request of the lowest rank is
never preempted for another and fits when it runs alone, so it always ends: nothing can deadlock.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from qtool.quant.errors import QtoolError
from qtool.runtime.engine.kv_cache_manager import KVCacheManager
from qtool.runtime.engine.policy import POLICIES
from qtool.runtime.engine.request import Request, ScheduledRequest, Status, StepResult

ADMIT_SHARE = 16
"""Where more requests wait than fit, admit them once one in so many seats is free: prompts in one step cost less than
prompts in every step, and those that wait would wait anyway."""

_RANK = attrgetter("rank")


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step.

    Attributes:
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most tokens computed in one step, ≥ max_num_seqs so that every decode fits.
        max_model_len: longest prompt and output together, in tokens.
        static_batching: request-level batching as before Orca, for comparison: no request joins until the whole batch
            is done, and finished rows are computed as padding until the longest ends.
        policy: fcfs, priority or shortest, see engine/policy.py.
        request_share: most of a step's tokens, as a share, that one request gets while others want them too.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 2048
    static_batching: bool = False
    policy: str = "fcfs"
    request_share: float = 0.5

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise QtoolError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise QtoolError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running request advances in each step"
            )
        if self.policy not in POLICIES:
            raise QtoolError(f"the scheduling policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if not 0 < self.request_share <= 1:
            raise QtoolError(f"request_share must be in (0, 1], got {self.request_share}")


class Scheduler:
    """Decodes first, then prefill chunks in what is left of the budget, then admissions; each in order of rank."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self.config = config
        self.kv = kv
        self.waiting: list[Request] = []  # in order of rank, like those that run
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._arrivals = itertools.count()
        # The longest request: it fits when it runs alone.
        self.room = min(config.max_model_len, kv.pool.num_blocks * kv.block_size)

    def add(self, request: Request) -> None:
        """Queue a request. Raises QtoolError where it could never run to its end."""
        if request.num_prompt_tokens + int(request.generate) > self.room:
            raise QtoolError(
                f"the prompt has {request.num_prompt_tokens} tokens, but the context is {self.room} tokens"
                + (" with room for one output token: " if request.generate else ": ")
                + "shorten the prompt or start with a larger max_model_len"
            )
        request.rank = (POLICIES[self.config.policy](request), next(self._arrivals))
        insort(self.waiting, request, key=_RANK)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """End a request in any state and free its blocks (a static batch keeps them until it ends as a whole)."""
        was = request.status
        if was is Status.FINISHED:
            return
        request.finish(reason, stop_reason)
        if was is Status.WAITING:
            _remove(self.waiting, request)
        elif not self.config.static_batching:
            self._release(request)
        elif all(r.status is Status.FINISHED for r in self.running):
            for row in list(self.running):
                self._release(row)

    def _release(self, request: Request) -> None:
        _remove(self.running, request)
        self.kv.free(request)

    def schedule(self) -> list[ScheduledRequest]:
        """The next step's work; empty when there is nothing to do. Blocks for it are allocated."""
        budget = self.config.max_num_batched_tokens
        scheduled: dict[Request, ScheduledRequest] = {}
        preempted = False
        # A decode is one token behind: all of them go first, so that no long prefill holds them up.
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self.running:
            behind = len(request.token_ids) + request.num_in_flight - request.num_computed_tokens
            (prefills if behind > 1 else decodes).append(request)
        most = self._most_tokens(len(prefills))
        for request in itertools.chain(decodes, prefills):
            if budget == 0:
                break
            if request.status is Status.WAITING:
                continue  # preempted a moment ago, in this loop
            if request.status is Status.FINISHED:
                if request.num_computed_tokens == 0:
                    continue
                last = request.num_computed_tokens - 1
                table = self.kv.block_table(request)
                scheduled[request] = ScheduledRequest(request, last, 1, table, sample=False, padding=True)
                budget -= 1
                continue
            if request.num_in_flight and self._ends_in_flight(request):
                continue
            behind = len(request.token_ids) + request.num_in_flight - request.num_computed_tokens
            num_tokens = behind if behind <= 1 else min(behind, budget, most)
            while not self.kv.grow(request, request.num_computed_tokens + num_tokens):
                victim = self.running[-1]
                if dropped := scheduled.pop(victim, None):
                    budget += dropped.num_tokens
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                scheduled[request] = self._work(request, num_tokens)
                budget -= num_tokens
        if not preempted:
            budget = self._admit(scheduled, budget, most)
        if budget and most < self.config.max_num_batched_tokens:
            self._spread(scheduled, budget)
        return list(scheduled.values())

    def _most_tokens(self, num_prefills: int) -> int:
        """Most tokens of one request in a step; a cap only where prompts compete for them."""
        budget = self.config.max_num_batched_tokens
        if num_prefills + len(self.waiting) <= 1:
            return budget
        return max(1, int(budget * self.config.request_share))

    def _spread(self, scheduled: dict[Request, ScheduledRequest], budget: int) -> None:
        """Give what is left of the budget to those that were capped."""
        for request, work in scheduled.items():
            end = work.start + work.num_tokens
            more = min(request.num_tokens - end, budget)
            if more > 0 and not work.padding and self.kv.grow(request, end + more):
                scheduled[request] = self._work(request, work.num_tokens + more)
                budget -= more

    def _admit(self, scheduled: dict[Request, ScheduledRequest], budget: int, most: int) -> int:
        """Let waiting requests join while there are seats, tokens and memory; returns what is left of the budget.

        The first in line joins once all of its tokens fit beside the prompts that are under way, so that these are not
        thrown out for each other; nobody overtakes it meanwhile.
        """
        static = self.config.static_batching
        if static and self.running:
            return budget
        free = self.config.max_num_seqs - len(self.running)
        if not static and free < min(len(self.waiting), self.config.max_num_seqs // ADMIT_SHARE):
            return budget
        reserved = 0
        promised = sum(self.kv.missing_blocks(request, request.num_tokens) for request in self.running)
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            if static:
                # Request-level batching reserves the longest possible output up front.
                longest = min(request.num_prompt_tokens + request.params.max_tokens, self.room)
                reserved += self.kv.blocks_for(longest)
                if reserved > self.kv.pool.num_blocks:
                    break
            self.kv.admit(request)
            cached = request.num_computed_tokens
            num_tokens = min(request.num_tokens - cached, budget, most)
            needed = promised + self.kv.missing_blocks(request, request.num_tokens)
            if needed > self.kv.pool.num_free or not self.kv.grow(request, cached + num_tokens):
                self.kv.free(request)
                request.num_computed_tokens = 0
                break
            promised += self.kv.missing_blocks(request, request.num_tokens)
            del self.waiting[0]
            insort(self.running, request, key=_RANK)
            request.status = Status.RUNNING
            if request.scheduled is None:
                request.scheduled = time.monotonic()
                request.num_cached_tokens = cached
                self.kv.prefix_queries += request.num_tokens
                self.kv.prefix_hits += cached
            scheduled[request] = self._work(request, num_tokens)
            budget -= num_tokens
        return budget

    def _work(self, request: Request, num_tokens: int) -> ScheduledRequest:
        start = request.num_computed_tokens
        sample = request.generate and start + num_tokens == request.num_tokens
        return ScheduledRequest(request, start, num_tokens, self.kv.block_table(request), sample)

    def _ends_in_flight(self, request: Request) -> bool:
        """The token that a step on the device samples is the last one the request may have."""
        outputs = request.num_output_tokens + request.num_in_flight
        return outputs >= request.params.max_tokens or request.num_tokens >= self.room

    def launched(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Count a step as computed although its results are still to come, so that the next one can be scheduled."""
        for work in scheduled:
            work.request.num_computed_tokens = work.start + work.num_tokens
            work.request.num_in_flight += work.sample

    def _preempt(self, request: Request) -> None:
        """Take a running request off the device; it starts over, in line by its rank."""
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = Status.WAITING
        insort(self.waiting, request, key=_RANK)
        self.num_preemptions += 1

    def update(self, scheduled: Sequence[ScheduledRequest], results: Sequence[StepResult]) -> list[Request]:
        """Enter a step's results; returns the requests that have something new (a token, or their end)."""
        changed = []
        for work, result in zip(scheduled, results, strict=True):
            request = work.request
            if work.padding or request.status is Status.FINISHED:
                continue
            if result.error is not None:
                self.finish(request, "error", result.error)
                changed.append(request)
                continue
            if request.num_in_flight:
                request.num_in_flight -= work.sample
            if request.status is Status.RUNNING:  # else preempted while the step was on the device: it starts over
                done = work.start + work.num_tokens
                if request.num_computed_tokens < done:
                    request.num_computed_tokens = done
                self.kv.publish(request, done)
            if result.num_scored:
                request.prompt_scores.extend(result.prompt_scores)
                request.num_scored += result.num_scored
            if result.token_id is not None:
                self._append(request, result)
                changed.append(request)
            elif not request.generate and request.num_computed_tokens == request.num_tokens:
                self.finish(request, "stop")
                changed.append(request)
        return changed

    def _append(self, request: Request, result: StepResult) -> None:
        token = result.token_id
        assert token is not None
        request.token_ids.append(token)
        if result.logprobs is not None:
            request.logprobs.append(result.logprobs)
        if request.first_token is None:
            request.first_token = time.monotonic()
        count = request.num_output_tokens
        if token in request.stop_token_ids and count > request.params.min_tokens:
            self.finish(request, "stop", token)
        elif count >= request.params.max_tokens or len(request.token_ids) >= self.room:
            self.finish(request, "length")


def _remove(requests: list[Request], request: Request) -> None:
    del requests[bisect_left(requests, request.rank, key=_RANK)]
