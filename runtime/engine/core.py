"""The engine's inner loop: schedule, execute, update. Knows an executor only by its methods. No torch here."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from qtool.quant.errors import QtoolError
from qtool.runtime.engine.kv_cache_manager import KVCacheManager
from qtool.runtime.engine.request import Request, ScheduledRequest, Status, StepResult
from qtool.runtime.engine.scheduler import Scheduler, SchedulerConfig
from qtool.runtime.engine.speculation import Speculator, decoding
from qtool.runtime.engine.swap import BlockCopy, SwapSpace

log = logging.getLogger(__name__)


class Executor(Protocol):
    """Computes steps. May raise: then only the step's own requests fail."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy KV blocks between device and host, in order, after all steps so far and before the next. Called only
        where there is a SwapSpace."""
        ...

    def submit(self, batch: Sequence[ScheduledRequest]) -> Any:
        """Begin a step; what it returns goes to `collect`, in the order of submission. With `run_ahead`, a token that
        the step before samples may be among its inputs: it lies past the end of the request's `token_ids`."""
        ...

    def collect(self, step: Any) -> list[StepResult]:
        """Wait for a step: a result for each piece of work, in order."""
        ...


@dataclass(frozen=True)
class EngineStats:
    """The engine at one moment. Slots are places for one token in the KV cache; totals count from the start."""

    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    kv_slots_allocated: int
    kv_slots_filled: int
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    num_steps: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_swaps: int = 0
    host_blocks_used: int = 0

    @property
    def kv_cache_usage(self) -> float:
        return self.kv_blocks_used / self.kv_blocks_total

    @property
    def kv_waste(self) -> float:
        """Share of the allocated slots that hold no token."""
        return 1 - self.kv_slots_filled / self.kv_slots_allocated if self.kv_slots_allocated else 0.0


@dataclass(frozen=True)
class _Ahead:
    """A step on the device.

    `handle` is the executor's, or the error that it raised; `began` by time.perf_counter(); `proposed`: drafts were
    wanted for it.
    """

    scheduled: list[ScheduledRequest]
    handle: Any
    began: float
    proposed: bool


class EngineCore:
    """Scheduler and executor in one step loop.

    Args:
        run_ahead: submit a step before the results of the one before are known, where all of its requests allow it, so
            that the device need not wait for the host. Outputs come one call of `step` later, and are the same.
        speculator: proposes tokens for a step to verify. Such a step waits for the one before, and the next for it.
        swap: host memory for the blocks of preempted requests; None: they are recomputed.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        executor: Executor,
        *,
        run_ahead: bool = False,
        speculator: Speculator | None = None,
        swap: SwapSpace | None = None,
    ) -> None:
        self.scheduler = Scheduler(config, kv, swap)
        self.kv = kv
        self.executor = executor
        self._run_ahead = run_ahead
        self._speculator = speculator
        self._entered = 0.0  # when the last step's results were, by time.perf_counter()
        self._ahead: _Ahead | None = None
        self._requests: dict[str, Request] = {}
        self._num_steps = 0

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises QtoolError for an id in use, or a request that could never run."""
        if request.request_id in self._requests:
            raise QtoolError(f"request id {request.request_id!r} is in use")
        self.scheduler.add(request)
        self._requests[request.request_id] = request

    def abort(self, request_id: str) -> Request | None:
        """End a request wherever it stands; None where there is none of that id (it may have ended by itself)."""
        return self.finish(request_id, "abort")

    def finish(self, request_id: str, reason: str, stop_reason: int | str | None = None) -> Request | None:
        """End a request from outside the loop (abort, a stop string) and free its blocks."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.finish(request, reason, stop_reason)
            self._forget(request)
            self._check_when_idle()
        return request

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def step(self) -> list[Request]:
        """Compute one step; returns the requests that got a token or ended. A failing step ends its own requests."""
        began = time.perf_counter()
        before, self._ahead = self._ahead, None
        if before is not None and not self._may_overlap(before):
            return self._enter(before)
        drafts = self._speculator.propose(decoding(self.scheduler.running)) if self._speculator else None
        scheduled = self.scheduler.schedule(drafts)
        if scheduled:
            self._num_steps += 1
            self._ahead = _Ahead(scheduled, self._submit(scheduled), began, drafts is not None)
        if before is None:
            if self._run_ahead or self._ahead is None:
                return []
            before, self._ahead = self._ahead, None
        return self._enter(before)

    def _may_overlap(self, step: _Ahead) -> bool:
        """The next step can be submitted before this one's results are known."""
        if isinstance(step.handle, Exception):  # its requests are to end, not to go on
            return False
        for request, _, _, _, _, _, draft in step.scheduled:
            if draft.token_ids or not request.may_run_ahead:
                return False
        if self._speculator is None:
            return True
        return not self._speculator.wanted([w.request for w in step.scheduled if w.sample])

    def _submit(self, scheduled: list[ScheduledRequest]) -> Any:
        copies = self.scheduler.take_copies()
        try:
            if copies:
                self.executor.copy_blocks(copies)
        except Exception as error:
            handle: Any = error
            self.scheduler.copies_failed(copies)
        else:
            handle = self._begin(scheduled)
        if self._run_ahead:
            self.scheduler.launched(scheduled)
        return handle

    def _begin(self, scheduled: list[ScheduledRequest]) -> Any:
        try:
            return self.executor.submit(scheduled)
        except Exception as error:
            return error

    def _enter(self, step: _Ahead) -> list[Request]:
        """Wait for a step and enter its results."""
        scheduled = step.scheduled
        try:
            if isinstance(step.handle, Exception):
                raise step.handle
            results = self.executor.collect(step.handle)
        except Exception as error:
            log.exception("a step failed; its %d requests end with an error, the others go on", len(scheduled))
            changed = [w.request for w in scheduled if w.request.status is not Status.FINISHED]
            for request in changed:
                self.scheduler.finish(request, "error", f"{type(error).__name__}: {error}")
        else:
            changed = self.scheduler.update(scheduled, results)
            if self._speculator is not None:
                now = time.perf_counter()
                self._speculator.observe(
                    scheduled, results, now - max(step.began, self._entered), proposed=step.proposed
                )
                self._entered = now
        finished = Status.FINISHED
        for request in changed:
            if request.status is finished:
                del self._requests[request.request_id]
                self._forget(request)
        self._check_when_idle()
        return changed

    def _forget(self, request: Request) -> None:
        if self._speculator is not None:
            self._speculator.forget(request)

    def check_integrity(self) -> None:
        """Raise RuntimeError where a block leaked, was freed twice, or a request is lost. Looks at every block."""
        self.kv.check_integrity()
        if self.scheduler.swap is not None:
            self.scheduler.swap.check_integrity(self.scheduler.waiting)
        self._check_when_idle()

    def _check_when_idle(self) -> None:
        """Once no request is left, all blocks are free again: in constant time, since requests wait for it."""
        swap = self.scheduler.swap
        if not self.scheduler.has_unfinished() and swap is not None and swap.num_used:
            raise RuntimeError(f"{swap.num_used} blocks of the swap space are held while no request waits")
        if not self.scheduler.has_unfinished() and self.kv.pool.num_used:
            raise RuntimeError(f"{self.kv.pool.num_used} KV-cache blocks are in use while no request runs")

    def stats(self) -> EngineStats:
        swap = self.scheduler.swap
        allocated = self.kv.pool.num_used * self.kv.block_size
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            kv_blocks_used=self.kv.pool.num_used,
            kv_blocks_total=self.kv.pool.num_blocks,
            kv_slots_allocated=allocated,
            kv_slots_filled=allocated - self.kv.num_unfilled_slots(),
            num_preemptions=self.scheduler.num_preemptions,
            prompt_tokens=self.scheduler.prompt_tokens,
            generation_tokens=self.scheduler.generation_tokens,
            num_steps=self._num_steps,
            prefix_cache_queries=self.kv.prefix_queries,
            prefix_cache_hits=self.kv.prefix_hits,
            num_drafts=self._speculator.num_drafts if self._speculator else 0,
            num_draft_tokens=self._speculator.num_draft_tokens if self._speculator else 0,
            num_accepted_tokens=self._speculator.num_accepted_tokens if self._speculator else 0,
            num_swaps=swap.num_swaps if swap is not None else 0,
            host_blocks_used=swap.num_used if swap is not None else 0,
        )
