"""From an application to a listening server: the port, the signals, the drain."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from qtool.quant.errors import QtoolError
from qtool.runtime.server.engine_client import EngineClient

LAST_WORDS_S = 5  # for the errors to reach the clients after the drain


def bind(host: str, port: int) -> socket.socket:
    """Reserve the address, before the model is loaded; port 0 takes a free one.

    Raises:
        QtoolError: the address is taken, or is not this machine's.
    """
    if not 0 <= port <= 65535:
        raise QtoolError(f"--port must be between 0 and 65535, got {port}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no host name"
        raise QtoolError(f"--host {host!r} is no address of this machine: {reason}") from error
    # named as TCP so that asyncio turns Nagle's algorithm off: it would cost 40 ms an answer
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise QtoolError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """The base URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


class _Server(uvicorn.Server):  # type: ignore[misc]
    """Says when it listens, and ends the engine when the drain has taken too long: every client then gets an error.
    Once the engine is lost it drains by itself.

    Attributes:
        ended_by: the first signal that it was sent.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        on_ready: Callable[[], None],
        drain_s: float,
        engine: EngineClient,
    ) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._drain_s = drain_s
        self._engine = engine
        self.ended_by: int | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.ended_by = self.ended_by or sig
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._engine.lost is not None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_drain())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_drain(self) -> None:
        await asyncio.sleep(self._drain_s)
        await self._engine.stop()


def run(
    app: FastAPI,
    listener: socket.socket,
    *,
    on_ready: Callable[[], None],
    drain_s: float,
    engine: EngineClient,
) -> int | None:
    """Serve until SIGINT or SIGTERM; then take no more, finish what runs for up to `drain_s` seconds, and return the
    signal.

    What still runs by then is answered with an error, the engine being stopped. A second Ctrl-C ends the wait.

    Raises:
        QtoolError: the engine is lost, so that whoever looks after the server knows that it needs a new one.
    """
    patience = math.ceil(drain_s) + LAST_WORDS_S
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=patience, lifespan="on"
    )
    server = _Server(config, on_ready, drain_s, engine)
    # uvicorn has handlers of its own while it runs, and raises a signal again after its shutdown for whoever had one
    # before: this one changes nothing by then, and obeys a signal that comes a moment too early for uvicorn's
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)
    try:
        server.run(sockets=[listener])
    finally:
        listener.close()
    if engine.lost is not None:
        raise QtoolError(str(engine.lost))
    return server.ended_by
