"""The real `run`: what still runs when the drain is over gets an OpenAI error, streamed or whole."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from qtool.quant.errors import QtoolError
from qtool.runtime.server.app import create_app
from qtool.runtime.server.async_engine import AsyncEngine
from qtool.runtime.server.launch import bind, run, url_of


@pytest.fixture
def own_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_requests_longer_than_the_drain_get_an_error(make_engine: Callable[..., Any], own_signals: None) -> None:
    engine = make_engine(step_s=0.05, max_model_len=100_000)
    client = AsyncEngine(engine)
    app = create_app(client, model_name="tiny")
    listener = bind("127.0.0.1", 0)
    url = f"{url_of(listener)}/v1/completions"
    body = {"prompt": "a", "max_tokens": 90_000}
    whole: list[httpx.Response] = []
    streamed: list[str] = []

    def ask_whole() -> None:
        whole.append(httpx.post(url, json=body, timeout=60))

    def ask_stream() -> None:
        with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as response:
            for line in response.iter_lines():
                if not streamed:
                    os.kill(os.getpid(), signal.SIGTERM)
                streamed.append(line)

    threads = [threading.Thread(target=ask) for ask in (ask_whole, ask_stream)]

    def on_ready() -> None:
        for thread in threads:
            thread.start()

    assert run(app, listener, on_ready=on_ready, drain_s=0.5, engine=client) == signal.SIGTERM
    for thread in threads:
        thread.join(timeout=30)
    assert whole[0].status_code == 500
    assert "stopping" in whole[0].json()["error"]["message"]
    events = [line.removeprefix("data: ") for line in streamed if line]
    assert events[-1] == "[DONE]"
    assert "stopping" in json.loads(events[-2])["error"]["message"]


def test_a_lost_engine_ends_the_server(make_engine: Callable[..., Any], own_signals: None) -> None:
    engine = make_engine()
    engine.crash_at = 3
    client = AsyncEngine(engine)
    app = create_app(client, model_name="tiny")
    listener = bind("127.0.0.1", 0)
    url = f"{url_of(listener)}/v1/completions"
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(httpx.post(url, json={"prompt": "a", "max_tokens": 9}, timeout=60))
    )
    with pytest.raises(QtoolError, match="crashed"):
        run(app, listener, on_ready=asking.start, drain_s=30, engine=client)
    asking.join(timeout=30)
    assert answers[0].status_code == 500


def test_a_signal_waits_until_the_engines_process_is_born() -> None:
    """Blocking it in one thread is not enough: another may catch it, and Python's handler runs in the main one."""
    from qtool.runtime.server.engine_process import _signals_held

    heard: list[int] = []
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    other.start()
    try:
        with _signals_held():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
            assert heard == []
        assert heard == [signal.SIGTERM]
    finally:
        over.set()
        other.join()
        signal.signal(signal.SIGTERM, before)
