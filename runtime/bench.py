"""Load for an engine, and what it took: a workload, a closed or open loop, throughput and latencies.

Definitions (as in vLLM's and guidellm's benchmarks): TTFT, from a request's arrival to its first token; TPOT, the time
from the first token to the last over the tokens after the first; ITL, the gaps between deliveries of one request's
tokens; E2E, from arrival to the last token. In an open loop a request arrives when the schedule says so, whether or
not the system was ready to take it, so that a stalled system cannot hide its queue.
"""

from __future__ import annotations

import csv
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qtool.quant.errors import QtoolError
from qtool.quant.progress import ProgressFn, silent
from qtool.runtime.engine.params import SamplingParams

if TYPE_CHECKING:
    from qtool.runtime.llm_engine import LLMEngine

SHORT_OUTPUT = (10, 50)  # tokens, uniform, both ends included
LONG_OUTPUT = 500
LONG_SHARE = 0.2


@dataclass(frozen=True)
class BenchRequest:
    """One request to send: exactly `output_len` tokens are generated. `arrival`: seconds from the start (open loop)."""

    prompt: tuple[int, ...]
    output_len: int
    arrival: float = 0.0


@dataclass(frozen=True)
class RequestTiming:
    """What became of one request. Times in seconds on one clock; `deliveries`: when new tokens came."""

    arrival: float
    deliveries: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    error: str | None = None


@dataclass(frozen=True)
class Latency:
    """Seconds; percentiles interpolate linearly between the two nearest values."""

    mean: float
    p50: float
    p99: float


@dataclass(frozen=True)
class KVUsage:
    """How the KV cache was used: share of allocated slots without a token (over all steps), blocks at the end."""

    waste: float
    peak_blocks: int
    total_blocks: int
    blocks_in_use_at_end: int
    preemptions: int


@dataclass(frozen=True)
class BenchResult:
    """One run. Throughputs per second of wall time; latencies in seconds."""

    concurrency: int | None
    num_requests: int
    num_failed: int
    duration: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    ttft: Latency | None
    tpot: Latency | None
    itl: Latency | None
    e2e: Latency | None
    kv: KVUsage | None = None
    first_error: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


# ---- workloads ----


def mixed_workload(
    num_requests: int, input_len: int, *, seed: int, token_ids: Sequence[int], rate: float | None = None
) -> list[BenchRequest]:
    """80 % short answers (uniform in SHORT_OUTPUT) and 20 % of LONG_OUTPUT tokens, in random order.

    Args:
        input_len: tokens per prompt, drawn at random from `token_ids`.
        rate: requests per second of a Poisson arrival process; None: all at the start.
    """
    rng = random.Random(seed)
    num_long = round(num_requests * LONG_SHARE)
    lengths = [LONG_OUTPUT] * num_long + [rng.randint(*SHORT_OUTPUT) for _ in range(num_requests - num_long)]
    rng.shuffle(lengths)
    arrivals = itertools.accumulate(rng.expovariate(rate) if rate else 0.0 for _ in lengths)
    return [
        BenchRequest(tuple(rng.choices(token_ids, k=input_len)), length, arrival)
        for length, arrival in zip(lengths, arrivals)
    ]


def read_trace(path: Path, *, speed: float, seed: int, token_ids: Sequence[int]) -> list[BenchRequest]:
    """A recorded load: a CSV file with the columns arrival_s, input_tokens, output_tokens.

    Args:
        speed: 10 replays ten times as fast as recorded.

    Raises:
        QtoolError: no such file, a column or a value that is none, no rows.
    """
    rng = random.Random(seed)
    columns = ("arrival_s", "input_tokens", "output_tokens")
    requests = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise QtoolError(f"{path}: no column {missing[0]!r}; the first line must name {', '.join(columns)}")
            for row in reader:
                try:
                    arrival, prompt, output = float(row[columns[0]]), int(row[columns[1]]), int(row[columns[2]])
                except (TypeError, ValueError) as error:
                    raise QtoolError(f"{path}, line {reader.line_num}: not three numbers: {error}") from error
                if not (math.isfinite(arrival) and arrival >= 0 and prompt >= 1 and output >= 1):
                    raise QtoolError(f"{path}, line {reader.line_num}: need arrival ≥ 0 and one token or more each way")
                requests.append(BenchRequest(tuple(rng.choices(token_ids, k=prompt)), output, arrival / speed))
    except (OSError, UnicodeDecodeError) as error:
        raise QtoolError(f"cannot read the trace {path}: {error}") from error
    if not requests:
        raise QtoolError(f"{path} holds no requests")
    requests.sort(key=lambda request: request.arrival)
    start = requests[0].arrival
    return [BenchRequest(r.prompt, r.output_len, r.arrival - start) for r in requests]


def check_fits(workload: Sequence[BenchRequest], max_model_len: int) -> None:
    """Raise QtoolError where a request is longer than the context, before anything runs."""
    for number, request in enumerate(workload, start=1):
        need = len(request.prompt) + request.output_len
        if need > max_model_len:
            raise QtoolError(
                f"request {number} needs {len(request.prompt)} + {request.output_len} tokens, but the context is "
                f"{max_model_len}; lower --input-len or serve with a larger --max-model-len"
            )


# ---- from timings to figures ----


def _latency(values: Sequence[float]) -> Latency | None:
    if not values:
        return None
    p50, p99 = np.percentile(values, (50, 99))
    return Latency(float(np.mean(values)), float(p50), float(p99))


def summarize(
    timings: Sequence[RequestTiming], duration: float, *, concurrency: int | None = None, kv: KVUsage | None = None
) -> BenchResult:
    """Figures over the requests that succeeded; failed ones are counted and their first error is kept."""
    good = [t for t in timings if t.error is None]
    prompt, output = sum(t.prompt_tokens for t in good), sum(t.output_tokens for t in good)
    return BenchResult(
        concurrency=concurrency,
        num_requests=len(timings),
        num_failed=len(timings) - len(good),
        duration=duration,
        prompt_tokens=prompt,
        output_tokens=output,
        output_tokens_per_s=output / duration,
        total_tokens_per_s=(prompt + output) / duration,
        requests_per_s=len(good) / duration,
        ttft=_latency([t.deliveries[0] - t.arrival for t in good if t.deliveries]),
        tpot=_latency(
            [
                (t.deliveries[-1] - t.deliveries[0]) / (t.output_tokens - 1)
                for t in good
                if t.output_tokens > 1 and t.deliveries
            ]
        ),
        itl=_latency([b - a for t in good for a, b in itertools.pairwise(t.deliveries)]),
        e2e=_latency([t.deliveries[-1] - t.arrival for t in good if t.deliveries]),
        kv=kv,
        first_error=next((t.error for t in timings if t.error is not None), None),
    )


# ---- the engine in this process ----


class _KVMeter:
    """Looks at the KV cache after every step."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._allocated = self._filled = self._peak = 0
        self._preemptions = engine.stats().num_preemptions

    def sample(self) -> None:
        stats = self._engine.stats()
        self._allocated += stats.kv_slots_allocated
        self._filled += stats.kv_slots_filled
        self._peak = max(self._peak, stats.kv_blocks_used)

    def result(self) -> KVUsage:
        stats = self._engine.stats()
        return KVUsage(
            waste=1 - self._filled / self._allocated if self._allocated else 0.0,
            peak_blocks=self._peak,
            total_blocks=stats.kv_blocks_total,
            blocks_in_use_at_end=stats.kv_blocks_used,
            preemptions=stats.num_preemptions - self._preemptions,
        )


def run_engine(
    engine: LLMEngine,
    workload: Sequence[BenchRequest],
    *,
    concurrency: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    progress: ProgressFn = silent,
) -> BenchResult:
    """Drive `engine.step()` with the workload and measure.

    Args:
        concurrency: closed loop, this many requests in flight, the next one sent when one ends; None: open loop, each
            request at its `arrival`.

    Raises:
        QtoolError: the engine refuses a request, or ends one by itself (the measurement would be of another load).
    """
    start = clock()
    todo = iter(enumerate(workload))
    upcoming = next(todo, None)
    running: dict[str, tuple[BenchRequest, float, list[float], int]] = {}
    timings: list[RequestTiming] = []
    meter = _KVMeter(engine)
    label = f"concurrency {concurrency}" if concurrency else "open loop"
    while upcoming is not None or running:
        while upcoming is not None:
            number, request = upcoming
            due = start + request.arrival if concurrency is None else clock()
            full = len(running) >= concurrency if concurrency is not None else due > clock()
            if full:
                break
            request_id = f"bench-{number}"
            engine.add_request(request_id, request.prompt, sampling(request))
            running[request_id] = (request, due, [], 0)
            upcoming = next(todo, None)
        if not running:
            assert upcoming is not None
            sleep(max(0.0, start + upcoming[1].arrival - clock()))
            continue
        outputs = engine.step()
        now = clock()
        meter.sample()
        for output in outputs:
            request, arrival, deliveries, seen = running[output.request_id]
            tokens = len(output.outputs[0].token_ids)
            if tokens > seen:
                deliveries.append(now)
                running[output.request_id] = (request, arrival, deliveries, tokens)
            if output.finished:
                del running[output.request_id]
                if tokens != request.output_len:
                    ended = output.outputs[0]
                    raise QtoolError(
                        f"the engine ended a request after {tokens} of {request.output_len} tokens "
                        f"({ended.finish_reason}{'' if ended.stop_reason is None else f': {ended.stop_reason}'})"
                    )
                timings.append(RequestTiming(arrival, tuple(deliveries), len(request.prompt), tokens))
                progress(label, len(timings), len(workload))
    return summarize(timings, clock() - start, concurrency=concurrency, kv=meter.result())


def sampling(request: BenchRequest) -> SamplingParams:
    """Greedy, and exactly as many tokens as asked for."""
    return SamplingParams(max_tokens=request.output_len, temperature=0.0, ignore_eos=True)


def ordinary_tokens(vocab_size: int, special: Sequence[int]) -> list[int]:
    """The token ids that random prompts are drawn from: all but the special ones."""
    excluded = frozenset(special)
    return [token for token in range(vocab_size) if token not in excluded]


def result_rows(results: Sequence[BenchResult]) -> Iterator[tuple[str, ...]]:
    """A table's rows: one figure a row, one run a column. Latencies in milliseconds as mean / p50 / p99."""

    def row(name: str, show: Callable[[BenchResult], str]) -> tuple[str, ...]:
        return (name, *(show(result) for result in results))

    def latency(value: Latency | None) -> str:
        return "—" if value is None else " / ".join(f"{1000 * v:,.1f}" for v in (value.mean, value.p50, value.p99))

    yield row("requests (failed)", lambda r: f"{r.num_requests} ({r.num_failed})")
    yield row("duration s", lambda r: f"{r.duration:.1f}")
    yield row("output tokens/s", lambda r: f"{r.output_tokens_per_s:,.1f}")
    yield row("total tokens/s", lambda r: f"{r.total_tokens_per_s:,.1f}")
    yield row("requests/s", lambda r: f"{r.requests_per_s:.2f}")
    yield row("TTFT ms, mean / p50 / p99", lambda r: latency(r.ttft))
    yield row("TPOT ms, mean / p50 / p99", lambda r: latency(r.tpot))
    yield row("ITL ms, mean / p50 / p99", lambda r: latency(r.itl))
    yield row("E2E ms, mean / p50 / p99", lambda r: latency(r.e2e))
    if any(result.kv for result in results):
        yield row("KV slots wasted", lambda r: f"{r.kv.waste:.2%}" if r.kv else "—")
        yield row("KV blocks, peak / total", lambda r: f"{r.kv.peak_blocks} / {r.kv.total_blocks}" if r.kv else "—")
        yield row("KV blocks in use at the end", lambda r: str(r.kv.blocks_in_use_at_end) if r.kv else "—")
        yield row("preemptions", lambda r: str(r.kv.preemptions) if r.kv else "—")
