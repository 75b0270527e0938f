"""The engine's loop in a thread of its own, and the bridge between it and the server's event loop.

The engine is touched by its thread alone: what the server wants of it travels as a function through a queue and runs
between two steps. What a step brings forth comes back in one call to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from qtool.runtime.engine.params import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from qtool.runtime.llm_engine import EngineStats, LLMEngine

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EngineDeadError(Exception):
    """The engine's loop has ended: by a crash, or because the server is stopping."""


@dataclass(frozen=True)
class StepReport:
    """What one step of the engine did. `time` is `time.monotonic()` at its end, in seconds."""

    outputs: Sequence[RequestOutput]
    stats: EngineStats
    time: float


class OutputStream:
    """The outputs of some requests as they grow: an async iterator of (position, RequestOutput).

    Outputs are cumulative, so a reader slower than the engine finds the newest state of each request and skips the
    ones between; memory does not grow with a slow reader. Ends when all requests have finished.
    """

    def __init__(self, count: int) -> None:
        self._newest: dict[int, RequestOutput] = {}
        self._unfinished = set(range(count))
        self._changed = asyncio.Event()
        self._error: Exception | None = None

    def put(self, position: int, output: RequestOutput) -> None:
        self._newest[position] = output
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        while self._unfinished:
            await self._changed.wait()
            self._changed.clear()
            newest, self._newest = self._newest, {}
            for position, output in newest.items():
                if output.finished:
                    self._unfinished.discard(position)
                yield position, output
            if self._error is not None and self._unfinished:
                raise self._error


class AsyncEngine:
    """Runs `engine.step()` while there is work; add and abort from the event loop.

    Args:
        engine: the synchronous engine; nobody else may touch it from `start` to `stop`.
        on_step: called on the event loop after every step, before the step's outputs are delivered; outputs of
            requests that were given up are left out.
        on_abort: called on the event loop with the ids of requests that were given up by their clients.
    """

    def __init__(
        self, engine: LLMEngine, *, on_step: Callable[[StepReport], None], on_abort: Callable[[Sequence[str]], None]
    ) -> None:
        self._engine = engine
        self._on_step = on_step
        self._on_abort = on_abort
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # between "is the loop alive?" and "put into its queue"
        self._dead: EngineDeadError | None = None
        self._stopping = False
        self._streams: dict[str, tuple[OutputStream, int]] = {}  # event loop only
        self._thread = threading.Thread(target=self._run, name="qtool-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def error(self) -> EngineDeadError | None:
        """Why the engine no longer runs; None while it does."""
        return self._dead

    def start(self) -> None:
        """Start the thread; call from the event loop that will read the outputs."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the loop after the current step; requests that still run fail with EngineDeadError."""
        if self._dead is None:
            self._call(self._set_stopping)
        await asyncio.to_thread(self._thread.join)

    async def submit(self, requests: Mapping[str, tuple[Sequence[int], SamplingParams]]) -> OutputStream:
        """Queue requests {id: (prompt token ids, params)}; all of them or none.

        Raises:
            QtoolError: the engine refuses one of them; the others are given up.
            EngineDeadError: the engine no longer runs.
        """
        stream = OutputStream(len(requests))
        ids = list(requests)
        for position, request_id in enumerate(ids):
            self._streams[request_id] = (stream, position)

        def add_all() -> None:
            for done, request_id in enumerate(ids):
                try:
                    self._engine.add_request(request_id, *requests[request_id])
                except BaseException:
                    for added in ids[:done]:
                        self._engine.abort_request(added)
                    raise

        try:
            await asyncio.wrap_future(self._call(add_all))
        except asyncio.CancelledError:
            self.abort(ids)
            raise
        except BaseException:
            self._forget(ids)
            raise
        return stream

    def abort(self, ids: Sequence[str]) -> None:
        """Give up those of the requests that still run and free what they hold. Never raises for unknown ids."""
        running = self._forget(ids)
        if not running or self._dead is not None:
            return
        self._on_abort(running)

        def abort_all() -> None:
            for request_id in running:
                self._engine.abort_request(request_id)

        self._call(abort_all)

    async def stats(self) -> EngineStats:
        """The engine's own account of itself. Raises EngineDeadError."""
        return await asyncio.wrap_future(self._call(self._engine.stats))

    def _forget(self, ids: Sequence[str]) -> list[str]:
        return [request_id for request_id in ids if self._streams.pop(request_id, None) is not None]

    def _call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the engine's thread between two steps."""
        future: Future[T] = Future()
        with self._lock:
            if self._dead is not None:
                future.set_exception(self._dead)
            else:
                self._calls.put((function, future))
        return future

    def _set_stopping(self) -> None:
        self._stopping = True

    # ---- on the engine's thread ----

    def _run(self) -> None:
        reason = "the server is stopping"
        try:
            while not self._stopping:
                self._answer_calls(wait=not self._engine.has_unfinished())
                if not self._stopping and self._engine.has_unfinished():
                    outputs = self._engine.step()
                    report = StepReport(outputs, self._engine.stats(), time.monotonic())
                    self._post(self._deliver, report)
        except BaseException as error:
            logger.critical("the engine's loop crashed", exc_info=error)
            reason = f"the engine crashed ({type(error).__name__}); restart the server"
        with self._lock:
            self._dead = EngineDeadError(reason)
            while not self._calls.empty():
                future = self._calls.get_nowait()[1]
                if future.set_running_or_notify_cancel():
                    future.set_exception(self._dead)
        self._post(self._fail_all, self._dead)

    def _answer_calls(self, wait: bool) -> None:
        while True:
            try:
                function, future = self._calls.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if not future.set_running_or_notify_cancel():  # the client went away before we came to it
                continue
            try:
                result = function()
            except Exception as error:  # belongs to the caller alone
                future.set_exception(error)
            else:
                future.set_result(result)

    def _post(self, function: Callable[[T], None], argument: T) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:  # the event loop is closed: nobody is left to hear it
            logger.debug("the event loop ended before the engine")

    # ---- on the event loop ----

    def _deliver(self, report: StepReport) -> None:
        wanted = [output for output in report.outputs if output.request_id in self._streams]
        self._on_step(replace(report, outputs=wanted))
        for output in wanted:
            stream, position = self._streams[output.request_id]
            if output.finished:
                del self._streams[output.request_id]
            stream.put(position, output)

    def _fail_all(self, error: EngineDeadError) -> None:
        streams, self._streams = self._streams, {}
        for stream, _ in streams.values():
            stream.fail(error)
