"""The engine's life behind the server: disconnects, crashes, failed requests, shutdown, and what is counted."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

LONG = {"prompt": "a", "max_tokens": 400}


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_frees_the_request(
    make_engine: Callable[..., Any], serve: Callable[..., Any], sample: Any, eventually: Any, stream: bool
) -> None:
    engine = make_engine(step_s=0.02)
    with serve(engine) as url:
        neighbour: list[httpx.Response] = []
        body = {"prompt": [5, 6], "max_tokens": 40}
        other = threading.Thread(
            target=lambda: neighbour.append(httpx.post(f"{url}/v1/completions", json=body, timeout=30))
        )
        other.start()
        if stream:
            with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/v1/completions", json=LONG, timeout=0.3)
        eventually(lambda: len(engine._running) <= 1)
        other.join()
        assert neighbour[0].json()["choices"][0]["text"] == engine.text_of([5, 6], 40)
        eventually(lambda: not engine.has_unfinished())
        label = '{model_name="tiny"}'
        assert sample(url, 'qtool_request_success_total{finished_reason="abort",model_name="tiny"}') == 1
        assert sample(url, f"qtool_num_requests_running{label}") == 0
        assert sample(url, f"qtool_kv_cache_usage_perc{label}") == 0
        assert sample(url, f"qtool_e2e_request_latency_seconds_count{label}") == 1


def test_engine_crash_fails_requests_and_health(make_engine: Callable[..., Any], serve: Callable[..., Any]) -> None:
    engine = make_engine(step_s=0.02)
    engine.crash_at = 10
    with serve(engine) as url:
        streamed: list[str] = []

        def stream() -> None:
            streamed.append(httpx.post(f"{url}/v1/completions", json=LONG | {"stream": True}, timeout=30).text)

        other = threading.Thread(target=stream)
        other.start()
        whole = httpx.post(f"{url}/v1/completions", json=LONG, timeout=30)
        other.join()
        assert whole.status_code == 500
        assert whole.json()["error"]["type"] == "server_error"
        events = streamed[0].strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:])["error"]["type"] == "server_error"
        assert httpx.get(f"{url}/health").status_code == 503
        assert httpx.post(f"{url}/v1/completions", json=LONG).status_code == 503
        assert httpx.get(f"{url}/metrics").status_code == 200


def test_a_step_that_blocks_ends_what_waits_for_it(
    make_engine: Callable[..., Any], serve: Callable[..., Any], sample: Any, eventually: Any
) -> None:
    engine, blocked, go_on = make_engine(step_s=0.01), threading.Event(), threading.Event()
    step = engine.step

    def step_or_block() -> Any:
        if engine.steps == 5:
            blocked.set()
            go_on.wait()
        return step()

    engine.step = step_or_block
    answers: dict[bool, httpx.Response] = {}

    def ask(stream: bool) -> None:
        answers[stream] = httpx.post(f"{url}/v1/completions", json=LONG | {"stream": stream}, timeout=30)

    with serve(engine, step_timeout_s=0.5) as url:
        others = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for other in others:
            other.start()
        assert blocked.wait(timeout=30)
        assert httpx.get(f"{url}/health").status_code == 200  # it may yet end
        late = httpx.post(f"{url}/v1/completions", json=LONG, timeout=30)  # queued behind the step
        for other in others:
            other.join()
        reason = "the engine hangs: it finished no step in 0.5 s while requests waited; restart the server"
        assert answers[False].status_code == 500
        assert answers[False].json()["error"] == {
            "message": reason, "type": "server_error", "param": None, "code": None
        }  # fmt: skip
        *_, error, end = answers[True].text.strip().split("\n\n")
        assert json.loads(error[6:])["error"]["message"] == reason
        assert end == "data: [DONE]"
        assert (late.status_code, late.json()["error"]["message"]) == (503, reason)
        health = httpx.get(f"{url}/health")
        assert (health.status_code, health.json()["error"]["message"]) == (503, reason)
        label = '{model_name="tiny"}'
        assert sample(url, f"qtool_engine_hangs_total{label}") == 1
        assert sample(url, 'qtool_request_success_total{finished_reason="abort",model_name="tiny"}') == 3
    go_on.set()  # only now: the server could stop without it
    eventually(lambda: not [t for t in threading.enumerate() if t.name == "qtool-engine"])


def test_slow_steps_are_no_hang(make_engine: Callable[..., Any], serve: Callable[..., Any]) -> None:
    with serve(make_engine(step_s=0.15), step_timeout_s=1.0) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 10}, timeout=30)
        assert answer.status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_server_stops_although_a_step_blocks(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from qtool.runtime.engine.params import SamplingParams
    from qtool.runtime.server import async_engine
    from qtool.runtime.server.engine_client import EngineDeadError

    monkeypatch.setattr(async_engine, "END_PATIENCE_S", 0.2)
    engine, go_on = make_engine(), threading.Event()
    engine.step = go_on.wait

    async def stop() -> None:
        bridge = async_engine.AsyncEngine(engine)
        bridge.start()
        stream = await bridge.submit({"a": ([1], SamplingParams())})
        await asyncio.wait_for(bridge.stop(), timeout=20)
        with pytest.raises(EngineDeadError, match="stopping"):
            await anext(aiter(stream))

    try:
        asyncio.run(stop())
    finally:
        go_on.set()


def test_a_failed_request_fails_alone(make_engine: Callable[..., Any], serve: Callable[..., Any]) -> None:
    engine = make_engine()
    with serve(engine) as url:
        add = engine.add_request

        def add_and_mark(request_id: str, prompt: Any, params: Any) -> None:
            if prompt[0] == 99:
                engine.fail_request = request_id
            add(request_id, prompt, params)

        engine.add_request = add_and_mark
        assert httpx.post(f"{url}/v1/completions", json={"prompt": [99]}).status_code == 500
        assert httpx.post(f"{url}/v1/completions", json={"prompt": [98]}).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_refused_prompt_takes_its_siblings_along(make_engine: Callable[..., Any], serve: Callable[..., Any]) -> None:
    engine = make_engine()
    with serve(engine) as url:
        response = httpx.post(f"{url}/v1/completions", json={"prompt": [[1], [2], [300]], "max_tokens": 100})
        assert response.status_code == 400
        assert not engine.has_unfinished()


def test_the_engine_stays_on_one_thread(make_engine: Callable[..., Any], serve: Callable[..., Any]) -> None:
    engine = make_engine()
    before = set(threading.enumerate())
    with serve(engine) as url:
        for _ in range(3):
            httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 3})
    assert len(engine.threads) == 1
    assert not [t for t in threading.enumerate() if t not in before and t.is_alive() and not t.daemon]
    assert not [t for t in threading.enumerate() if t.name == "qtool-engine"]


def test_shutdown_lets_running_requests_finish(
    make_engine: Callable[..., Any], serve: Callable[..., Any], eventually: Any
) -> None:
    engine = make_engine(step_s=0.01)
    answers: list[httpx.Response] = []
    with serve(engine) as url:
        body = {"prompt": [1], "max_tokens": 60}
        thread = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=30))
        )
        thread.start()
        eventually(engine.has_unfinished)
    thread.join()
    assert answers[0].json()["choices"][0]["text"] == engine.text_of([1], 60)


def test_a_slow_reader_skips_states_and_keeps_nothing() -> None:
    from qtool.runtime.engine.params import RequestMetrics, RequestOutput
    from qtool.runtime.server.engine_client import OutputStream

    async def read() -> list[tuple[int, bool]]:
        stream = OutputStream(2)
        for i in range(1000):
            for position in (0, 1):
                done = i == 999
                stream.put(position, RequestOutput(str(position), (1,), (), done, RequestMetrics(0.0)))
        assert len(stream._newest) == 2
        return [(position, output.finished) async for position, output in stream]

    assert asyncio.run(read()) == [(0, True), (1, True)]


def test_given_up_requests_leave_nothing_behind(make_engine: Callable[..., Any]) -> None:
    from qtool.runtime.engine.params import SamplingParams
    from qtool.runtime.server.async_engine import AsyncEngine
    from qtool.runtime.server.metrics import Metrics

    async def give_up() -> None:
        engine = make_engine(step_s=0.001)
        metrics = Metrics("tiny", engine.stats())
        bridge = AsyncEngine(engine)
        bridge.on_step, bridge.on_abort = metrics.on_step, metrics.on_abort
        bridge.start()
        for number in range(20):
            ids = [f"{number}-{i}" for i in range(3)]
            stream = await bridge.submit({i: ([1, 2], SamplingParams(max_tokens=400)) for i in ids})
            async for _ in stream:
                break
            bridge.abort(ids)
        await bridge.stats()  # answered after the last abort
        assert not engine.has_unfinished()
        assert not bridge._streams
        assert not metrics._seen
        await bridge.stop()

    asyncio.run(give_up())


def test_metrics_count_what_clients_count(
    make_engine: Callable[..., Any], serve: Callable[..., Any], sample: Any
) -> None:
    with serve(make_engine(), metrics_prefix="vllm:") as url:
        prompt_tokens = output_tokens = gaps = 0
        for number in range(1, 13):
            body = {"prompt": [1] * number, "max_tokens": 2 * number, "stream": number % 2 == 0}
            assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
            prompt_tokens += number
            output_tokens += 2 * number
            gaps += 2 * number - 1
        assert httpx.post(f"{url}/v1/completions", json={"prompt": []}).status_code == 400
        label = '{model_name="tiny"}'
        counts = {
            "prompt_tokens_total": prompt_tokens,
            "generation_tokens_total": output_tokens,
            "time_to_first_token_seconds_count": 12,
            "inter_token_latency_seconds_count": gaps,
            "request_time_per_output_token_seconds_count": 12,
            "e2e_request_latency_seconds_count": 12,
            "request_queue_time_seconds_count": 12,
            "request_prefill_time_seconds_count": 12,
            "request_decode_time_seconds_count": 12,
            "request_prompt_tokens_sum": prompt_tokens,
            "request_generation_tokens_sum": output_tokens,
            "iteration_tokens_total_sum": output_tokens,
        }
        for name, expected in counts.items():
            assert sample(url, f"vllm:{name}{label}") == expected, name
        assert sample(url, 'vllm:request_success_total{finished_reason="length",model_name="tiny"}') == 12
