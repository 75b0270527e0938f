"""Which tokens of which requests are computed in the next step: one loop under a token budget. No torch here.

Iteration-level scheduling after Orca (Yu et al., OSDI 2022), chunked prefill mixed with decode after Sarathi-Serve
(Agrawal et al., OSDI 2024), paged memory and preemption by recomputation after vLLM (Kwon et al., SOSP 2023).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from qtool.quant.errors import QtoolError
from qtool.runtime.engine.kv_cache_manager import KVCacheManager
from qtool.runtime.engine.request import Request, ScheduledRequest, Status, StepResult

ADMIT_SHARE = 16
"""Where more requests wait than fit, admit them once one in so many seats is free: prompts in one step cost less than
prompts in every step, and those that wait would wait anyway."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step.

    Attributes:
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most tokens computed in one step, ≥ max_num_seqs so that every decode fits.
        max_model_len: longest prompt and output together, in tokens.
        static_batching: request-level batching as before Orca, for comparison: no request joins until the whole batch
            is done, and finished rows are computed as padding until the longest ends.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 2048
    static_batching: bool = False

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise QtoolError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise QtoolError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running request advances in each step"
            )


class Scheduler:
    """First come, first served. Decodes first, then prefill chunks in what is left of the budget, then admissions."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self.config = config
        self.kv = kv
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self.num_preemptions = 0
        # The longest request: it fits when it runs alone, so the oldest one always ends and nothing can deadlock.
        self.room = min(config.max_model_len, kv.pool.num_blocks * kv.block_size)

    def add(self, request: Request) -> None:
        """Queue a request. Raises QtoolError where it could never run to its end."""
        if request.num_prompt_tokens + int(request.generate) > self.room:
            raise QtoolError(
                f"the prompt has {request.num_prompt_tokens} tokens, but the context is {self.room} tokens"
                + (" with room for one output token: " if request.generate else ": ")
                + "shorten the prompt or start with a larger max_model_len"
            )
        self.waiting.append(request)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """End a request in any state and free its blocks (a static batch keeps them until it ends as a whole)."""
        was = request.status
        if was is Status.FINISHED:
            return
        request.finish(reason, stop_reason)
        if was is Status.WAITING:
            self.waiting.remove(request)
        elif not self.config.static_batching:
            self._release(request)
        elif all(r.status is Status.FINISHED for r in self.running):
            for row in list(self.running):
                self._release(row)

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.kv.free(request)

    def schedule(self) -> list[ScheduledRequest]:
        """The next step's work; empty when there is nothing to do. Blocks for it are allocated."""
        budget = self.config.max_num_batched_tokens
        scheduled: dict[Request, ScheduledRequest] = {}
        preempted = False
        # A decode is one token behind: all of them go first, so that no long prefill holds them up.
        for request in sorted(self.running, key=lambda r: r.num_tokens - r.num_computed_tokens > 1):
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
            if self._ends_in_flight(request):
                continue
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
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
            self._admit(scheduled, budget)
        return list(scheduled.values())

    def _admit(self, scheduled: dict[Request, ScheduledRequest], budget: int) -> None:
        static = self.config.static_batching
        if static and self.running:
            return
        free = self.config.max_num_seqs - len(self.running)
        if not static and free < min(len(self.waiting), self.config.max_num_seqs // ADMIT_SHARE):
            return
        reserved = 0
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            if static:
                # Request-level batching reserves the longest possible output up front.
                most = min(request.num_prompt_tokens + request.params.max_tokens, self.room)
                reserved += self.kv.blocks_for(most)
                if reserved > self.kv.pool.num_blocks:
                    return
            self.kv.admit(request)
            cached = request.num_computed_tokens
            num_tokens = min(request.num_tokens - cached, budget)
            if not self.kv.grow(request, cached + num_tokens):
                self.kv.free(request)
                request.num_computed_tokens = 0
                return
            self.waiting.popleft()
            self.running.append(request)
            request.status = Status.RUNNING
            if request.scheduled is None:
                request.scheduled = time.monotonic()
                request.num_cached_tokens = cached
                self.kv.prefix_queries += request.num_tokens
                self.kv.prefix_hits += cached
            scheduled[request] = self._work(request, num_tokens)
            budget -= num_tokens

    def _work(self, request: Request, num_tokens: int) -> ScheduledRequest:
        start = request.num_computed_tokens
        sample = request.generate and start + num_tokens == request.num_tokens
        return ScheduledRequest(request, start, num_tokens, self.kv.block_table(request), sample)

    def _ends_in_flight(self, request: Request) -> bool:
        """The token that a step on the device samples is the last one the request may have."""
        outputs = request.num_output_tokens + request.num_in_flight
        return bool(request.num_in_flight) and (outputs >= request.params.max_tokens or request.num_tokens >= self.room)

    def launched(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Count a step as computed although its results are still to come, so that the next one can be scheduled."""
        for work in scheduled:
            work.request.num_computed_tokens = work.start + work.num_tokens
            work.request.num_in_flight += work.sample

    def _preempt(self, request: Request) -> None:
        """Take the newest running request off the device; it starts over, at the head of the queue."""
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = Status.WAITING
        self.waiting.appendleft(request)
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
                request.num_computed_tokens = max(request.num_computed_tokens, done)
                self.kv.publish(request, done)
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
