"""Which tokens of which requests are computed in the next step: one loop under a token budget. No torch here.

Iteration-level scheduling after Orca (Yu et al., OSDI 2022), chunked prefill mixed with decode after Sarathi-Serve
(Agrawal et al., OSDI 2024), paged memory and preemption, by recomputation or by swap, after vLLM (Kwon et al., SOSP
2023).

Requests are served in order of their rank (engine/policy.py), which never changes. The request of the lowest rank is
never preempted for another and fits when it runs alone, so it always ends: nothing can deadlock.
"""

from __future__ import annotations

import itertools
import logging
import time
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from qtool.quant.errors import QtoolError
from qtool.runtime.engine.kv_cache_manager import KVCacheManager
from qtool.runtime.engine.policy import POLICIES
from qtool.runtime.engine.request import NO_DRAFT, Draft, Request, ScheduledRequest, Status, StepResult, decode
from qtool.runtime.engine.structured_output import Misfit
from qtool.runtime.engine.swap import BlockCopy, SwapSpace

ADMIT_SHARE = 16
"""Where more requests wait than fit, admit them once one in so many seats is free: prompts in one step cost less than
prompts in every step, and those that wait would wait anyway."""

log = logging.getLogger(__name__)

_RANK = attrgetter("rank")

Ending = tuple[str, int | str | None]
"""A finish_reason and its stop_reason."""


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

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, swap: SwapSpace | None = None) -> None:
        self.config = config
        self.kv = kv
        self.swap = swap
        self.waiting: list[Request] = []  # in order of rank, like those that run
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.prompt_tokens = 0  # computed
        self.generation_tokens = 0
        self._arrivals = itertools.count()
        # The longest request: it fits when it runs alone.
        self.room = min(config.max_model_len, kv.pool.num_blocks * kv.block_size)

    def check_length(self, num_prompt_tokens: int, *, generate: bool, last_is_spare: bool = False) -> None:
        """Raises QtoolError for a prompt that could never run to its end.

        A last token that is spare (see Request) needs no place in the context.
        """
        if num_prompt_tokens + generate - last_is_spare > self.room:
            also = " with room for one output token" if generate else " and one more to be scored" * last_is_spare
            raise QtoolError(
                f"the prompt has {num_prompt_tokens} tokens, but the context is {self.room} tokens{also}: "
                "shorten the prompt or start with a larger max_model_len"
            )

    def add(self, request: Request) -> None:
        """Queue a request. Raises QtoolError as check_length."""
        prompt = request.num_prompt_tokens
        self.check_length(prompt, generate=request.generate, last_is_spare=request.last_is_spare)
        request.max_num_tokens = min(prompt + request.params.max_tokens, self.room)
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
            if self.swap is not None:
                self.swap.drop(request)
        elif not self.config.static_batching:
            self._release(request)
        elif all(r.status is Status.FINISHED for r in self.running):
            for row in list(self.running):
                self._release(row)

    def _release(self, request: Request) -> None:
        _remove(self.running, request)
        self.kv.free(request)

    def schedule(self, drafts: Mapping[Request, Draft] | None = None) -> list[ScheduledRequest]:
        """The next step's work; empty when there is nothing to do. Blocks for it are allocated.

        `drafts` are verified as far as the budget and free blocks go: nobody waits or is preempted for them.
        """
        scheduled: dict[Request, ScheduledRequest] = {}
        spare = self.config.max_num_batched_tokens - len(self.running)
        before = self.num_preemptions
        # A decode is one token behind: all of them go first, so that no long prefill holds them up.
        prefills: list[Request] = []
        running = Status.RUNNING
        for request in list(self.running):
            in_flight, start = request.num_in_flight, request.num_computed_tokens
            total = len(request.token_ids) + in_flight
            if request.status is not running:  # preempted a moment ago, in this loop, or a static batch's padding
                if request.status is Status.FINISHED and start:
                    scheduled[request] = ScheduledRequest(request, start - 1, 1, request.block_table, False, True)
            elif total - start > 1:
                prefills.append(request)
            elif in_flight and total >= request.max_num_tokens:
                pass  # the token that a step on the device samples is the last one it may have
            elif total <= request.num_slots or self._make_room(request, total, scheduled):
                if drafts and request in drafts:
                    draft = self._fit(request, drafts[request], spare)
                    extra = len(draft.token_ids)
                    spare -= extra
                    scheduled[request] = ScheduledRequest(
                        request, start, 1 + extra, request.block_table, request.generate, False, draft
                    )
                else:
                    scheduled[request] = decode(request, start)
        limit = self.config.max_num_batched_tokens
        budget = limit - (sum(work.num_tokens for work in scheduled.values()) if drafts else len(scheduled))
        most = limit if len(prefills) + len(self.waiting) <= 1 else max(1, int(limit * self.config.request_share))
        for request in prefills:
            if budget == 0:
                break
            if request.status is Status.WAITING:
                continue
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget, most)
            if self._make_room(request, request.num_computed_tokens + num_tokens, scheduled):
                scheduled[request] = self._work(request, num_tokens)
            budget = limit - sum(work.num_tokens for work in scheduled.values())
        if self.num_preemptions == before:
            budget = self._admit(scheduled, budget, most)
        if budget and most < limit:
            self._spread(scheduled, budget)
        return list(scheduled.values())

    def _fit(self, request: Request, draft: Draft, spare: int) -> Draft:
        """As much of a draft as may follow the request's tokens, cost, and be stored without taking from others."""
        total = len(request.token_ids)
        count = min(len(draft.token_ids), spare, request.max_num_tokens - total - 1)
        if count > 0 and not self.kv.grow(request, total + count):
            count = request.num_slots - total
        if count == len(draft.token_ids):
            return draft
        return NO_DRAFT if count <= 0 else Draft(draft.token_ids[:count], draft.probs)

    def _make_room(self, request: Request, num_tokens: int, scheduled: dict[Request, ScheduledRequest]) -> bool:
        """Blocks for a request, taken from those of the highest rank where none is free; False: from itself."""
        while not self.kv.grow(request, num_tokens):
            victim = self.running[-1]
            scheduled.pop(victim, None)
            self._preempt(victim)
            if victim is request:
                return False
        return True

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
        if not self.waiting or (static and self.running):
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
                reserved += self.kv.blocks_for(request.max_num_tokens)
                if reserved > self.kv.pool.num_blocks:
                    break
            self.kv.admit(request)
            cached = max(request.num_computed_tokens, request.num_swapped_tokens)
            num_tokens = min(request.num_tokens - cached, budget, most)
            needed = promised + self.kv.missing_blocks(request, request.num_tokens)
            if needed > self.kv.pool.num_free or not self.kv.grow(request, cached + num_tokens):
                self.kv.free(request)
                request.num_computed_tokens = 0
                break
            promised += self.kv.missing_blocks(request, request.num_tokens)
            if self.swap is not None:
                self.swap.restore(request, self.kv.block_size)
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
        return ScheduledRequest(request, start, num_tokens, request.block_table, sample)

    def launched(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Count a step as computed although its results are still to come, so that the next one can be scheduled."""
        for request, start, num_tokens, _, sample, _, _ in scheduled:
            request.num_computed_tokens = start + num_tokens
            request.num_in_flight += sample

    def _preempt(self, request: Request) -> None:
        """Take a running request off the device; it waits in line by its rank, to start over or to be swapped back."""
        if self.swap is not None:
            self.swap.store(request, self.kv.block_size)
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = Status.WAITING
        insort(self.waiting, request, key=_RANK)
        self.num_preemptions += 1

    def take_copies(self) -> list[BlockCopy]:
        """What must be copied between device and host before the next step computes; each copy is given once."""
        return self.swap.take_copies() if self.swap is not None else []

    def copies_failed(self, copies: Sequence[BlockCopy]) -> None:
        """Those whose blocks did not reach the host are recomputed."""
        for copy in copies:
            if copy.out and self.swap is not None and copy.request.host_blocks is copy.host_blocks:
                self.swap.drop(copy.request)

    def update(self, scheduled: Sequence[ScheduledRequest], results: Sequence[StepResult]) -> list[Request]:
        """Enter a step's results; returns the requests that have something new (a token, or their end)."""
        changed = []
        block_size, generated = self.kv.block_size, 0
        running, finished = Status.RUNNING, Status.FINISHED
        # unpacked, since this loop runs for every token: looking up each name takes longer
        for work, result in zip(scheduled, results, strict=True):
            request, start, num_tokens, _, sample, padding, draft = work
            token, logprobs, prompt_scores, num_scored, error, accepted, _ = result
            status = request.status
            if padding or status is finished:
                continue
            if error is not None:
                log.error("request %s ends with an error: %s", request.request_id, error)
                request.prompt_scores.extend(prompt_scores)
                self.finish(request, "error", error)
                changed.append(request)
                continue
            done, drafted = start + num_tokens, draft is not NO_DRAFT
            if drafted:
                done += accepted - len(draft.token_ids)
            if start < request.num_prompt_tokens:
                self.prompt_tokens += min(done, request.num_prompt_tokens) - start
            if request.num_in_flight:
                request.num_in_flight -= sample
            ended = None
            if token is not None:
                if request.first_token is None:
                    request.first_token = time.monotonic()
                if drafted:
                    ended = self._take(request, work, result)
                else:
                    token_ids = request.token_ids
                    token_ids.append(token)
                    if logprobs is not None:
                        request.logprobs.append(logprobs)
                    generated += 1
                    total = len(token_ids)
                    if (
                        token in request.stop_token_ids
                        or total >= request.max_num_tokens
                        or request.matcher is not None
                    ):
                        ended = _end(request, token, total)
            if status is running:  # else preempted while the step was on the device: it starts over
                if done > request.num_computed_tokens or drafted:  # what was rejected is as if never computed
                    request.num_computed_tokens = done
                if num_tokens > 1 or not done % block_size:  # a block may have become full
                    self.kv.publish(request, min(done, len(request.token_ids)))
            if num_scored:
                request.prompt_scores.extend(prompt_scores)
                request.num_scored += num_scored
            if ended is not None:
                self.finish(request, *ended)
            if token is not None:
                changed.append(request)
            elif not request.generate and request.num_computed_tokens == request.num_tokens:
                self.finish(request, "stop")
                changed.append(request)
        self.generation_tokens += generated
        return changed

    def _take(self, request: Request, work: ScheduledRequest, result: StepResult) -> Ending | None:
        """Append the accepted tokens of a draft and the one after them, up to one that ends the request; why."""
        tokens = (*work.draft.token_ids[: result.accepted], result.token_id)
        logprobs = (*(result.accepted_logprobs or (None,) * result.accepted), result.logprobs)
        ended, count = None, 0
        for token, scores in zip(tokens, logprobs, strict=True):
            assert token is not None
            request.token_ids.append(token)
            if scores is not None:
                request.logprobs.append(scores)
            count += 1
            if (ended := _end(request, token, len(request.token_ids))) is not None:
                break
        request.num_drafted += len(work.draft.token_ids)
        request.num_accepted += min(count, result.accepted)
        self.generation_tokens += count
        return ended


def _end(request: Request, token: int, total: int) -> Ending | None:
    """Why a request ends with `token`, its `total`-th with those of the prompt; None: it goes on."""
    matcher = request.matcher
    if matcher is not None and matcher.misfit is not None:  # no token fitted, so that this one says nothing
        return _misfitted(request, matcher.misfit, total - 1)
    if token in request.stop_token_ids and total - request.num_prompt_tokens > request.params.min_tokens:
        return "stop", token
    if matcher is not None:
        matcher.accept(token)
        if matcher.misfit is not None:
            return _misfitted(request, matcher.misfit, total)
        if matcher.finished:
            return "stop", None
    return ("length", None) if total >= request.max_num_tokens else None


def _misfitted(request: Request, misfit: Misfit, total: int) -> Ending:
    """The end of a request whose first `total` tokens have its form."""
    if not misfit.limit:
        log.error("request %s left its form: %s", request.request_id, misfit.reason)
        return "error", f"the output left its form: {misfit.reason}"
    form = request.params.structured_outputs
    name = "form" if form is None else form.form
    count = total - request.num_prompt_tokens
    log.warning("request %s: its %s is too complex after %d tokens", request.request_id, name, count)
    return "refused", (
        f"structured_outputs: this {name} is too complex to go on after {count} tokens of output: give a simpler one "
        f"({misfit.reason})"
    )


def _remove(requests: list[Request], request: Request) -> None:
    del requests[bisect_left(requests, request.rank, key=_RANK)]
