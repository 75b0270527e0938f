"""`qtool serve` with the engine in a process of its own: the answers are the engine's, whichever process dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from qtool.runtime.beam_search import BeamSearchParams
from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.llm import LLM

pytestmark = pytest.mark.slow  # three processes import torch
LABEL = '{model_name="tiny"}'


@dataclass
class Server:
    """A `qtool serve` of its own."""

    process: subprocess.Popen[str]
    url: str
    temporary: Path
    log: list[str]

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    @property
    def engine(self) -> psutil.Process:
        """The engine's process; multiprocessing has one of its own beside it."""
        (found,) = [
            child
            for child in psutil.Process(self.process.pid).children()
            if any("spawn_main" in part for part in child.cmdline())
        ]
        return found


@pytest.fixture(scope="module")
def folder(tiny_model: Any) -> Path:
    """A model with room for requests that take a while."""
    return Path(tiny_model(max_position_embeddings=4096))


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    temporary = tmp_path_factory.mktemp("t")
    command = [
        sys.executable, *(["-P"] if sys.flags.safe_path else []), "-c", "from qtool.cli.main import main; main()",
        "serve", str(folder), "--port", "0", "--served-model-name", "tiny", "--dtype", "float32",
        "--device", "cpu", "--max-num-seqs", "32", "--kv-cache-memory", "16MiB", "--drain-s", "5",
        "--step-timeout-s", "10",
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    )
    assert process.stderr is not None
    log: list[str] = []
    try:
        for line in process.stderr:
            log.append(line)
            if line.startswith("ready:"):
                break
        else:
            pytest.fail("".join(log))
        threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True).start()
        yield Server(process, line.split(" at ")[1].split("/v1 ")[0], temporary, log)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    """The same model without a server."""
    return LLM(folder, device="cpu", dtype="float32", kv_cache_memory=1 << 24)


def texts(answer: Any) -> list[str]:
    return [choice.text for choice in answer.choices]


PROMPTS = [[1 + (7 * i + j * j) % 250 for j in range(3 + 5 * i)] for i in range(16)]


def test_start_tells_the_memory_and_the_address(server: Server) -> None:
    text = "".join(server.log)
    assert re.search(r"KV cache +\d+\.\d\d MiB +32768 tokens", text)
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert server.engine.is_running()


def test_sixteen_at_once_answer_as_the_offline_engine(server: Server, llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=5, n=2, stop=["e", "\x03"], min_tokens=4)
    want = llm.generate(PROMPTS, params)
    assert {o.finish_reason for w in want for o in w.outputs} == {"stop", "length"}

    def ask(place: int) -> tuple[list[str], list[str | None]]:
        arguments: dict[str, Any] = {
            "model": "tiny", "prompt": [PROMPTS[place]], "max_tokens": 40, "temperature": 0.9, "seed": 5, "n": 2,
            "stop": ["e", "\x03"], "extra_body": {"min_tokens": 4},
        }  # fmt: skip
        if place % 2:
            whole = server.client.completions.create(**arguments)
            return texts(whole), [c.finish_reason for c in whole.choices]
        found, reasons = ["", ""], [None, None]
        for chunk in server.client.completions.create(**arguments, stream=True):
            for choice in chunk.choices:
                found[choice.index] += choice.text
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        return found, reasons

    with ThreadPoolExecutor(16) as pool:
        for got, expected in zip(pool.map(ask, range(16)), want):
            assert got == ([o.text for o in expected.outputs], [o.finish_reason for o in expected.outputs])


def test_logprobs_beams_and_forms_are_those_of_the_offline_engine(server: Server, llm: LLM) -> None:
    prompt = PROMPTS[3]
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=2, prompt_logprobs=2)
    (want,) = llm.generate([prompt], params)
    got = server.client.completions.create(
        model="tiny", prompt=[prompt], max_tokens=6, temperature=0, logprobs=2, echo=True
    )
    assert got.choices[0].logprobs is not None
    assert got.choices[0].logprobs.token_logprobs == [
        None,
        *(pytest.approx(entry.logprob, abs=1e-5) for entry in (want.prompt_logprobs or ())[1:] if entry),
        *(pytest.approx(entry.logprob, abs=1e-5) for entry in want.outputs[0].logprobs or ()),
    ]
    (beams,) = llm.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=5))
    searched = server.client.completions.create(
        model="tiny", prompt=[prompt], n=3, max_tokens=5, temperature=0, extra_body={"use_beam_search": True}
    )
    assert texts(searched) == [o.text for o in beams.outputs]
    form = {"structured_outputs": {"json": {"enum": ["a", 10**30]}}}
    (shaped,) = texts(server.client.completions.create(model="tiny", prompt="x", max_tokens=60, extra_body=form))
    assert json.loads(shaped) in ("a", 10**30)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": [[1], [2], [320]]}, "prompt token 0 is 320"),
        ({"prompt": [2**70]}, "prompt: must be a string, a list of strings, a list of token ids"),
        ({"guided_regex": "("}, "structured_outputs"),
        ({"logit_bias": {"5000": 1}}, "5000 is outside the vocabulary"),
    ],
)
def test_the_engines_refusals_arrive(server: Server, fields: dict[str, Any], message: str) -> None:
    response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"} | fields)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_a_disconnect_frees_the_request(server: Server, sample: Any, eventually: Any) -> None:
    body = {"prompt": [[1] * 50] * 20, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    aborted = f'qtool_request_success_total{{finished_reason="abort",{LABEL[1:]}'
    before = sample(server.url, aborted)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()  # kept: its end would be the response's
        next(lines)
        assert sample(server.url, f"qtool_num_requests_running{LABEL}") > 0
    eventually(lambda: sample(server.url, f"qtool_num_requests_running{LABEL}") == 0, timeout_s=60)
    assert sample(server.url, f"qtool_kv_cache_usage_perc{LABEL}") == 0
    assert sample(server.url, aborted) > before


def test_signals_for_the_whole_group_are_the_servers_to_obey(server: Server) -> None:
    engine = server.engine
    for number in (signal.SIGINT, signal.SIGTERM):
        engine.send_signal(number)
    answer = server.client.completions.create(model="tiny", prompt=[PROMPTS[5]], max_tokens=20)
    assert answer.usage is not None
    assert server.engine.pid == engine.pid


def test_a_killed_engine_fails_its_requests_and_is_replaced(server: Server, sample: Any, eventually: Any) -> None:
    url, before = server.url, server.engine.pid
    arguments: dict[str, Any] = {"model": "tiny", "prompt": [PROMPTS[2]], "max_tokens": 20, "temperature": 0}
    want = texts(server.client.completions.create(**arguments))
    body = {"prompt": [[5] * 20] * 8, "max_tokens": 4000, "ignore_eos": True}
    whole: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: whole.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60)))
    events: list[str] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            if not events:
                thread.start()
                eventually(lambda: sample(url, f"qtool_num_requests_running{LABEL}") > 8, timeout_s=60)
                os.kill(before, signal.SIGKILL)
            events += [line] if line else []
    thread.join()
    assert events[-1] == "data: [DONE]"
    error = json.loads(events[-2].removeprefix("data: "))["error"]
    assert error["type"] == "server_error"
    assert "SIGKILL" in error["message"]
    assert whole[0].status_code == 500
    assert "SIGKILL" in whole[0].json()["error"]["message"]
    health = httpx.get(f"{url}/health")
    assert health.status_code == 503
    assert "started again" in health.json()["error"]["message"]
    refused = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 503
    assert httpx.get(f"{url}/metrics").status_code == 200
    end = time.monotonic() + 300
    with httpx.Client() as http:
        while http.get(f"{url}/health").status_code != 200:
            assert time.monotonic() < end, "".join(server.log)
            time.sleep(0.2)
    assert server.engine.pid != before
    assert texts(server.client.completions.create(**arguments)) == want
    assert sample(url, f"qtool_engine_restarts_total{LABEL}") == 1
    assert sample(url, f"qtool_num_requests_running{LABEL}") == 0
    assert any("killed by SIGKILL" in line for line in server.log)
    assert len(list(server.temporary.iterdir())) == 1  # the sockets of the engine that runs


def test_a_stopped_engine_goes_on_or_is_replaced(server: Server, sample: Any, eventually: Any) -> None:
    url, engine = server.url, server.engine
    restarts = sample(url, f"qtool_engine_restarts_total{LABEL}")
    arguments: dict[str, Any] = {"model": "tiny", "prompt": [PROMPTS[4]], "max_tokens": 20, "temperature": 0}
    want = texts(server.client.completions.create(**arguments))
    engine.suspend()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: server.client.completions.create(**arguments))
        time.sleep(2)
        assert not asked.done()
        engine.resume()
        assert texts(asked.result()) == want  # in time
    assert server.engine.pid == engine.pid
    body = {"prompt": [5] * 20, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        next(lines)
        engine.suspend()
        late = httpx.post(f"{url}/v1/completions", json=arguments, timeout=60)
        *_, error, end = lines
    assert "finished no step in 10 s" in json.loads(error)["error"]["message"]
    assert end == "[DONE]"
    assert late.status_code == 503
    health = httpx.get(f"{url}/health")
    assert health.status_code == 503
    assert "finished no step in 10 s" in health.json()["error"]["message"]
    eventually(lambda: httpx.get(f"{url}/health").status_code == 200, timeout_s=300)
    assert not engine.is_running()
    assert server.engine.pid != engine.pid
    assert texts(server.client.completions.create(**arguments)) == want
    assert sample(url, f"qtool_engine_hangs_total{LABEL}") == 1
    assert sample(url, f"qtool_engine_restarts_total{LABEL}") == restarts + 1
    assert sample(url, f"qtool_num_requests_running{LABEL}") == 0
    assert any("the engine hangs" in line for line in server.log)
    assert len(list(server.temporary.iterdir())) == 1


def test_a_killed_server_leaves_nothing_behind(server: Server, eventually: Any) -> None:
    """The last test: the server is gone after it."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert len(children) >= 1
    server.process.kill()
    server.process.wait()
    eventually(lambda: not any(_lives(child) for child in children), timeout_s=60)
    eventually(lambda: not list(server.temporary.iterdir()))


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_a_model_that_is_refused_is_one_line(tmp_path: Path) -> None:
    from qtool.quant.errors import QtoolError
    from qtool.runtime.server.engine_main import EngineSpec
    from qtool.runtime.server.engine_process import EngineProcess

    process = EngineProcess(EngineSpec(str(tmp_path / "none"), {}))
    try:
        with pytest.raises(QtoolError, match="none") as caught:
            process.wait_ready()
    finally:
        process.close()
    assert "\n" not in str(caught.value)
    assert not Path(process._folder).exists()


def test_a_process_killed_while_it_loads_is_told_so(folder: Path) -> None:
    from qtool.quant.errors import QtoolError
    from qtool.runtime.server.engine_main import EngineSpec
    from qtool.runtime.server.engine_process import EngineProcess

    process = EngineProcess(EngineSpec(str(folder), {}))
    try:
        began = time.monotonic()
        process.kill()
        with pytest.raises(QtoolError, match="while it started: killed by SIGKILL"):
            process.wait_ready()
        assert time.monotonic() - began < 60  # told by the system, not by a timeout
    finally:
        process.close()


def test_an_engine_that_hangs_while_it_starts_is_given_up(folder: Path) -> None:
    import zmq

    from qtool.quant.errors import QtoolError
    from qtool.runtime.server.engine_main import EngineSpec, report_address
    from qtool.runtime.server.engine_process import EngineProcess
    from qtool.runtime.server.messages import Starting, encode

    process = EngineProcess(EngineSpec(str(folder), {}, start_timeout_s=2.0))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    engine = psutil.Process(process.pid)
    try:
        engine.suspend()
        with pytest.raises(QtoolError, match=r"no further in 2 s \(starting its process\).*--start-timeout-s"):
            process.wait_ready()
        outbox = context.socket(zmq.PUSH)  # from now on the test speaks in its name
        outbox.connect(report_address(process._folder))

        def advance() -> None:
            for layer in range(1, 9):
                outbox.send(encode(Starting("loading", layer, 30)))
                time.sleep(0.5)

        thread = threading.Thread(target=advance)
        began = time.monotonic()
        thread.start()
        with pytest.raises(QtoolError, match="loading: 8 of 30 done"):
            process.wait_ready()
        assert time.monotonic() - began > 5  # 3.5 s in which it moved did not count
        thread.join()
    finally:
        context.destroy(linger=0)
        process.close()
    assert not engine.is_running()


def test_an_engine_tells_how_far_it_has_come(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qtool.runtime.server import engine_process
    from qtool.runtime.server.engine_main import EngineSpec
    from qtool.runtime.server.messages import Report, Starting, decode_report

    heard: list[Report] = []

    def listen(data: bytes) -> Report:
        heard.append(decode_report(data))
        return heard[-1]

    monkeypatch.setattr(engine_process, "decode_report", listen)
    arguments = {"device": "cpu", "kv_cache_memory": 1 << 22}
    process = engine_process.EngineProcess(EngineSpec(str(folder), arguments, start_timeout_s=100.0))
    try:
        process.wait_ready()
    finally:
        process.close()
    told = [report for report in heard if isinstance(report, Starting)]
    assert told == [Starting("loading", 1, 2), Starting("loading", 2, 2), Starting("first steps", 0, 1)]


def test_a_crashed_engine_has_last_words(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    from qtool.runtime.server.engine_main import EngineSpec
    from qtool.runtime.server.engine_process import EngineProcess

    process = EngineProcess(EngineSpec(str(folder), {"device": "cpu", "kv_cache_memory": 1 << 22}))
    try:
        ready = process.wait_ready()
        assert ready.eos_token_ids == {0}
        process._commands.send(b"\xc1")  # no message: what the engine cannot understand ends it
        assert list(process.last_reports()) == []
        assert "MessagePack" in process.how_it_ended()
        assert "exit status" not in process.how_it_ended()
    finally:
        process.close()
    assert "the engine crashed" in caplog.text
    assert "Traceback" in caplog.text
