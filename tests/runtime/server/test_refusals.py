"""What is refused, and that no request harms the engine or its neighbours."""

from __future__ import annotations

import json
import random
import socket
import string
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

MESSAGE = [{"role": "user", "content": "hi"}]


def refused(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    assert "\n" not in error["message"]
    return str(error["message"])


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 1e39}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"n": 128, "prompt": ["a"] * 10}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"seed": 2**70}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [2**70]}, "stop_token_ids"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[5], [2**40]], "echo": True}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"stream": "perhaps"}, "stream"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"priority": 101}, "priority"),
        ({"suffix": "end"}, "suffix"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {str(2**70): 1}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": "bad"}, "bad_words"),
        ({"typical_p": 0}, "typical_p"),
        ({"dynatemp_range": -1}, "dynatemp_range"),
        ({"use_beam_search": "often"}, "use_beam_search"),
        ({"use_beam_search": True, "length_penalty": 11}, "length_penalty"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}}, "response_format"),
        ({"structured_outputs": {"regex": "a["}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "root ::= nothing"}, "guided_grammar"),
        ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json"),
    ],
)
def test_bad_completion_fields(scripted: Any, change: dict[str, Any], param: str) -> None:
    body = {"model": "tiny", "prompt": "hello"} | change
    refused(httpx.post(f"{scripted[0]}/v1/completions", json=body), 400, param)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [*MESSAGE, {"role": "system", "content": "late"}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"logprobs": 5}, "logprobs"),
    ],
)
def test_bad_chat_fields(scripted: Any, change: dict[str, Any], param: str) -> None:
    body = {"model": "tiny", "messages": MESSAGE} | change
    refused(httpx.post(f"{scripted[0]}/v1/chat/completions", json=body), 400, param)


def test_combinations(scripted: Any) -> None:
    url = f"{scripted[0]}/v1"
    one = {"prompt": "a", "stream": False, "stream_options": {"include_usage": True}}
    assert "stream_options" in refused(httpx.post(f"{url}/completions", json=one), 400)
    two = {"messages": MESSAGE, "top_logprobs": 2}
    assert "top_logprobs" in refused(httpx.post(f"{url}/chat/completions", json=two), 400)
    three = {"prompt": "a", "min_tokens": 9, "max_tokens": 3}
    assert "min_tokens" in refused(httpx.post(f"{url}/completions", json=three), 400)
    best = {"prompt": "a", "best_of": 3, "stream": True}
    assert "best_of" in refused(httpx.post(f"{url}/completions", json=best), 400)
    few = {"prompt": "a", "n": 3, "best_of": 2}
    assert "best_of" in refused(httpx.post(f"{url}/completions", json=few), 400)
    wide = {"prompt": "a", "temperature": 0.5, "dynatemp_range": 0.6}
    assert "dynatemp_range" in refused(httpx.post(f"{url}/completions", json=wide), 400)
    beams: dict[str, Any] = {"prompt": "a", "use_beam_search": True, "n": 2}
    for change, field in (
        ({"stream": True}, "stream=true"),
        ({"top_p": 0.5}, "top_p"),
        ({"guided_regex": "a"}, "structured_outputs"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
    ):
        assert field in refused(httpx.post(f"{url}/completions", json=beams | change), 400)
    forms = {"prompt": "a", "guided_regex": "a", "response_format": {"type": "json_object"}}
    assert "do not go together" in refused(httpx.post(f"{url}/completions", json=forms), 400)
    both = {"prompt": "a", "structured_outputs": {"regex": "a", "choice": ["b"]}}
    assert "regex and choice" in refused(httpx.post(f"{url}/completions", json=both), 400)
    tokens = {"prompt": "a", "guided_regex": "a", "allowed_token_ids": [3]}
    assert "allowed_token_ids" in refused(httpx.post(f"{url}/completions", json=tokens), 400)
    four = refused(httpx.post(f"{url}/completions", json={"prompt": "a", "max_tokens": 0}), 400)
    assert four == "max_tokens must be at least 1 unless echo is true"
    assert "vocabulary" in refused(httpx.post(f"{url}/completions", json={"prompt": [[1], [70000]]}), 400)


def test_context_length(scripted: Any) -> None:
    url, engine = scripted
    long = [1] * engine.max_model_len
    code = "context_length_exceeded"
    refused(httpx.post(f"{url}/v1/completions", json={"prompt": long}), 400, "prompt", code)
    refused(httpx.post(f"{url}/v1/completions", json={"prompt": [1], "max_tokens": 512}), 400, "max_tokens", code)
    body = {"messages": [{"role": "user", "content": "x" * 600}]}
    refused(httpx.post(f"{url}/v1/chat/completions", json=body), 400, "messages", code)
    endless = "x" * 9_000_000  # minutes of one tokenizer that all clients share
    began = time.monotonic()
    message = refused(httpx.post(f"{url}/v1/completions", json={"prompt": endless}), 400, "prompt", code)
    assert "9000000 characters" in message
    body = {"messages": [{"role": "user", "content": endless}]}
    refused(httpx.post(f"{url}/v1/chat/completions", json=body), 400, "messages", code)
    assert time.monotonic() - began < 5
    fits = httpx.post(f"{url}/v1/completions", json={"prompt": long[:-1]})  # 16 by default, but 1 is left
    assert fits.json()["usage"]["completion_tokens"] == 1


def test_http_errors_are_openai_objects(scripted: Any) -> None:
    url = scripted[0]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-9", prompt="a")
    assert missing.value.code == "model_not_found"
    refused(httpx.get(f"{url}/v1/nothing"), 404)
    assert refused(httpx.get(f"{url}/v1/completions"), 405)
    json_type = {"content-type": "application/json"}
    for raw in (b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 50_000):
        refused(
            httpx.post(f"{url}/v1/completions", content=raw, headers=json_type),
            400,
            *(["prompt"] if b"ud800" in raw and b"prompt" not in raw else []),
        )
    big = b'{"prompt": "' + b"x" * (17 * 2**20) + b'"}'
    refused(httpx.post(f"{url}/v1/completions", content=big, headers=json_type), 413)


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_crash(
    scripted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = scripted[0].removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.2)
    time.sleep(0.2)
    assert httpx.get(f"{scripted[0]}/health").status_code == 200
    assert not caplog.records, caplog.text


def test_api_key(make_engine: Callable[..., Any], serve: Callable[..., Any]) -> None:
    with serve(make_engine(), api_key="open sesame") as url:
        body = {"prompt": "a"}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "open sesame"}):
            refused(httpx.post(f"{url}/v1/completions", json=body, headers=headers), 401, code="invalid_api_key")
        good = {"Authorization": "Bearer open sesame"}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=good).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/metrics").status_code == 200


def _hostile(rng: random.Random) -> Any:
    """A body with a few fields of the wrong, the extreme or the right kind."""
    values = [
        None,
        True,
        -1,
        0,
        1,
        2**31,
        2**63,
        10**400,
        1e308,
        -0.0,
        "",
        "x",
        "\x00",
        "💥" * 50,
        [],
        {},
        [[]],
        [None],
        [2**40],
        {"a": {"b": []}},
        ["a", 1],
        [[1], ["b"]],
        "a" * 5000,
    ]
    names = [
        "prompt",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "stop",
        "seed",
        "logprobs",
        "echo",
        "stream",
        "stream_options",
        "stop_token_ids",
        "min_tokens",
        "repetition_penalty",
        "logit_bias",
        "model",
        "messages",
        "top_logprobs",
        "ignore_eos",
        "max_completion_tokens",
        "".join(rng.choices(string.printable, k=5)),
    ]
    body: dict[str, Any] = {"prompt": "hello", "messages": MESSAGE, "max_tokens": 4}
    for _ in range(rng.randint(1, 4)):
        body[rng.choice(names)] = rng.choice(values)
    return body


def test_hostile_bodies_never_harm(make_engine: Callable[..., Any], serve: Callable[..., Any]) -> None:
    rng = random.Random(0)
    engine = make_engine(max_model_len=96)
    with serve(engine) as url, httpx.Client() as client:
        statuses = set()
        for number in range(400):
            path = ("completions", "chat/completions")[number % 2]
            raw = json.dumps(_hostile(rng)).encode()
            if number % 10 == 0:
                raw = raw[: rng.randrange(len(raw))] + bytes(rng.choices(range(256), k=3))
            response = client.post(f"{url}/v1/{path}", content=raw, headers={"content-type": "application/json"})
            statuses.add(response.status_code)
            if response.status_code >= 400:
                assert "error" in response.json()
        assert statuses <= {200, 400, 404}
        assert {200, 400} <= statuses
        assert client.get(f"{url}/health").status_code == 200
        answer = client.post(f"{url}/v1/completions", json={"prompt": [1, 2], "max_tokens": 20}).json()
        assert answer["choices"][0]["text"] == engine.text_of([1, 2], 20)
        assert not engine.has_unfinished()


def test_port_in_use_is_one_line() -> None:
    from qtool.quant.errors import QtoolError
    from qtool.runtime.server.launch import bind

    with bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP  # what asyncio looks at before it sets TCP_NODELAY
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(QtoolError, match=f"127.0.0.1:{port}.*--port"):
            bind("127.0.0.1", port)
    with pytest.raises(QtoolError, match="--port"):
        bind("127.0.0.1", 70000)
    with pytest.raises(QtoolError, match="--host"):
        bind("no such host", 0)
