"""What the server needs of an engine, wherever it runs: requests in, streams of outputs back, on the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qtool.runtime.engine.core import EngineStats
from qtool.runtime.engine.params import RequestOutput, SamplingParams, StructuredOutputsParams

logger = logging.getLogger(__name__)
END_PATIENCE_S = 5.0  # for the step that runs when the server stops
LONGEST_TICK_S = 1.0  # between two looks at an engine
REQUEST_FAILED = "the engine failed on this request; the server's log has the details"


class EngineDeadError(Exception):
    """The engine does not run: it crashed, hangs, is being started again, or the server is stopping."""


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


class HangClock:
    """Seconds for which somebody has waited and nothing has moved, seen by looks that are `tick_s` seconds apart.

    Time in which nobody could look, as of a server that was stopped together with its engine, does not count.
    """

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._looked = float("-inf")
        self._waits: object = None
        self._still_s = 0.0

    def look(self, now: float, waits: object) -> float:
        """`waits` is None where nobody waits, and equal for as long as nothing moves; `now` in seconds."""
        passed = min(now - self._looked, 2 * self._tick_s)
        self._still_s = self._still_s + passed if waits is not None and waits == self._waits else 0.0
        self._looked, self._waits = now, waits
        return self._still_s


def _ignore(_: Any) -> None:
    """Nobody listens."""


class EngineClient(ABC):
    """An engine as the event loop sees it; all of it is called there.

    Attributes:
        tokenizer: the model's; whoever uses it takes a copy.
        lost: why the engine will never run again; None: it runs, will, or was stopped.
        on_step: called after every step, before the step's outputs are delivered; outputs of requests that were given
            up are left out.
        on_abort: called with the ids of requests that were given up by their clients, or died with the engine.
        on_restart: called with the counts of an engine that takes the place of one that died.
        on_hang: called with what is said of an engine that hangs.

    Args:
        step_timeout_s: an engine that finishes no step for so long while somebody waits for it hangs, and is ended;
            0: it may take as long as it likes.
    """

    def __init__(self, tokenizer: Any, step_timeout_s: float = 0.0) -> None:
        self.tokenizer = tokenizer
        self.step_timeout_s = step_timeout_s
        self.lost: EngineDeadError | None = None
        self.on_step: Callable[[StepReport], None] = _ignore
        self.on_abort: Callable[[Sequence[str]], None] = _ignore
        self.on_restart: Callable[[EngineStats], None] = _ignore
        self.on_hang: Callable[[str], None] = _ignore
        self._newest: EngineStats | None = None  # of the last step
        self._streams: dict[str, tuple[OutputStream, int]] = {}

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""

    @property
    @abstractmethod
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end an output."""

    @property
    @abstractmethod
    def baseline(self) -> EngineStats:
        """The engine's counts before its first request."""

    @property
    @abstractmethod
    def error(self) -> EngineDeadError | None:
        """Why the engine does not run; None while it does."""

    @abstractmethod
    def start(self) -> None:
        """Begin; call from the event loop that will read the outputs."""

    @abstractmethod
    async def stop(self) -> None:
        """End the engine after the current step; requests that still run fail with EngineDeadError."""

    @abstractmethod
    async def submit(self, requests: Mapping[str, tuple[Sequence[int], SamplingParams]]) -> OutputStream:
        """Queue requests {id: (prompt token ids, params)}; all of them or none.

        Raises:
            QtoolError: the engine refuses one of them; the others are given up.
            EngineDeadError: the engine does not run.
        """

    @abstractmethod
    async def stats(self) -> EngineStats:
        """The engine's own account of itself. Raises EngineDeadError."""

    @abstractmethod
    async def check_form(self, form: StructuredOutputsParams) -> None:
        """Compile a form beside the engine's loop and keep it. Raises QtoolError where that fails; EngineDeadError."""

    @abstractmethod
    def _abort(self, ids: Sequence[str]) -> None:
        """Tell the engine, which runs, to give up these."""

    @abstractmethod
    def _end_hung(self, reason: str) -> None:
        """Be done with an engine that hangs: all that waits for it ends with an error."""

    def _waits(self) -> object:
        """What HangClock compares: None where nobody waits for the engine, and equal for as long as nothing moves."""
        return (self._newest,) if self._streams else None

    async def _watch(self) -> None:
        """End an engine that hangs; to be cancelled."""
        tick_s = min(LONGEST_TICK_S, self.step_timeout_s / 10)
        clock = HangClock(tick_s)
        while self.step_timeout_s:
            await asyncio.sleep(tick_s)
            if clock.look(time.monotonic(), self._waits()) >= self.step_timeout_s:
                reason = f"the engine hangs: it finished no step in {self.step_timeout_s:g} s while requests waited"
                logger.critical("%s", reason)
                self.on_hang(reason)
                self._end_hung(reason)

    def abort(self, ids: Sequence[str]) -> None:
        """Give up those of the requests that still run and free what they hold. Never raises for unknown ids."""
        running = self._forget(ids)
        if running and self.error is None:
            self.on_abort(running)
            self._abort(running)

    def _expect(self, ids: Sequence[str]) -> OutputStream:
        """Deliver outputs of these to one stream, positions by their order."""
        stream = OutputStream(len(ids))
        for position, request_id in enumerate(ids):
            self._streams[request_id] = (stream, position)
        return stream

    def _forget(self, ids: Iterable[str]) -> list[str]:
        return [request_id for request_id in ids if self._streams.pop(request_id, None) is not None]

    def _deliver(self, report: StepReport) -> None:
        self._newest = report.stats
        wanted = [output for output in report.outputs if output.request_id in self._streams]
        self.on_step(replace(report, outputs=wanted))
        for output in wanted:
            stream, position = self._streams[output.request_id]
            if output.finished:
                del self._streams[output.request_id]
            stream.put(position, output)

    def _fail_all(self, error: EngineDeadError) -> None:
        """End every stream with an error."""
        streams, self._streams = self._streams, {}
        if streams:
            self.on_abort(list(streams))
        for stream, _ in streams.values():
            stream.fail(error)
