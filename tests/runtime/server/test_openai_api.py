"""The OpenAI surface by the official client, over a real socket, with an engine whose answers are known."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest


@pytest.fixture(scope="module")
def client(scripted: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{scripted[0]}/v1", api_key="none", max_retries=0)


def test_completion_shape_and_usage(client: openai.OpenAI, scripted: Any) -> None:
    _, engine = scripted
    prompt = list(b"abc")
    answer = client.completions.create(model="tiny", prompt=[prompt], max_tokens=30)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == engine.text_of(prompt, 30)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 30, 33)


def test_prompt_forms_mean_the_same(client: openai.OpenAI, scripted: Any) -> None:
    tokenizer = scripted[1].tokenizer
    ids = tokenizer.encode("héllo")
    texts = {
        client.completions.create(model="tiny", prompt=form, max_tokens=20).choices[0].text  # type: ignore[arg-type]
        for form in ("héllo", ["héllo"], ids, [ids])
    }
    assert len(texts) == 1
    two = client.completions.create(model="tiny", prompt=["one", "two!"], max_tokens=5, n=2)
    assert [choice.index for choice in two.choices] == [0, 1, 2, 3]
    assert two.choices[2].text == scripted[1].text_of(tokenizer.encode("two!"), 5)
    assert two.usage is not None
    assert (two.usage.prompt_tokens, two.usage.completion_tokens) == (7, 20)


@pytest.mark.parametrize("num_tokens", [1, 7, 33, 60])
def test_stream_equals_the_whole(client: openai.OpenAI, num_tokens: int) -> None:
    whole = client.completions.create(model="tiny", prompt="xyz", max_tokens=num_tokens)
    chunks = list(client.completions.create(model="tiny", prompt="xyz", max_tokens=num_tokens, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) <= {None}
    assert all("\ufffd" not in chunk.choices[0].text for chunk in chunks[:-1])
    assert all(chunk.usage is None for chunk in chunks)


def test_raw_stream_ends_with_done_and_usage(scripted: Any) -> None:
    body = {"prompt": ["a", "b"], "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
    response = httpx.post(f"{scripted[0]}/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 18
    reasons = [c["finish_reason"] for event in events[:-2] for c in json.loads(event)["choices"]]
    assert sorted(r for r in reasons if r) == ["length", "length"]
    assert all("usage" not in json.loads(event) for event in events[:-2])


def test_continuous_usage_counts_up(scripted: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "a", "max_tokens": 9, "stream": True, "stream_options": options}
    text = httpx.post(f"{scripted[0]}/v1/completions", json=body).text
    counts = [json.loads(line[6:])["usage"]["completion_tokens"] for line in text.split("\n\n")[:-2]]
    assert counts == sorted(counts)
    assert counts[-1] == 9


def test_stop_string_is_neither_sent_nor_half_sent(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": "tiny", "prompt": "\x00", "max_tokens": 200, "stop": ["日本", "zzz"]}
    whole = client.completions.create(**arguments)
    chunks = list(client.completions.create(**arguments, stream=True))
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert "日" not in whole.choices[0].text


def test_null_and_unknown_fields_are_accepted(scripted: Any) -> None:
    body = {
        "model": "tiny",
        "prompt": "a",
        "max_tokens": 3,
        "stop": None,
        "ignore_eos": True,
        "user": "me",
        "n": None,
        "best_of": 1,
        "suffix": None,
        "logit_bias": {},
        "temperature": None,
        "top_k": -1,
        "brand_new_field": [1, 2],
    }
    assert httpx.post(f"{scripted[0]}/v1/completions", json=body).status_code == 200


def test_echo_and_completion_logprobs(client: openai.OpenAI, scripted: Any) -> None:
    tokenizer = scripted[1].tokenizer
    arguments: dict[str, Any] = {"model": "tiny", "prompt": "aé", "max_tokens": 12, "logprobs": 2, "echo": True}
    whole = client.completions.create(**arguments).choices[0]
    assert whole.text == "aé" + scripted[1].text_of(tokenizer.encode("aé"), 12)
    shown = whole.logprobs
    assert shown is not None
    assert shown.token_logprobs is not None
    assert shown.token_logprobs[0] is None
    assert shown.tokens is not None
    assert shown.tokens[:3] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert shown.text_offset is not None
    assert shown.text_offset[:4] == [0, 1, 1, 2]
    assert len(shown.tokens) == len(shown.token_logprobs) == 3 + 12
    assert shown.token_logprobs[5] == pytest.approx(-tokenizer.encode("aé" + whole.text[2:])[5] / 100)

    chunks = list(client.completions.create(**arguments, stream=True))
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [item for chunk in chunks for item in getattr(chunk.choices[0].logprobs, name)]
        assert joined == getattr(shown, name), name


def test_echo_alone_generates_nothing(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="hello", max_tokens=0, echo=True, logprobs=1)
    assert answer.choices[0].text == "hello"
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.tokens or ()) == 5
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_chat(client: openai.OpenAI, scripted: Any) -> None:
    tokenizer, engine = scripted[1].tokenizer, scripted[1]
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]},
    ]
    prompt = tokenizer.encode("<|system|>Be brief.\n<|user|>Hi there\n<|assistant|>")
    whole = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=25)
    assert whole.choices[0].message.content == engine.text_of(prompt, 25)
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(prompt)

    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=25, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 25
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["length"]


def test_chat_answers_to_the_end_of_the_context_by_default(client: openai.OpenAI, scripted: Any) -> None:
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "go on"}])
    assert answer.usage is not None
    assert answer.usage.total_tokens == scripted[1].max_model_len


def test_chat_logprobs(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 20,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = client.chat.completions.create(**arguments).choices[0]
    assert whole.logprobs is not None
    content = whole.logprobs.content or []
    assert len(content) == 20
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode(errors="replace") == whole.message.content
    assert all([top.logprob for top in entry.top_logprobs] == [-0.5, -1.5, -2.5] for entry in content)
    chunks = list(client.chat.completions.create(**arguments, stream=True))
    joined = [entry for c in chunks for entry in (c.choices[0].logprobs and c.choices[0].logprobs.content) or []]
    assert joined == content


def test_concurrent_requests_are_not_mixed_up(client: openai.OpenAI, scripted: Any) -> None:
    engine = scripted[1]

    def ask(number: int) -> None:
        prompt = [number % 256, 7, number % 13]
        length = 5 + number % 40
        if number % 2:
            text = client.completions.create(model="tiny", prompt=prompt, max_tokens=length).choices[0].text
        else:
            stream = client.completions.create(model="tiny", prompt=prompt, max_tokens=length, stream=True)
            text = "".join(chunk.choices[0].text for chunk in stream)
        assert text == engine.text_of(prompt, length)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(64)))


def test_models_health_version(client: openai.OpenAI, scripted: Any) -> None:
    assert [model.id for model in client.models.list().data] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert httpx.get(f"{scripted[0]}/health").status_code == 200
    assert httpx.get(f"{scripted[0]}/version").json()["version"]
    assert set(httpx.get(f"{scripted[0]}/openapi.json").json()["paths"]) >= {"/v1/completions", "/v1/chat/completions"}
