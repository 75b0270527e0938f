"""The server around the real engine, on a tiny random Llama in float32; transformers is the judge."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
from fastapi.testclient import TestClient
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

from qtool.runtime import drafting
from qtool.runtime.engine.speculation import Speculator, StepCosts
from qtool.runtime.llm_engine import LLMEngine


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Path:
    """A random Llama of two layers with the byte tokenizer, saved as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=None,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def real(tiny_folder: Path, serve: Any) -> Iterator[tuple[str, LLMEngine]]:
    engine = LLMEngine(tiny_folder, dtype="float32", device="cpu", max_num_seqs=8, kv_cache_memory=16 * 2**20)
    with serve(engine) as url:
        yield url, engine


@pytest.fixture(scope="module")
def client(real: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{real[0]}/v1", api_key="none", max_retries=0)


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(7)
    return [rng.choices(range(256), k=rng.randint(1, 60)) for _ in range(count)]


def test_greedy_equals_transformers(client: openai.OpenAI, real: Any, reference: LlamaForCausalLM) -> None:
    names = _token_names(real[1].tokenizer)
    answers = client.completions.create(
        model="tiny", prompt=prompts(6), max_tokens=24, temperature=0, logprobs=0, extra_body={"ignore_eos": True}
    )
    for prompt, choice in zip(prompts(6), answers.choices):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(24):
                ids = torch.cat((ids, reference(ids).logits[:, -1:].argmax(-1)), dim=1)
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == [names[token] for token in ids[0, len(prompt) :].tolist()]


def test_logprobs_are_the_raw_log_softmax(client: openai.OpenAI, real: Any, reference: LlamaForCausalLM) -> None:
    prompt = prompts(3)[2]
    names = _token_names(real[1].tokenizer)
    body = {"ignore_eos": True, "top_k": 5, "repetition_penalty": 1.3}
    for temperature in (0.0, 0.5, 2.0):
        choice = client.completions.create(
            model="tiny",
            prompt=[prompt],
            max_tokens=12,
            temperature=temperature,
            logprobs=3,
            echo=True,
            seed=1,
            extra_body=body,
        ).choices[0]
        shown = choice.logprobs
        assert shown is not None
        assert shown.tokens is not None
        assert shown.token_logprobs is not None
        assert shown.top_logprobs is not None
        ids = [names.index(token) for token in shown.tokens]
        assert ids[: len(prompt)] == prompt
        assert len(ids) == len(prompt) + 12
        with torch.no_grad():
            expected = reference(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        assert shown.token_logprobs[0] is None
        for i in range(1, len(ids)):
            assert shown.token_logprobs[i] == pytest.approx(expected[i - 1, ids[i]].item(), abs=1e-4)
            best = expected[i - 1].topk(3)
            for value, token in zip(best.values, best.indices):
                assert shown.top_logprobs[i][names[int(token)]] == pytest.approx(value.item(), abs=1e-4)


def _byte_letters() -> dict[int, str]:
    """Byte → its letter in byte-level BPE, asked of the tokenizers library rather than of the table under test."""
    level = ByteLevel(add_prefix_space=False, use_regex=False)
    letters = {}
    for code in range(2048):  # one- and two-byte characters show all bytes up to 0xdf but 0xc0 and 0xc1
        letters |= dict(zip(chr(code).encode(), level.pre_tokenize_str(chr(code))[0][0]))
    return {byte: letters.get(byte, chr(byte)) for byte in range(256)}  # the others stand for themselves


def _token_names(tokenizer: Any) -> list[str]:
    """Token id → how the API must show it."""
    byte_of = {letter: byte for byte, letter in _byte_letters().items()}
    names = []
    for token in range(256):
        byte = byte_of[tokenizer.convert_ids_to_tokens(token)]
        names.append(chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}")
    return [*names, "<|end|>"]


def test_streams_equal_wholes_with_n_seed_and_stop(client: openai.OpenAI) -> None:
    for prompt in prompts(5):
        arguments: dict[str, Any] = {
            "model": "tiny",
            "prompt": [prompt],
            "max_tokens": 60,
            "temperature": 1.0,
            "seed": 11,
            "n": 3,
            "stop": ["e", "\x03"],
        }
        whole = client.completions.create(**arguments)
        texts, reasons = ["", "", ""], [[], [], []]  # type: tuple[list[str], list[list[str]]]
        for chunk in client.completions.create(**arguments, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                if choice.finish_reason:
                    reasons[choice.index].append(choice.finish_reason)
        assert texts == [choice.text for choice in whole.choices]
        assert reasons == [[choice.finish_reason] for choice in whole.choices]
        assert len(set(texts)) > 1
        assert not any("e" in text for text in texts)


def test_speculation_is_counted_for_each_request_and_in_all(
    tiny_folder: Path, client: openai.OpenAI, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "measure_step_costs", lambda *a, **k: StepCosts((1,), (1.0,), (0.0,), (0.0,)))
    monkeypatch.setattr(Speculator, "_pays", lambda *a: True)
    engine = LLMEngine(
        tiny_folder, dtype="float32", device="cpu", max_num_seqs=8, kv_cache_memory=1 << 24,
        speculative="prompt-lookup",
    )  # fmt: skip
    with serve(engine) as url:
        own = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        totals = {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
        for prompt in ([5, 6, 7, 8] * 6, [9, 10, 11] * 8):
            arguments: dict[str, Any] = {"model": "tiny", "prompt": [prompt], "max_tokens": 40, "temperature": 0}
            answer = own.completions.create(**arguments)
            assert answer.choices[0].text == client.completions.create(**arguments).choices[0].text
            assert answer.usage is not None
            details = answer.usage.completion_tokens_details
            assert details is not None
            assert details.accepted_prediction_tokens is not None
            assert details.rejected_prediction_tokens is not None
            assert 0 <= details.accepted_prediction_tokens < answer.usage.completion_tokens
            totals["num_accepted_tokens"] += details.accepted_prediction_tokens
            totals["num_draft_tokens"] += details.accepted_prediction_tokens + details.rejected_prediction_tokens
        text = httpx.get(f"{url}/metrics").text
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        for name in ("num_draft_tokens", "num_accepted_tokens"):
            found = [float(v) for k, v in lines.items() if k.startswith(f"qtool_spec_decode_{name}_total")]
            assert found == [totals[name]]
        assert totals["num_draft_tokens"] > 0


def test_many_at_once_answer_as_alone(client: openai.OpenAI) -> None:
    def ask(prompt: list[int]) -> str:
        return (
            client.completions.create(model="tiny", prompt=[prompt], max_tokens=30, temperature=0.8, seed=5)
            .choices[0]
            .text
        )

    alone = [ask(prompt) for prompt in prompts(12)]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, prompts(12))) == alone


def test_disconnect_frees_the_blocks(real: Any, eventually: Any, sample: Any) -> None:
    url, engine = real
    body = {"prompt": [[1] * 50] * 12, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        for _ in range(20):
            next(lines)
        assert sample(url, 'qtool_num_requests_running{model_name="tiny"}') > 0
    eventually(lambda: sample(url, 'qtool_num_requests_running{model_name="tiny"}') == 0)
    assert sample(url, 'qtool_num_requests_waiting{model_name="tiny"}') == 0
    assert sample(url, 'qtool_kv_cache_usage_perc{model_name="tiny"}') == 0
    assert not engine.has_unfinished()


def test_hostile_bodies_on_the_real_engine(real: Any) -> None:
    rng = random.Random(3)
    values = [
        None,
        True,
        -1,
        0,
        1,
        255,
        257,
        2**31,
        2**63 - 1,
        -(2**63),
        1e308,
        1e-300,
        "",
        "x",
        "\ufffd",
        [],
        [256],
        ["a", "b"],
        [[0], [256]],
        [[257]],
        "é" * 700,
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
        "stop_token_ids",
        "min_tokens",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ]
    with httpx.Client(timeout=60) as http:
        statuses = []
        for _ in range(250):
            body: dict[str, Any] = {"prompt": "hello", "max_tokens": 3}
            for _ in range(rng.randint(1, 4)):
                body[rng.choice(names)] = rng.choice(values)
            response = http.post(f"{real[0]}/v1/completions", json=body)
            statuses.append(response.status_code)
            assert response.status_code in (200, 400), (body, response.text)
            assert "server_error" not in response.text, (body, response.text)
        assert statuses.count(200) > 10
        assert http.get(f"{real[0]}/health").status_code == 200


@pytest.mark.slow
def test_serve_drains_on_sigterm_and_exits_with_0(
    tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory, eventually: Any
) -> None:
    temporary = tmp_path_factory.mktemp("t")
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from qtool.cli.main import main; main()",
            "serve",
            str(tiny_folder),
            "--port",
            "0",
            "--served-model-name",
            "tiny",
            "--api-key",
            "k",
            "--dtype",
            "float32",
            "--kv-cache-memory",
            "16MiB",
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    )
    watchdog = threading.Timer(240, process.kill)
    watchdog.start()
    try:
        assert process.stderr is not None
        ready = next(line for line in process.stderr if line.startswith("ready:"))
        url = ready.split(" at ")[1].split(" ")[0]
        client = openai.OpenAI(base_url=url, api_key="k", max_retries=0)
        stream = client.completions.create(
            model="tiny",
            prompt="a",
            max_tokens=1000,
            stream=True,
            extra_body={"ignore_eos": True},
            stream_options={"include_usage": True},
        )
        chunks = iter(stream)
        next(chunks)
        children = psutil.Process(process.pid).children(recursive=True)
        for each in (process, *children):  # as a service manager does it
            each.send_signal(signal.SIGTERM)
        last = list(chunks)[-1]
        assert last.usage is not None
        assert last.usage.completion_tokens == 1000
        assert process.wait(timeout=60) == 0
        eventually(lambda: not [child for child in children if child.is_running()])
        assert not list(temporary.iterdir())
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()


def test_bench_compares_static_batching(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from qtool.cli import bench

    bench.command(
        str(tiny_folder),
        compare_static=True,
        concurrency="6",
        num_requests=20,
        input_len=32,
        dtype="float32",
        kv_cache_memory="16MiB",
        quiet=True,
        json_result=True,
    )
    document = json.loads(capsys.readouterr().out)
    (continuous,), (static,) = document["results"], document["static"]
    assert continuous["output_tokens"] == static["output_tokens"]
    assert continuous["prompt_tokens"] == 20 * 32
    for run in (continuous, static):
        assert run["num_failed"] == 0
        assert run["kv"]["blocks_in_use_at_end"] == 0
        assert run["ttft"]["p50"] <= run["ttft"]["p99"] <= run["e2e"]["p99"]
    ratio = continuous["output_tokens_per_s"] / static["output_tokens_per_s"]
    assert document["continuous_over_static"] == [pytest.approx(ratio)]


@pytest.mark.model
@pytest.mark.slow
def test_official_client_on_the_default_model(default_model: Path, serve: Any) -> None:
    engine = LLMEngine(default_model, device="cpu", max_model_len=512, kv_cache_memory=64 * 2**20)
    with serve(engine) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        arguments: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "max_tokens": 24,
        }
        whole = client.chat.completions.create(**arguments).choices[0]
        assert "Paris" in (whole.message.content or "")
        chunks = list(client.chat.completions.create(**arguments, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
        assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [whole.finish_reason]


def test_sampling_is_steered_through_the_api(client: openai.OpenAI, real: Any) -> None:
    """The official client's own fields and the extensions: each output can only be what its fields allow."""
    text = real[1].tokenizer.decode
    letters = [65, 66, 67]

    def complete(**fields: Any) -> list[str]:
        extra = {"ignore_eos": True, "allowed_token_ids": letters} | fields.pop("extra_body", {})
        answer = client.completions.create(
            model="tiny", prompt=[1, 2, 3], max_tokens=40, seed=3, extra_body=extra, **fields
        )
        return [choice.text for choice in answer.choices]

    (free,) = complete()
    assert set(free) == {text([token]) for token in letters}
    assert complete(logit_bias={"66": 100})[0] == text([66]) * 40
    assert text([65]) not in complete(extra_body={"bad_words": [text([65])]})[0]
    assert complete(extra_body={"typical_p": 0.9, "dynatemp_range": 0.5, "priority": -3}) != [""]
    best = complete(n=2, best_of=5)
    every = complete(n=5)
    assert len(best) == 2
    assert set(best) <= set(every)
    with pytest.raises(openai.BadRequestError, match="300 is outside the vocabulary"):
        complete(logit_bias={"300": 1})


def test_in_process_serves_the_same(client: openai.OpenAI, tiny_folder: Path) -> None:
    """`qtool serve --in-process`: the engine in a thread, behind the same application."""
    from qtool.cli.serve import _engine_inside
    from qtool.runtime.server.app import create_app
    from qtool.runtime.server.async_engine import AsyncEngine

    options = {"dtype": "float32", "device": "cpu", "kv_cache_memory": 1 << 24}
    engine, memory = _engine_inside(str(tiny_folder), options, 600.0)
    assert isinstance(engine, AsyncEngine)
    assert memory.kv_cache <= 1 << 24
    arguments: dict[str, Any] = {"model": "tiny", "prompt": prompts(4)[3], "max_tokens": 20, "temperature": 0}
    with TestClient(create_app(engine, model_name="tiny")) as inside:
        answer = inside.post("/v1/completions", json=arguments).json()
    assert answer["choices"][0]["text"] == client.completions.create(**arguments).choices[0].text
