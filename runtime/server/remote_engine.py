"""The engine in a process of its own, as the server's event loop sees it; a process that dies or hangs is replaced.

Tokens come from the engine's process and become text here, see engine_main.py for what is where.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qtool.quant.errors import QtoolError
from qtool.runtime.engine.core import EngineStats
from qtool.runtime.engine.params import SamplingParams, StructuredOutputsParams
from qtool.runtime.output_processor import OutputProcessor
from qtool.runtime.server.engine_client import END_PATIENCE_S, EngineClient, EngineDeadError, OutputStream, StepReport
from qtool.runtime.server.engine_main import EngineSpec
from qtool.runtime.server.engine_process import EngineProcess
from qtool.runtime.server.messages import (
    Abort,
    AddRequests,
    Answer,
    AskStats,
    CheckForm,
    NewRequest,
    Ready,
    Report,
    StepDone,
    StopOutputs,
    plain_form,
    plain_params,
)

logger = logging.getLogger(__name__)
REPORTS_AT_ONCE = 4  # before the event loop may see to other things


@dataclass
class RestartPolicy:
    """When a new process may take the place of one that died.

    Attributes:
        most: starts within `window_s` seconds; one more death, and the engine stays dead.
        first_delay_s, longest_delay_s: before the first of them, and each next one waits twice as long, up to the
            longest.
    """

    most: int = 5
    window_s: float = 600.0
    first_delay_s: float = 0.25
    longest_delay_s: float = 30.0
    _starts: deque[float] = field(default_factory=deque)

    def next_delay(self, now: float) -> float | None:
        """Seconds to wait before the next start, which counts; None: there were too many. `now` in seconds."""
        while self._starts and now - self._starts[0] > self.window_s:
            self._starts.popleft()
        if len(self._starts) >= self.most:
            return None
        delay = min(self.longest_delay_s, self.first_delay_s * 2.0 ** len(self._starts))
        self._starts.append(now)
        return delay


class RemoteEngine(EngineClient):
    """A client of an engine's process.

    When the process dies, every request in it ends with EngineDeadError at once, new ones are turned away, and a
    process with the same arguments is started, as often as `restarts` allows. One that hangs is killed.

    Args:
        spec: of `process`.
        process: just started or ready; this object ends it.
        ready: what it said when it was.
        tokenizer: the model's.
        step_timeout_s: as EngineClient.
    """

    def __init__(
        self,
        spec: EngineSpec,
        process: EngineProcess,
        ready: Ready,
        tokenizer: Any,
        restarts: RestartPolicy | None = None,
        step_timeout_s: float = 0.0,
    ) -> None:
        super().__init__(tokenizer, step_timeout_s)
        self._spec = spec
        self._process = process
        self._ready = ready
        self._restarts = restarts or RestartPolicy()
        self._processor = OutputProcessor(tokenizer)
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._call_ids = itertools.count()
        self._down: EngineDeadError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._stopped = asyncio.Lock()

    @property
    def max_model_len(self) -> int:
        return self._ready.max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._ready.eos_token_ids

    @property
    def baseline(self) -> EngineStats:
        return self._ready.stats

    @property
    def error(self) -> EngineDeadError | None:
        return self._down

    def start(self) -> None:
        self._watching = asyncio.get_running_loop().create_task(self._watch())
        self._hear_process()

    def _hear_process(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._process.sentinel, self._on_death)
        loop.add_reader(self._process.reports.FD, self._on_reports, self._process)
        loop.call_soon(self._on_reports, self._process)  # of what is there already, the file descriptor may not tell

    async def stop(self) -> None:
        self._stopping.set()
        if self._watching is not None:
            self._watching.cancel()
        first = self._down is None
        self._fail(EngineDeadError("the server is stopping"))
        async with self._stopped:
            if first:
                self._leave_process()
                await asyncio.to_thread(self._process.end, END_PATIENCE_S)
            else:  # dead, or on its way up
                self._process.kill()
            await asyncio.gather(*self._tasks)
            self._process.close()

    async def submit(self, requests: Mapping[str, tuple[Sequence[int], SamplingParams]]) -> OutputStream:
        if self._down is not None:
            raise self._down
        ids, now = list(requests), time.monotonic()
        stream = self._expect(ids)
        new = []
        for request_id, (prompt, params) in requests.items():
            self._processor.add(request_id, prompt, params)
            new.append(NewRequest(request_id, list(prompt), plain_params(params), now))
        try:
            await self._call(AddRequests(next(self._call_ids), new))
        except asyncio.CancelledError:
            self.abort(ids)
            raise
        except BaseException:
            self._forget(ids)
            raise
        return stream

    async def stats(self) -> EngineStats:
        answer = await self._call(AskStats(next(self._call_ids)))
        assert answer.stats is not None
        return answer.stats

    async def check_form(self, form: StructuredOutputsParams) -> None:
        await self._call(CheckForm(next(self._call_ids), plain_form(form)))

    def _abort(self, ids: Sequence[str]) -> None:
        self._process.send(Abort(list(ids)))

    def _waits(self) -> object:
        return super()._waits() or next(iter(self._calls), None)

    def _forget(self, ids: Iterable[str]) -> list[str]:
        known = super()._forget(ids)
        for request_id in known:
            self._processor.drop(request_id)
        return known

    async def _call(self, command: AddRequests | AskStats | CheckForm) -> Answer:
        """Give a command and wait for its answer. Raises what stands in it, and EngineDeadError."""
        if self._down is not None:
            raise self._down
        self._process.send(command)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[command.call] = future
        try:
            answer = await future
        finally:
            self._calls.pop(command.call, None)
        if answer.error is not None:
            raise QtoolError(answer.error) if answer.refused else RuntimeError(answer.error)
        return answer

    def _on_reports(self, process: EngineProcess) -> None:
        """Take what has come; the file descriptor tells only that something has since it was last looked for."""
        if process is not self._process or self._down is not None:
            return
        try:
            for report in process.pending(REPORTS_AT_ONCE):
                self._take(report)
        except Exception:  # an update is lost: what runs cannot be answered any more
            logger.exception("a report of the engine's process cannot be used; the process is killed")
            process.kill()
            return
        if process.reports.poll(0):
            asyncio.get_running_loop().call_soon(self._on_reports, process)

    def _take(self, report: Report) -> None:
        if isinstance(report, Answer):
            future = self._calls.get(report.call)
            if future is not None and not future.done():
                future.set_result(report)
        elif isinstance(report, StepDone):
            outputs, stops = self._processor.process(report.updates)
            if stops:
                self._process.send(StopOutputs(stops))
            self._deliver(StepReport(outputs, report.stats, report.time))

    # ---- death and rebirth ----

    def _leave_process(self) -> None:
        """Hear no more of the process."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._process.sentinel)
        loop.remove_reader(self._process.reports.FD)

    def _on_death(self) -> None:
        self._leave_process()
        try:
            for report in self._process.last_reports():
                self._take(report)
        except Exception:  # a report torn by the death: requests must still be answered
            logger.exception("the last reports of the engine's process cannot be used")
        reason = f"the engine's process ended ({self._process.how_it_ended()})"
        logger.critical("%s", reason)
        self._replace(reason)

    def _end_hung(self, reason: str) -> None:
        self._leave_process()
        self._process.kill()
        self._replace(reason)

    def _replace(self, reason: str) -> None:
        self._fail(EngineDeadError(f"{reason}; it is being started again"))
        task = asyncio.get_running_loop().create_task(self._restart())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _fail(self, error: EngineDeadError) -> None:
        """The engine does not run: end all that waits for it."""
        self._down = error
        for request_id in self._streams:
            self._processor.drop(request_id)
        self._fail_all(error)
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(error)

    async def _restart(self) -> None:
        await asyncio.to_thread(self._process.close)  # waits for its end, which a hung device may put off
        while (delay := self._restarts.next_delay(time.monotonic())) is not None:
            try:
                await asyncio.wait_for(self._stopping.wait(), delay)
                return
            except TimeoutError:
                logger.info("starting the engine again")
            try:
                self._process = await asyncio.to_thread(EngineProcess, self._spec)
                if self._stopping.is_set():
                    return
                self._ready = await asyncio.to_thread(self._process.wait_ready)
            except (QtoolError, OSError) as error:
                if self._stopping.is_set():
                    return
                logger.error("the engine could not be started again: %s", error)
                self._process.close()
                continue
            if not self._stopping.is_set():
                self._down = None
                self._hear_process()
                self.on_restart(self._ready.stats)
                logger.warning("the engine runs again")
            return
        self._down = self.lost = EngineDeadError("the engine's process ends again and again; restart the server")
        logger.critical("%s", self._down)
