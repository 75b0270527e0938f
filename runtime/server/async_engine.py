"""The engine's loop in a thread of its own, inside the server's process.

The engine is touched by its thread alone: what the server wants of it travels as a function through a queue and runs
between two steps. What a step brings forth comes back in one call to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from qtool.runtime.engine.core import EngineStats
from qtool.runtime.engine.params import SamplingParams, StructuredOutputsParams
from qtool.runtime.server.engine_client import END_PATIENCE_S, EngineClient, EngineDeadError, OutputStream, StepReport

if TYPE_CHECKING:
    from qtool.runtime.llm_engine import LLMEngine

logger = logging.getLogger(__name__)
T = TypeVar("T")


class AsyncEngine(EngineClient):
    """Runs `engine.step()` while there is work; add and abort from the event loop.

    A crash ends it for good, since nobody can say what state the process is in, and so does a step that hangs, since
    nobody can end a thread.

    Args:
        engine: the synchronous engine; nobody else may touch it from `start` to `stop`.
        step_timeout_s: as EngineClient.
    """

    def __init__(self, engine: LLMEngine, step_timeout_s: float = 0.0) -> None:
        super().__init__(engine.tokenizer, step_timeout_s)
        self._engine = engine
        self._baseline = engine.stats()
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # between "is the loop alive?" and "put into its queue"
        self._dead: EngineDeadError | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="qtool-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._engine.eos_token_ids

    @property
    def baseline(self) -> EngineStats:
        return self._baseline

    @property
    def error(self) -> EngineDeadError | None:
        return self._dead

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._watching = self._loop.create_task(self._watch())
        self._thread.start()

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._dead is None:
            self._call(self._set_stopping)
            await asyncio.to_thread(self._thread.join, END_PATIENCE_S)
        self._fail_all(self._die("the server is stopping"))

    async def submit(self, requests: Mapping[str, tuple[Sequence[int], SamplingParams]]) -> OutputStream:
        ids = list(requests)
        stream = self._expect(ids)

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

    async def stats(self) -> EngineStats:
        return await asyncio.wrap_future(self._call(self._engine.stats))

    async def check_form(self, form: StructuredOutputsParams) -> None:
        await asyncio.to_thread(self._engine.grammars.compile, form)

    def _abort(self, ids: Sequence[str]) -> None:
        def abort_all() -> None:
            for request_id in ids:
                self._engine.abort_request(request_id)

        self._call(abort_all)

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

    def _end_hung(self, reason: str) -> None:
        self.lost = self._die(f"{reason}; restart the server")
        self._fail_all(self.lost)

    def _die(self, reason: str) -> EngineDeadError:
        """Run nothing on the engine's thread from now on. Returns why, which is the first reason given."""
        with self._lock:
            self._stopping = True  # a thread that hangs may come back
            self._dead = self._dead or EngineDeadError(reason)
        with suppress(queue.Empty):
            while True:
                future = self._calls.get_nowait()[1]
                if future.set_running_or_notify_cancel():
                    future.set_exception(self._dead)
        return self._dead

    # ---- on the engine's thread ----

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._answer_calls(wait=not self._engine.has_unfinished())
                if not self._stopping and self._engine.has_unfinished():
                    outputs = self._engine.step()
                    report = StepReport(outputs, self._engine.stats(), time.monotonic())
                    self._post(self._deliver, report)
        except BaseException as error:
            logger.critical("the engine's loop crashed", exc_info=error)
            if not self._stopping:
                self.lost = self._die(f"the engine crashed ({type(error).__name__}); restart the server")
        self._post(self._fail_all, self._die("the server is stopping"))

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
