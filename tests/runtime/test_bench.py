"""The measurement against closed forms: an engine whose steps take one known time on a clock that it moves itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qtool.quant.errors import QtoolError
from qtool.runtime.bench import (
    LONG_OUTPUT,
    SHORT_OUTPUT,
    BenchRequest,
    RequestTiming,
    check_fits,
    mixed_workload,
    ordinary_tokens,
    read_trace,
    result_rows,
    run_engine,
    summarize,
)
from qtool.runtime.engine.core import EngineStats
from qtool.runtime.engine.params import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams

STEP = 0.5


class ClockworkEngine:
    """Every step takes STEP seconds and gives each of at most `slots` requests one token; 8 of 10 KV slots are full."""

    def __init__(self, slots: int = 1000) -> None:
        self.now = 100.0
        self.slots = slots
        self.most_running = 0
        self._requests: dict[str, tuple[tuple[int, ...], int, int]] = {}

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds

    def add_request(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        assert params.ignore_eos
        self._requests[request_id] = (tuple(prompt), params.max_tokens, 0)

    def stats(self) -> EngineStats:
        used = len(self._requests)
        return EngineStats(used, 0, used, 100, 10 * used, 8 * used, 0, 0, 0, 0, 0, 0)

    def step(self) -> list[RequestOutput]:
        self.now += STEP
        self.most_running = max(self.most_running, len(self._requests))
        outputs = []
        for request_id in list(self._requests)[: self.slots]:
            prompt, limit, done = self._requests.pop(request_id)
            done += 1
            if done < limit:
                self._requests[request_id] = (prompt, limit, done)
            choice = CompletionOutput(0, "", (0,) * done, None, "length" if done == limit else None)
            outputs.append(RequestOutput(request_id, prompt, (choice,), done == limit, RequestMetrics(0.0)))
        return outputs


def run(engine: ClockworkEngine, workload: list[BenchRequest], concurrency: int | None) -> Any:
    return run_engine(  # type: ignore[arg-type]
        engine, workload, concurrency=concurrency, clock=engine.clock, sleep=engine.sleep
    )


def test_closed_loop_of_one() -> None:
    lengths = [4, 1, 10]
    result = run(ClockworkEngine(), [BenchRequest((1,) * 3, n) for n in lengths], 1)
    assert result.duration == pytest.approx(15 * STEP)
    assert result.output_tokens_per_s == pytest.approx(1 / STEP)
    assert result.total_tokens_per_s == pytest.approx((15 + 9) / (15 * STEP))
    assert result.requests_per_s == pytest.approx(3 / (15 * STEP))
    assert (result.ttft.mean, result.ttft.p50, result.ttft.p99) == pytest.approx((STEP, STEP, STEP))
    assert result.tpot.mean == pytest.approx(STEP)  # the request of one token has none
    assert result.itl.mean == pytest.approx(STEP)
    assert result.e2e.mean == pytest.approx(5 * STEP)
    assert result.e2e.p99 == pytest.approx(STEP * np.percentile(lengths, 99))
    assert result.kv.waste == pytest.approx(0.2)
    assert result.kv.blocks_in_use_at_end == 0


def test_closed_loop_keeps_the_concurrency() -> None:
    engine = ClockworkEngine()
    result = run(engine, [BenchRequest((1,), 8) for _ in range(12)], 4)
    assert engine.most_running == 4
    assert result.duration == pytest.approx(3 * 8 * STEP)
    assert result.output_tokens_per_s == pytest.approx(4 / STEP)
    assert result.kv.peak_blocks == 4


def test_waiting_counts_in_ttft_and_stalls_in_itl() -> None:
    # two requests, one slot that serves them in turn: tokens of each come every second step
    result = run(ClockworkEngine(slots=1), [BenchRequest((1,), 3), BenchRequest((1,), 3)], 2)
    assert result.ttft.mean == pytest.approx(1.5 * STEP)
    assert result.tpot.mean == pytest.approx(2 * STEP)
    assert result.itl.p99 == pytest.approx(2 * STEP)


def test_open_loop_counts_from_the_arrival() -> None:
    # arrivals at 0, 0.2 (in the middle of the first step) and 10 (after a rest)
    workload = [BenchRequest((1,), 2, 0.0), BenchRequest((1,), 1, 0.2), BenchRequest((1,), 1, 10.0)]
    result = run(ClockworkEngine(), workload, None)
    assert result.duration == pytest.approx(10 + STEP)
    assert result.ttft.mean == pytest.approx((STEP + (2 * STEP - 0.2) + STEP) / 3)


def test_an_engine_that_ends_early_is_an_error() -> None:
    class Hasty(ClockworkEngine):
        def add_request(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
            self._requests[request_id] = (tuple(prompt), 2, 0)

    with pytest.raises(QtoolError, match="2 of 5"):
        run(Hasty(), [BenchRequest((1,), 5)], 1)


def test_failed_requests_are_counted_and_left_out() -> None:
    good = RequestTiming(1.0, (2.0, 3.0, 5.0), 10, 3)
    bad = RequestTiming(1.0, (), 0, 0, "refused")
    result = summarize([good, bad, good], 4.0)
    assert (result.num_requests, result.num_failed, result.first_error) == (3, 1, "refused")
    assert result.output_tokens == 6
    assert result.tpot is not None
    assert result.tpot.mean == pytest.approx(1.5)
    assert result.itl is not None
    assert result.itl.mean == pytest.approx(1.5)
    assert summarize([bad], 1.0).ttft is None
    rows = {row[0]: row[1:] for row in result_rows([result, summarize([bad], 1.0)])}
    assert rows["TTFT ms, mean / p50 / p99"] == ("1,000.0 / 1,000.0 / 1,000.0", "—")


def test_mixed_workload_is_the_mix_it_says() -> None:
    tokens = ordinary_tokens(100, [3, 7])
    assert len(tokens) == 98
    load = mixed_workload(50, 20, seed=1, token_ids=tokens)
    assert load == mixed_workload(50, 20, seed=1, token_ids=tokens)
    assert load != mixed_workload(50, 20, seed=2, token_ids=tokens)
    lengths = [request.output_len for request in load]
    assert lengths.count(LONG_OUTPUT) == 10
    assert all(SHORT_OUTPUT[0] <= n <= SHORT_OUTPUT[1] for n in lengths if n != LONG_OUTPUT)
    assert all(len(request.prompt) == 20 and not {3, 7} & set(request.prompt) for request in load)
    open_loop = mixed_workload(2000, 1, seed=0, token_ids=tokens, rate=8.0)
    gaps = np.diff([request.arrival for request in open_loop])
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.1)  # exponential: as wide as its mean


def test_check_fits() -> None:
    load = [BenchRequest((1,) * 10, 10), BenchRequest((1,) * 30, 10)]
    check_fits(load, 40)
    with pytest.raises(QtoolError, match="request 2 needs 30"):
        check_fits(load, 39)


def test_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens,kind\n7.0,5,6,x\n3.0,2,1,y\n")
    load = read_trace(path, speed=2.0, seed=0, token_ids=[4])
    assert load == [BenchRequest((4, 4), 1, 0.0), BenchRequest((4,) * 5, 6, 2.0)]
    for text, message in (
        ("", "arrival_s"),
        ("arrival_s,input_tokens\n1,2\n", "output_tokens"),
        ("arrival_s,input_tokens,output_tokens\n", "no requests"),
        ("arrival_s,input_tokens,output_tokens\n1,2,x\n", "line 2"),
        ("arrival_s,input_tokens,output_tokens\n1,2\n", "line 2"),
        ("arrival_s,input_tokens,output_tokens\nnan,2,2\n", "line 2"),
        ("arrival_s,input_tokens,output_tokens\n1,0,2\n", "line 2"),
    ):
        path.write_text(text)
        with pytest.raises(QtoolError, match=message):
            read_trace(path, speed=1.0, seed=0, token_ids=[4])
    with pytest.raises(QtoolError, match="cannot read"):
        read_trace(tmp_path / "none.csv", speed=1.0, seed=0, token_ids=[4])
