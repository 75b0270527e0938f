"""The engine's process: a model, the step loop, and two sockets to the server.

What is where, and why. The engine's process schedules, computes and samples, in token ids; the server's process has
HTTP, JSON, tokenization, detokenization and stop strings. A step's Python work in the server, above all turning tokens
into text, so runs beside the next step, not between two, and two processes have two interpreter locks. vLLM's V1 engine
(https://github.com/vllm-project/vllm) draws the line at the same place. A stop string is found a step late for it: what
the engine computed of that output meanwhile is thrown away, and the client sees nothing of it.

Three threads: one receives commands, one runs the step loop and touches the engine, one compiles forms. The sockets are
ZeroMQ's over Unix-domain sockets in a folder that only this user may enter; see messages.py for what is said. The
process ends when the server says so, when its engine crashes, or when the server is gone, however that happened.
Signals from a terminal or a service manager go to all processes at once: they are the server's to obey, which drains.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import queue
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zmq

from qtool.quant.errors import QtoolError
from qtool.runtime.server.messages import (
    Abort,
    AddRequests,
    Answer,
    AskStats,
    CheckForm,
    Command,
    Crashed,
    LogLine,
    Ready,
    Refused,
    Report,
    Shutdown,
    Starting,
    StepDone,
    StopOutputs,
    decode_command,
    encode,
)

if TYPE_CHECKING:
    from qtool.runtime.llm_engine import LLMEngine

logger = logging.getLogger(__name__)
LINGER_MS = 2000  # for the last reports to leave
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class EngineSpec:
    """What an engine's process is to run.

    Attributes:
        model, arguments: LLMEngine's.
        log_level: of qtool's own log.
        start_timeout_s: an engine that gets no further for so long before it is ready hangs, and is ended; 0: it may
            take as long as it likes.
    """

    model: str
    arguments: Mapping[str, Any]
    log_level: int = logging.WARNING
    start_timeout_s: float = 0.0


def command_address(folder: str) -> str:
    """Where commands go: the server binds, the engine's process connects."""
    return f"ipc://{folder}/commands"


def report_address(folder: str) -> str:
    """Where reports go."""
    return f"ipc://{folder}/reports"


class Outbox:
    """Sends reports, from any thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.LINGER, LINGER_MS)
        self._socket.connect(report_address(folder))
        self._lock = threading.Lock()

    def send(self, report: Report) -> None:
        data = encode(report)
        with self._lock:
            self._socket.send(data)

    def close(self) -> None:
        with self._lock:
            self._socket.close()


class LogForwarder(logging.Handler):
    """Log records become reports: the server knows where its log goes, and in which form."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self._outbox = outbox

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            if record.exc_info:
                text += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
            self._outbox.send(LogLine(record.name, record.levelno, text))
        except Exception:  # as every logging.Handler does
            self.handleError(record)


class EngineLoop:
    """Runs `engine.step_tokens()` while there is work, and obeys commands between two steps."""

    def __init__(self, engine: LLMEngine, outbox: Outbox) -> None:
        self._engine = engine
        self._outbox = outbox
        self._inbox: queue.SimpleQueue[Command | Exception] = queue.SimpleQueue()
        self._compile_thread = ThreadPoolExecutor(1, thread_name_prefix="qtool-forms")

    def receive(self, socket: zmq.Socket[bytes]) -> None:
        """Take commands from a socket until the last; a thread's whole life."""
        try:
            while True:
                command = decode_command(socket.recv())
                if isinstance(command, CheckForm):
                    self._compile_thread.submit(self._check_form, command)
                    continue
                self._inbox.put(command)
                if isinstance(command, Shutdown):
                    return
        except zmq.ContextTerminated:
            logger.debug("the engine ended before the server")
        except Exception as error:  # the two sides do not understand each other: no command is safe from now on
            self._inbox.put(error)
        finally:
            socket.close()

    def run(self) -> None:
        """Go on until the server says Shutdown. Raises what the engine raises, which is its end."""
        try:
            told = 0
            while self._obey(wait=not self._engine.has_unfinished()):
                if self._engine.has_unfinished():
                    updates, stats = self._engine.step_tokens(), self._engine.stats()
                    if updates or stats.num_steps != told:  # that a long prompt advances is news, too
                        self._outbox.send(StepDone(updates, stats, time.monotonic()))
                        told = stats.num_steps
        finally:
            self._compile_thread.shutdown(wait=False, cancel_futures=True)

    def _obey(self, wait: bool) -> bool:
        """Do what has been asked for; False after Shutdown."""
        while True:
            try:
                command = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if isinstance(command, Exception):
                raise command
            if isinstance(command, Shutdown):
                return False
            self._do(command)

    def _do(self, command: Command) -> None:
        engine = self._engine
        if isinstance(command, AddRequests):
            self._outbox.send(self._add(command))
        elif isinstance(command, Abort):
            for request_id in command.request_ids:
                engine.abort_request(request_id)
        elif isinstance(command, StopOutputs):
            for stop in command.stops:
                engine.finish_output(*stop)
        elif isinstance(command, AskStats):
            self._outbox.send(Answer(command.call, stats=engine.stats()))

    def _add(self, command: AddRequests) -> Answer:
        for done, new in enumerate(command.requests):
            try:
                self._engine.add_request(
                    new.request_id, new.prompt_token_ids, new.params, detokenize=False, arrival=new.arrival
                )
            except Exception as error:  # belongs to the caller alone
                for added in command.requests[:done]:
                    self._engine.abort_request(added.request_id)
                return _refusal(command.call, error)
        return Answer(command.call)

    def _check_form(self, command: CheckForm) -> None:
        try:
            self._engine.grammars.compile(command.form)
        except Exception as error:
            self._outbox.send(_refusal(command.call, error))
        else:
            self._outbox.send(Answer(command.call))


def _refusal(call: int, error: Exception) -> Answer:
    if isinstance(error, QtoolError):
        return Answer(call, str(error), refused=True)
    logger.error("a request failed before it was queued", exc_info=error)
    return Answer(call, f"{type(error).__name__}: {error}")


def run_engine_process(spec: EngineSpec, folder: str) -> None:
    """The process's whole life; `folder` has the server's sockets. Exit status 0: told to end, or model refused."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    faulthandler.enable()
    threading.Thread(target=_die_with_server, args=(folder,), name="qtool-parent", daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    commands = context.socket(zmq.PULL)
    commands.set(zmq.RCVHWM, 0)
    commands.connect(command_address(folder))
    outbox = Outbox(context, folder)
    logging.captureWarnings(True)
    logging.basicConfig(level=logging.WARNING, handlers=[LogForwarder(outbox)])
    logging.getLogger("qtool").setLevel(spec.log_level)
    status = 0
    try:
        _load_and_run(spec, commands, outbox)
    except QtoolError as error:
        outbox.send(Refused(str(error)))
    except BaseException as error:
        logger.critical("the engine crashed", exc_info=error)
        outbox.send(Crashed(f"{type(error).__name__}: {error}"))
        status = 1
    outbox.close()
    context.term()  # waits for the last reports
    os._exit(status)  # nothing is left to tidy up, and a crashed device may hang an orderly exit


def _load_and_run(spec: EngineSpec, commands: zmq.Socket[bytes], outbox: Outbox) -> None:
    def progress(what: str, done: int, total: int) -> None:
        outbox.send(Starting(what, done, total))

    try:
        from qtool.runtime.llm_engine import LLMEngine
        from qtool.runtime.warm_up import warm_up

        engine = LLMEngine(spec.model, progress=progress, **spec.arguments)
        progress("first steps", 0, 1)
        warm_up(engine)
    except BaseException:
        commands.close()
        raise
    loop = EngineLoop(engine, outbox)
    threading.Thread(target=loop.receive, args=(commands,), name="qtool-commands", daemon=True).start()
    outbox.send(Ready(engine.max_model_len, engine.eos_token_ids, engine.memory, engine.stats()))
    loop.run()


def _die_with_server(folder: str) -> None:
    """Wait for the server's end, which may come without a word, and leave nothing of either behind."""
    server = multiprocessing.parent_process()
    assert server is not None
    server.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
