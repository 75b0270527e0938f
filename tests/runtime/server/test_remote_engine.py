"""Death and rebirth as the event loop sees them, with processes that do as they are told."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import zmq

from qtool.quant.errors import QtoolError
from qtool.runtime.engine.core import EngineStats
from qtool.runtime.engine.params import RequestMetrics, SamplingParams, StructuredOutputsParams
from qtool.runtime.engine.updates import OutputUpdate, RequestUpdate, StopFound
from qtool.runtime.memory_budget import MemoryBudget
from qtool.runtime.server import messages as m
from qtool.runtime.server import remote_engine
from qtool.runtime.server.engine_client import EngineDeadError, HangClock, StepReport
from qtool.runtime.server.engine_main import EngineSpec
from qtool.runtime.server.remote_engine import RemoteEngine, RestartPolicy

CONTEXT: zmq.Context[Any] = zmq.Context()
BUDGET = MemoryBudget("none", 0, 0, 0, False, 0, 0, 0)
OWN = SamplingParams(max_tokens=9)


def stats(generated: int) -> EngineStats:
    return EngineStats(0, 0, 0, 10, 0, 0, 0, 0, generated, 0, 0, 0)


def ready(generated: int = 0) -> m.Ready:
    return m.Ready(64 + generated, frozenset([0]), BUDGET, stats(generated))


class Process:
    """An EngineProcess without a process: it lives until `kill`."""

    def __init__(self, spec: EngineSpec | None = None) -> None:
        self.sentinel, self._life = os.pipe()
        self.reports = CONTEXT.socket(zmq.PULL)
        self._pusher = CONTEXT.socket(zmq.PUSH)
        self.reports.bind(f"inproc://{id(self)}")
        self._pusher.connect(f"inproc://{id(self)}")
        self.heard: list[m.Command] = []
        self.dead = threading.Event()
        self.closed = False
        self.answers: Callable[[m.Command], m.Report | None] = lambda command: None

    def send(self, command: m.Command) -> None:
        self.heard.append(m.decode_command(m.encode(command)))
        if (report := self.answers(command)) is not None:
            self.report(report)

    def report(self, report: m.Report) -> None:
        self._pusher.send(m.encode(report))

    def pending(self, most: float = 1e9) -> Iterator[m.Report]:
        while most > 0:
            most -= 1
            try:
                yield m.decode_report(self.reports.recv(zmq.NOBLOCK))
            except zmq.Again:
                return

    last_reports = pending

    def wait_ready(self) -> m.Ready:
        return ready(5)

    def kill(self) -> None:
        if not self.dead.is_set():
            self.dead.set()
            os.close(self._life)

    def end(self, patience_s: float) -> None:
        self.kill()

    def how_it_ended(self) -> str:
        return "killed by SIGTEST"

    def close(self) -> None:
        self.kill()
        if not self.closed:
            self.closed = True
            self.reports.close(linger=0)
            self._pusher.close(linger=0)
            os.close(self.sentinel)


class Bytes:
    """A token is a byte."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = True, clean_up_tokenization_spaces: Any = None) -> str:
        return bytes(token_ids).decode(errors="replace")


@dataclass
class Seen:
    """What the server's metrics are told."""

    steps: list[StepReport] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    restarts: list[EngineStats] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)


def with_engine(
    test: Callable[[RemoteEngine, Process, Seen], Awaitable[None]],
    policy: RestartPolicy | None = None,
    step_timeout_s: float = 0.0,
) -> None:
    """Run `test` on an event loop, and stop the engine after it."""

    async def run() -> None:
        process, seen = Process(), Seen()
        spec = EngineSpec("m", {})
        engine = RemoteEngine(spec, process, ready(), Bytes(), policy, step_timeout_s)  # type: ignore[arg-type]
        engine.on_step, engine.on_abort = seen.steps.append, seen.aborted.extend
        engine.on_restart, engine.on_hang = seen.restarts.append, seen.hangs.append
        process.answers = lambda c: m.Answer(c.call, stats=stats(1)) if hasattr(c, "call") else None
        engine.start()
        await test(engine, process, seen)
        await asyncio.wait_for(engine.stop(), timeout=30)
        assert not engine._streams
        assert not engine._calls

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not come true")


def step(*outputs: OutputUpdate) -> m.StepDone:
    return m.StepDone([RequestUpdate("a", list(outputs), None, RequestMetrics(1.0, 2.0, 3.0))], stats(1), 4.0)


def test_tokens_become_text_and_a_stop_string_is_told() -> None:
    async def test(engine: RemoteEngine, process: Process, seen: Seen) -> None:
        stream = await engine.submit({"a": ([1, 2], SamplingParams(max_tokens=9, stop=["END"]))})
        process.report(step(OutputUpdate(0, list(b"oneE"))))
        process.report(step(OutputUpdate(0, list(b"NDx"))))
        process.report(step(OutputUpdate(0, list(b"late"))))
        found = [output async for _, output in stream]
        assert [(o.outputs[0].text, o.finished) for o in found][-1] == ("one", True)
        await until(lambda: len(seen.steps) == 3)
        assert m.StopOutputs([StopFound("a", 0, "END")]) in process.heard
        assert [len(report.outputs) for report in seen.steps] == [1, 1, 0]
        assert (await engine.stats()).generation_tokens == 1

    with_engine(test)


def test_refusals_and_failures_are_the_callers() -> None:
    async def test(engine: RemoteEngine, process: Process, seen: Seen) -> None:
        process.answers = lambda c: m.Answer(c.call, "no", refused=True) if hasattr(c, "call") else None
        with pytest.raises(QtoolError, match="no"):
            await engine.submit({"a": ([1], OWN)})
        with pytest.raises(QtoolError, match="no"):
            await engine.check_form(StructuredOutputsParams(regex="a"))
        process.answers = lambda c: m.Answer(c.call, "broken") if hasattr(c, "call") else None
        with pytest.raises(RuntimeError, match="broken"):
            await engine.submit({"a": ([1], OWN)})
        with pytest.raises(QtoolError, match="cannot be passed"):
            await engine.submit({"a": ([2**70], OWN)})
        assert not engine._streams
        assert not engine._processor._entries

    with_engine(test)


def test_a_request_given_up_before_its_answer_is_aborted() -> None:
    async def test(engine: RemoteEngine, process: Process, seen: Seen) -> None:
        process.answers = lambda c: None
        task = asyncio.create_task(engine.submit({"a": ([1], OWN)}))
        await until(lambda: bool(process.heard))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert process.heard[-1] == m.Abort(["a"])
        assert seen.aborted == ["a"]

    with_engine(test)


def test_death_fails_everything_at_once_and_a_new_process_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "EngineProcess", Process)

    async def test(engine: RemoteEngine, process: Process, seen: Seen) -> None:
        stream = await engine.submit({"a": ([1], OWN), "b": ([2], OWN)})
        process.answers = lambda c: None
        asking = asyncio.create_task(engine.stats())
        await until(lambda: m.AskStats in map(type, process.heard))
        process.report(step(OutputUpdate(0, [65], None, "length")))  # its last words count
        process.kill()
        with pytest.raises(EngineDeadError, match="SIGTEST"):
            await asking
        outputs = aiter(stream)
        position, output = await anext(outputs)
        assert (position, output.finished) == (0, True)
        with pytest.raises(EngineDeadError, match="SIGTEST"):
            await anext(outputs)
        assert seen.aborted == ["b"]
        assert engine.error is not None
        with pytest.raises(EngineDeadError, match="started again"):
            await engine.submit({"c": ([1], OWN)})
        await until(lambda: engine.error is None)
        assert process.closed
        assert seen.restarts == [stats(5)]
        assert engine.max_model_len == 69
        engine._process.answers = lambda c: m.Answer(c.call)  # type: ignore[attr-defined]
        again = await engine.submit({"a": ([1], OWN)})
        engine._process.report(step(OutputUpdate(0, [66], None, "length")))  # type: ignore[attr-defined]
        assert [output.outputs[0].text async for _, output in again] == ["B"]

    with_engine(test, RestartPolicy(first_delay_s=0.05))


def test_an_engine_that_cannot_start_again_stays_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def refuse(spec: EngineSpec) -> Process:
        tries.append(spec)
        raise QtoolError("no memory")

    monkeypatch.setattr(remote_engine, "EngineProcess", refuse)

    async def test(engine: RemoteEngine, process: Process, seen: Seen) -> None:
        process.kill()
        await until(lambda: "again and again" in str(engine.error))
        assert len(tries) == 3
        assert engine.lost is engine.error
        with pytest.raises(EngineDeadError, match="restart the server"):
            await engine.submit({"a": ([1], OWN)})

    with_engine(test, RestartPolicy(most=3, first_delay_s=0.001))


def test_a_server_may_stop_while_its_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = threading.Event()

    class Slow(Process):
        def wait_ready(self) -> m.Ready:
            loading.set()
            assert self.dead.wait(timeout=30)
            raise QtoolError("killed")

    monkeypatch.setattr(remote_engine, "EngineProcess", Slow)

    async def test(engine: RemoteEngine, process: Process, seen: Seen) -> None:
        process.kill()
        await until(loading.is_set)
        await engine.stop()
        assert "stopping" in str(engine.error)
        assert isinstance(engine._process, Slow)
        assert engine._process.closed

    with_engine(test, RestartPolicy(first_delay_s=0.001))


def test_a_report_that_cannot_be_used_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "EngineProcess", Process)

    async def test(engine: RemoteEngine, process: Process, seen: Seen) -> None:
        stream = await engine.submit({"a": ([1], OWN)})
        process.report(step(OutputUpdate(7, [65])))  # there is no eighth output
        with pytest.raises(EngineDeadError):
            await anext(aiter(stream))
        await until(lambda: engine.error is None)
        assert len(seen.restarts) == 1

    with_engine(test, RestartPolicy(first_delay_s=0.001))


def test_the_clock_counts_what_it_looks_at() -> None:
    clock = HangClock(1.0)
    looks: list[tuple[float, object]] = [
        (0.0, None), (1.0, ("a",)), (2.0, ("a",)), (3.5, ("a",)), (4.5, ("b",)), (5.5, ("b",)), (6.5, None),
        (7.5, ("b",)), (8.5, ("b",)), (5000.0, ("b",)), (5001.0, ("b",)),
    ]  # fmt: skip
    found = [clock.look(now, waits) for now, waits in looks]
    assert found == [0, 0, 1, 2.5, 0, 1, 0, 0, 1, 3, 4]  # of an hour and more in which nobody looked, two ticks


@pytest.mark.parametrize("spinning", [False, True])
def test_a_process_that_hangs_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, spinning: bool
) -> None:
    monkeypatch.setattr(remote_engine, "EngineProcess", Process)
    reason = "the engine hangs: it finished no step in 0.3 s while requests waited"

    async def test(engine: RemoteEngine, process: Process, seen: Seen) -> None:
        stream = await engine.submit({"a": ([1], OWN)})
        for generated in range(8):  # longer than the limit in all
            process.report(m.StepDone([], stats(generated), 4.0))
            await asyncio.sleep(0.1)
        assert engine.error is None
        process.answers = lambda c: None
        waiting = asyncio.create_task(engine.submit({"b": ([2], OWN)}))

        async def scrape() -> None:
            while not process.dead.is_set():
                with suppress(TimeoutError, EngineDeadError):  # as /metrics asks: no sign of life, and no wait
                    await asyncio.wait_for(engine.stats(), 0.02)
                if spinning and not process.dead.is_set():  # it may have died during the await
                    process.report(m.StepDone([], stats(7), 4.0))
                await asyncio.sleep(0.02)

        await asyncio.wait_for(scrape(), timeout=30)
        assert str(engine.error) == f"{reason}; it is being started again"
        for ended in (anext(aiter(stream)), waiting):
            with pytest.raises(EngineDeadError, match="it is being started again"):
                await ended
        assert seen.hangs == [reason]
        assert sorted(seen.aborted) == ["a", "b"]
        assert reason in caplog.text
        await until(lambda: engine.error is None)
        assert process.closed
        assert len(seen.restarts) == 1
        engine._process.answers = lambda c: m.Answer(c.call)  # type: ignore[attr-defined]
        again = await engine.submit({"a": ([1], OWN)})
        engine._process.report(step(OutputUpdate(0, [66], None, "length")))  # type: ignore[attr-defined]
        assert [output.outputs[0].text async for _, output in again] == ["B"]
        assert engine.lost is None

    with_engine(test, RestartPolicy(first_delay_s=0.05), step_timeout_s=0.3)


def test_a_form_that_waits_is_a_sign_as_well_and_an_idle_engine_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "EngineProcess", Process)

    async def test(engine: RemoteEngine, process: Process, seen: Seen) -> None:
        await asyncio.sleep(0.3)
        assert engine.error is None
        process.answers = lambda c: None
        with pytest.raises(EngineDeadError, match="hangs"):
            await asyncio.wait_for(engine.check_form(StructuredOutputsParams(regex="a")), timeout=30)
        await until(lambda: engine.error is None)

    with_engine(test, RestartPolicy(first_delay_s=0.01), step_timeout_s=0.1)


def test_without_a_limit_a_step_may_take_for_ever() -> None:
    async def test(engine: RemoteEngine, process: Process, seen: Seen) -> None:
        await engine.submit({"a": ([1], OWN)})
        assert engine._watching is not None
        await asyncio.wait_for(engine._watching, timeout=30)
        assert engine.error is None

    with_engine(test)
