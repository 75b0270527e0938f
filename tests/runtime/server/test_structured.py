"""Forms of the output as OpenAI's and vLLM's clients ask for them, from the server around the real engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from qtool.quant.errors import QtoolError
from qtool.runtime.engine.structured_output import StructuredOutputsParams
from qtool.runtime.llm_engine import LLMEngine
from qtool.runtime.server.structured import StructuredOutputs


@pytest.fixture(scope="module")
def client(tiny_model: Any, serve: Any, byte_tokenizer: Any) -> Iterator[openai.OpenAI]:
    engine = LLMEngine(tiny_model(), device="cpu", max_num_seqs=8, kv_cache_memory=1 << 22)
    engine.tokenizer.chat_template = byte_tokenizer.chat_template
    with serve(engine) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


class Answer(BaseModel):
    word: Literal["yes", "no"]
    digit: Literal[1, 2, 3]


def test_a_pydantic_model_comes_back_parsed(client: openai.OpenAI) -> None:
    done = client.chat.completions.parse(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        response_format=Answer,
        max_tokens=200,
        extra_body={"logit_bias": {str(t): -100 for t in whitespace(client)}},
    )
    assert isinstance(done.choices[0].message.parsed, Answer)
    assert done.choices[0].finish_reason == "stop"


def whitespace(client: openai.OpenAI) -> list[int]:
    """Token ids of the byte tokenizer's spaces and line ends: a random model would write nothing else for long."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    return [alphabet.index(char) + 1 for char in "ĠĊčĉ"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"guided_regex": "[a-f]{3}[0-9]"}, "[a-f]{3}[0-9]"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"structured_outputs": {"choice": ["up", "down"]}}, "up|down"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-2]'}}, "x[0-2]"),
        ({"guided_json": {"enum": ["a", 7]}}, '"a"|7'),
        (
            {"structured_outputs": {"json": {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2},
                                    "disable_any_whitespace": True}},
            r"\[1,1\]",
        ),
        ({"response_format": {"type": "text"}, "guided_regex": "z"}, "z"),
    ],
    ids=lambda p: next(iter(p)) if isinstance(p, dict) else "",
)  # fmt: skip
def test_completions_have_the_form(client: openai.OpenAI, stream: bool, body: dict[str, Any], pattern: str) -> None:
    found: Any = client.completions.create(
        model="tiny", prompt=["a", "b"], max_tokens=100, n=2, extra_body=body, stream=stream
    )
    texts = [""] * 4
    for part in found if stream else [found]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert all(re.fullmatch(pattern, text) for text in texts), texts


def test_an_empty_schema_is_a_form() -> None:
    """Any JSON, which is not any text; an empty expression is refused, not passed over."""
    assert StructuredOutputs.model_validate({"json": {}}).form() == StructuredOutputsParams(json={})
    assert StructuredOutputs.model_validate({"json_object": False, "regex": None}).form() is None
    with pytest.raises(QtoolError, match="regex must be a text, not empty"):
        StructuredOutputs.model_validate({"regex": ""}).form()


def test_any_json_object(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model="tiny", prompt="a", max_tokens=200, extra_body={"response_format": {"type": "json_object"},
        "logit_bias": {str(t): 100 for t in closing(client)}},
    )  # fmt: skip
    assert isinstance(json.loads(done.choices[0].text), dict)


def closing(client: openai.OpenAI) -> list[int]:
    from tokenizers.pre_tokenizers import ByteLevel

    return [sorted(ByteLevel.alphabet()).index("}") + 1]


TOO_COMPLEX = "start: T\nT: /(a|b)*/ & ~/(a|b)*a(a|b){60}b(a|b)*/ & ~/(a|b)*b(a|b){60}a(a|b)*/"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "value"), [("guided_grammar", TOO_COMPLEX), ("structured_outputs", {"grammar": TOO_COMPLEX})]
)
def test_a_form_that_grows_too_complex_is_the_clients_to_mend(
    client: openai.OpenAI, sample: Any, field: str, value: Any, stream: bool
) -> None:
    """The tiny model writes either letter, and no lexer follows 60 of them."""
    url = str(client.base_url).removesuffix("/v1/")
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 200, "logit_bias": {"0": -100}, "stream": stream, field: value}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    if stream:
        assert answer.status_code == 200
        *chunks, last, end = [json.loads(e[6:]) if "{" in e else e for e in answer.text.strip().split("\n\n")]
        error = last["error"]
        assert chunks
        assert sum(len(choice["text"]) for chunk in chunks for choice in chunk["choices"]) > 60
        assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
        assert end == "data: [DONE]"
    else:
        assert answer.status_code == 400
        error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", field, "form_too_complex")
    assert "this grammar is too complex to go on after" in error["message"]
    assert "too many expressions constructed" in error["message"]
    assert httpx.get(f"{url}/health").status_code == 200
    label = '{model_name="tiny"}'
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert sample(url, f"qtool_{name}{label}") == 0
    done = client.completions.create(model="tiny", prompt="a", extra_body={"guided_choice": ["left", "right"]})
    assert done.choices[0].text in ("left", "right")
