"""One engine's process as the server holds it: its birth, its two sockets, its end."""

from __future__ import annotations

import atexit
import logging
import math
import multiprocessing
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import wait

import zmq

from qtool.quant.errors import QtoolError
from qtool.runtime.server.engine_client import LONGEST_TICK_S, HangClock
from qtool.runtime.server.engine_main import (
    STOP_SIGNALS,
    EngineSpec,
    command_address,
    report_address,
    run_engine_process,
)
from qtool.runtime.server.messages import (
    Command,
    Crashed,
    LogLine,
    Ready,
    Refused,
    Report,
    Shutdown,
    Starting,
    decode_report,
    encode,
)

LONGEST_ADDRESS = 100  # of a Unix-domain socket, in bytes; systems allow 104 to 108
POLL_MS = 200


class EngineProcess:
    """A process that runs an engine, started at once; `wait_ready` waits until it can be used.

    The process does not outlive this one: it notices its end, however that comes.

    Raises:
        QtoolError: the folder for temporary files is no place for sockets.
    """

    def __init__(self, spec: EngineSpec) -> None:
        resource_tracker.ensure_running()  # it would let signals through again when a process is born
        with _signals_held():
            self._folder = tempfile.mkdtemp(prefix="qtool-")  # for this user alone
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            try:
                if len(report_address(self._folder).encode()) > LONGEST_ADDRESS:
                    raise QtoolError(f"{self._folder}: too long a path for sockets; set TMPDIR to a shorter one")
                self._commands = self._bind(zmq.PUSH, command_address(self._folder))
                self.reports = self._bind(zmq.PULL, report_address(self._folder))
                self._process = multiprocessing.get_context("spawn").Process(
                    target=run_engine_process, args=(spec, self._folder), name="qtool-engine"
                )
                self._process.start()
            except BaseException:
                self._let_go()
                raise
            self._start_timeout_s = spec.start_timeout_s
            self._stage = Starting("starting its process", 0, 1)
            self._last_words: str | None = None
            atexit.register(self.close)

    def _bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM if kind == zmq.PUSH else zmq.RCVHWM, 0)
        socket.bind(address)
        return socket

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def sentinel(self) -> int:
        """A file descriptor that can be read from the moment that the process has ended."""
        return self._process.sentinel

    def wait_ready(self) -> Ready:
        """Wait until the model is loaded; what the engine logs meanwhile is logged here.

        Raises:
            QtoolError: the model is refused, the process ended, or it hangs.
        """
        poller = zmq.Poller()
        poller.register(self.reports, zmq.POLLIN)
        poller.register(self.sentinel, zmq.POLLIN | zmq.POLLERR)
        limit_s = self._start_timeout_s or math.inf
        tick_s = min(LONGEST_TICK_S, limit_s / 10)
        clock = HangClock(tick_s)
        while clock.look(time.monotonic(), self._stage) < limit_s:
            ended = self.sentinel in dict(poller.poll(math.ceil(1000 * tick_s)))
            for report in self.last_reports() if ended else self.pending():
                if isinstance(report, Ready):
                    return report
            if ended and self._process.exitcode == 0:
                raise QtoolError(self.how_it_ended())
            if ended:
                raise QtoolError(f"the engine's process ended while it started: {self.how_it_ended()}")
        raise QtoolError(
            f"the engine hangs while it starts: it got no further in {limit_s:g} s ({_in_words(self._stage)}); see "
            "whether the disk and the device answer, or raise --start-timeout-s where they are only slow"
        )

    def last_reports(self) -> Iterator[Report]:
        """What is left of a process that has ended."""
        self._process.join()
        if self._process.exitcode in (0, 1):  # by itself: its last words may still be on their way
            self.reports.poll(POLL_MS)
        return self.pending()

    def pending(self, most: float = math.inf) -> Iterator[Report]:
        """The reports that are there now, of up to `most` messages. Log lines are logged, last words kept for
        `how_it_ended`."""
        while (most := most - 1) >= 0:
            try:
                data = self.reports.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if (report := self._read(data)) is not None:
                yield report

    def _read(self, data: bytes) -> Report | None:
        """A report from its bytes; None for one that is dealt with here."""
        report = decode_report(data)
        if isinstance(report, LogLine):
            logging.getLogger(report.logger).log(report.level, "%s", report.text)
        elif isinstance(report, Starting):
            self._stage = report
        elif isinstance(report, Refused):
            self._last_words = report.message
        elif isinstance(report, Crashed):
            self._last_words = report.reason
        else:
            return report
        return None

    def send(self, command: Command) -> None:
        """Give a command; to a process that has just ended, in vain. Raises QtoolError for one that cannot be sent."""
        data = encode(command)
        try:
            self._commands.send(data, zmq.NOBLOCK)
        except zmq.Again:
            logging.getLogger(__name__).debug("the engine's process does not listen any more")

    def how_it_ended(self) -> str:
        """Its last words, the signal that killed it, or its exit status."""
        self._process.join()
        code = self._process.exitcode or 0
        if self._last_words is not None:
            return self._last_words
        if code >= 0:
            return f"exit status {code}"
        name = signal.Signals(-code).name
        return f"killed by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")

    def end(self, patience_s: float) -> None:
        """Ask the process to end after its step; after `patience_s` seconds it is killed."""
        self.send(Shutdown())
        if not wait([self.sentinel], patience_s):
            self._process.kill()
        self._process.join()

    def close(self) -> None:
        """Kill the process where it still runs, and leave nothing behind."""
        with _signals_held():
            self._process.kill()
            self._process.join()
            self._let_go()
            atexit.unregister(self.close)

    def kill(self) -> None:
        """Kill the process; whoever waits for it notices. May be called from any thread."""
        self._process.kill()

    def _let_go(self) -> None:
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


def _in_words(stage: Starting) -> str:
    return stage.what if stage.total == 1 else f"{stage.what}: {stage.done} of {stage.total} done"


@contextmanager
def _signals_held() -> Iterator[None]:
    """A process born here hears no Ctrl-C before it has said that it ignores them; and none ends this process while the
    other is half born or half gone: what its other threads catch meanwhile is raised again afterwards."""
    caught: list[int] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    except BaseException:  # by one that came before
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise
    handlers = {}
    if threading.current_thread() is threading.main_thread():  # the only one that may set them, and that runs them
        handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        handlers = {number: handler for number, handler in handlers.items() if handler is not None}
        for number in handlers:
            signal.signal(number, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for missed in dict.fromkeys(caught):
            signal.raise_signal(missed)
