"""The load generator over HTTP against our own server: what it counts, and what it says where it cannot."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from qtool.quant.errors import QtoolError
from qtool.runtime.bench import BenchRequest
from qtool.runtime.server.load_client import run_url, served_model


def test_counts_equal_the_servers(make_engine: Callable[..., Any], serve: Callable[..., Any], sample: Any) -> None:
    with serve(make_engine(step_s=0.001)) as url:
        card = served_model(url, None)
        assert (card["id"], card["max_model_len"]) == ("tiny", 512)
        load = [BenchRequest((65,) * (1 + i), 5 + i) for i in range(10)]
        result = run_url(url, "tiny", load, concurrency=3)
        assert (result.num_requests, result.num_failed) == (10, 0)
        assert result.prompt_tokens == sum(len(r.prompt) for r in load)
        assert result.output_tokens == sum(r.output_len for r in load)
        assert result.ttft is not None
        assert result.e2e is not None
        assert 0 < result.ttft.mean < result.e2e.mean
        label = '{model_name="tiny"}'
        assert sample(url, f"qtool_e2e_request_latency_seconds_count{label}") == 10
        assert sample(url, f"qtool_generation_tokens_total{label}") == result.output_tokens

        open_loop = run_url(url, "tiny", [BenchRequest((65,), 5, i / 50) for i in range(5)])
        assert open_loop.num_failed == 0
        assert open_loop.duration >= 4 / 50


def test_failures_are_counted(make_engine: Callable[..., Any], serve: Callable[..., Any]) -> None:
    with serve(make_engine(), api_key="key") as url:
        with pytest.raises(QtoolError, match="api-key"):
            served_model(url, None)
        load = [BenchRequest((65,), 5), BenchRequest((65,) * 600, 5), BenchRequest((65,), 6)]
        result = run_url(url, "tiny", load, concurrency=2, api_key="key")
        assert (result.num_failed, result.output_tokens) == (1, 11)
        assert result.first_error is not None
        assert "context" in result.first_error


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(QtoolError, match="qtool serve"):
        served_model(f"http://127.0.0.1:{port}", None)
    with pytest.raises(QtoolError):
        served_model("not a url", None)


def test_no_openai_server(monkeypatch: pytest.MonkeyPatch) -> None:
    request = httpx.Request("GET", "http://x/v1/models")
    for body in ("<html>", "{}", "[]", '{"data": []}', '{"data": [{}]}'):
        monkeypatch.setattr(httpx, "get", lambda *_, text=body, **__: httpx.Response(200, text=text, request=request))
        with pytest.raises(QtoolError, match="model list"):
            served_model("http://x", None)
