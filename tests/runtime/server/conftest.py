"""A byte-level tokenizer, a deterministic engine, and a real uvicorn on loopback around either."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qtool.quant.errors import QtoolError
from qtool.runtime.engine.core import EngineStats
from qtool.runtime.engine.params import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from qtool.runtime.executor.structured_output import GrammarCompiler

MISSING = [name for name in ("fastapi", "uvicorn", "zmq", "msgspec", "httpx", "openai") if util.find_spec(name) is None]


class Skipped(pytest.Module):
    """A test file of this folder where the server's packages are missing: the engine runs without them."""

    def collect(self) -> Any:
        pytest.skip(f"not installed: {', '.join(MISSING)}", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return Skipped.from_parent(parent, path=module_path) if MISSING else None


CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must come first') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"
)


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are bytes in GPT-2's printable order, 256 is end-of-sequence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    return make_byte_tokenizer()


@dataclass
class _Running:
    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: float
    token_ids: list[int]
    first_token: float | None = None


class ScriptedEngine:
    """Speaks a fixed text round and round, starting where the prompt's sum says; one token a request a step."""

    SCRIPT = "Grüße aus Köln — 日本語 und 🙂 noch mehr. "

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, max_model_len: int = 512, step_s: float = 0.0) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset([256])
        self.grammars = GrammarCompiler(tokenizer, 257, [256])
        self.max_model_len = max_model_len
        self.model_name = "scripted"
        self.step_s = step_s
        self.crash_at: int | None = None  # number of the step that raises
        self.fail_request: str | None = None  # ends with finish_reason "error"
        self.steps = 0
        self.threads: set[int] = set()
        self._script = tokenizer.encode(self.SCRIPT)
        self._running: dict[str, _Running] = {}

    def add_request(self, request_id: str, prompt: str | Sequence[int], params: SamplingParams) -> None:
        assert not isinstance(prompt, str)
        if any(token > 256 for token in prompt):
            raise QtoolError(f"token id {max(prompt)} is not in the vocabulary of 257 tokens")
        self._running[request_id] = _Running(request_id, tuple(prompt), params, time.monotonic(), [])

    def abort_request(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def has_unfinished(self) -> bool:
        return bool(self._running)

    def stats(self) -> EngineStats:
        used = sum(-(-(len(r.prompt) + len(r.token_ids)) // 16) for r in self._running.values())
        return EngineStats(len(self._running), 0, used, 1000, 16 * used, 16 * used, 0, 0, 0, self.steps, 0, 0)

    def step(self) -> list[RequestOutput]:
        self.threads.add(threading.get_ident())
        self.steps += 1
        if self.crash_at is not None and self.steps >= self.crash_at:
            raise RuntimeError("the device is on fire")
        time.sleep(self.step_s)
        return [self._advance(running) for running in list(self._running.values())]

    def text_of(self, prompt: Sequence[int], num_tokens: int) -> str:
        """What the engine says to a prompt, with a half character at the end shown as U+FFFD."""
        return str(self.tokenizer.decode(self._say(prompt, num_tokens)))

    def _say(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        start = sum(prompt)
        return [self._script[(start + i) % len(self._script)] for i in range(num_tokens)]

    def _advance(self, running: _Running) -> RequestOutput:
        now = time.monotonic()
        running.first_token = running.first_token or now
        running.token_ids = self._say(running.prompt, len(running.token_ids) + 1)
        params = running.params
        text = self.tokenizer.decode(running.token_ids)
        reason: str | None = "length" if len(running.token_ids) == params.max_tokens else None
        stop_reason = None
        for stop in params.stop:
            if stop in text:
                text, reason, stop_reason = text[: text.index(stop)], "stop", stop
        if running.request_id == self.fail_request:
            reason = "error"
        if reason is None:  # hold back half a character and what may become a stop string
            text = text.rstrip("\ufffd")
            text = text[: max(0, len(text) - max((len(s) - 1 for s in params.stop), default=0))]
        logprobs = None
        if params.logprobs is not None:
            top = {i: -0.5 - i for i in range(params.logprobs)}
            logprobs = tuple(TokenLogprobs(t, -t / 100, 1, top) for t in running.token_ids)
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = (None, *(TokenLogprobs(t, -t / 100, 1, {t: -t / 100}) for t in running.prompt[1:]))
        if reason is not None:
            del self._running[running.request_id]
        metrics = RequestMetrics(running.arrival, running.arrival, running.first_token, now if reason else None)
        outputs = tuple(
            CompletionOutput(i, text, tuple(running.token_ids), logprobs, reason, stop_reason) for i in range(params.n)
        )
        return RequestOutput(running.request_id, running.prompt, outputs, reason is not None, metrics, prompt_logprobs)


@contextmanager
def serving(engine: Any, step_timeout_s: float = 0.0, **options: Any) -> Iterator[str]:
    """A uvicorn server in a thread of its own around the engine; gives its base URL."""
    import uvicorn

    from qtool.runtime.server.app import create_app
    from qtool.runtime.server.async_engine import AsyncEngine
    from qtool.runtime.server.launch import bind, url_of

    listener = bind("127.0.0.1", 0)
    app = create_app(AsyncEngine(engine, step_timeout_s), **({"model_name": "tiny"} | options))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=10))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield url_of(listener)
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        listener.close()
    assert not thread.is_alive()


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.01)


def metric(url: str, name: str) -> float:
    """One sample of /metrics by its full name with labels, 0 where it is absent."""
    import httpx

    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith(name + " "):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


@pytest.fixture(scope="session")
def serve() -> Callable[..., Any]:
    return serving


@pytest.fixture(scope="session")
def sample() -> Callable[[str, str], float]:
    return metric


@pytest.fixture(scope="session")
def eventually() -> Callable[..., None]:
    return wait_until


@pytest.fixture
def make_engine(byte_tokenizer: PreTrainedTokenizerFast) -> Callable[..., ScriptedEngine]:
    return lambda **options: ScriptedEngine(byte_tokenizer, **options)


@pytest.fixture(scope="module")
def scripted(byte_tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[str, ScriptedEngine]]:
    """(base URL, engine) of a server that a whole test file shares."""
    engine = ScriptedEngine(byte_tokenizer)
    with serving(engine) as url:
        yield url, engine
