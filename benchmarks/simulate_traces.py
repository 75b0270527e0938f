"""Replay traces of real traffic through the scheduler, without a model: `python benchmarks/simulate_traces.py FOLDER`.

A discrete-event simulation. The engine's own scheduler and KV-cache manager run unchanged; a step takes the time that a
linear model gives (so much for a step, for a token computed, for a token of context read), the clock jumps by it, and
requests arrive when the trace says, so many times faster. A trace is repeated, end to end, until there are enough
requests. Traces are CSV files with the columns arrival_s, input_tokens and output_tokens; requests longer than the
context are cut to it. Prompts share nothing, so the prefix cache is off. Every tenth request is urgent (priority -10),
which the policy `priority` alone looks at.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qtool.runtime.engine.core import EngineCore
from qtool.runtime.engine.kv_cache_manager import KVCacheManager
from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.engine.policy import POLICIES
from qtool.runtime.engine.request import Request, ScheduledRequest, Status, StepResult
from qtool.runtime.engine.scheduler import SchedulerConfig


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: a constant, a share for each token computed, and one for each token of context."""

    per_step: float
    per_token: float
    per_context_token: float

    def __call__(self, batch: Sequence[ScheduledRequest]) -> float:
        tokens = context = 0
        for _, start, num_tokens, *_ in batch:
            tokens += num_tokens
            context += start + num_tokens
        return self.per_step + self.per_token * tokens + self.per_context_token * context


_TOKEN, _NOTHING = StepResult(0), StepResult()


class Clockwork:
    """The executor of the simulation: answers at once, and moves the clock by what the step would have taken."""

    def __init__(self, step_time: StepTime) -> None:
        self.now = 0.0
        self.busy = 0.0
        self.row_seconds = 0.0  # running requests over time
        self._step_time = step_time

    def submit(self, batch: Sequence[ScheduledRequest]) -> list[StepResult]:
        seconds = self._step_time(batch)
        self.now += seconds
        self.busy += seconds
        self.row_seconds += seconds * len(batch)
        return [_TOKEN if work.sample else _NOTHING for work in batch]

    def collect(self, step: list[StepResult]) -> list[StepResult]:
        return step


@dataclass(frozen=True)
class Outcome:
    """`ttft`: seconds from arrival to the first token, of each request; of the urgent ones again. Utilisation: share of
    the time that the device was busy. `rows`: requests in a step, averaged over the busy time."""

    ttft: np.ndarray
    urgent_ttft: np.ndarray
    utilisation: float
    rows: float
    preemptions: int


def read_trace(path: Path, max_len: int) -> list[tuple[float, int, int]]:
    """(arrival in seconds, prompt tokens, output tokens) of each request, in order of arrival."""
    with path.open(newline="") as file:
        rows = [(float(r["arrival_s"]), int(r["input_tokens"]), int(r["output_tokens"])) for r in csv.DictReader(file)]
    cut = [(at, min(prompt, max_len - 1), out) for at, prompt, out in rows]
    return sorted((at, prompt, max(1, min(out, max_len - prompt))) for at, prompt, out in cut)


def arrivals(trace: list[tuple[float, int, int]], count: int, speed: float) -> Iterator[tuple[float, int, int]]:
    """The trace end to end, `speed` times faster; a round begins one mean gap after the one before has ended."""
    length = trace[-1][0] * len(trace) / (len(trace) - 1)
    for i in range(count):
        turn, index = divmod(i, len(trace))
        at, prompt, output = trace[index]
        yield (turn * length + at) / speed, prompt, output


def simulate(
    trace: list[tuple[float, int, int]],
    config: SchedulerConfig,
    step_time: StepTime,
    *,
    count: int,
    speed: float,
    kv_tokens: int,
    block_size: int = 16,
) -> Outcome:
    """Serve `count` requests to their end. Raises RuntimeError where one is lost or a block leaks."""
    clock = Clockwork(step_time)
    core = EngineCore(config, KVCacheManager(kv_tokens // block_size, block_size, prefix_caching=False), clock)
    numbers = itertools.count()
    prompts = {prompt: bytes(prompt) for _, prompt, _ in trace}
    coming = arrivals(trace, count, speed)
    following = next(coming, None)
    ttft: list[float] = []
    urgent_ttft: list[float] = []
    finished = 0
    while following is not None or core.has_unfinished():
        if not core.has_unfinished() and following is not None:
            clock.now = max(clock.now, following[0])
        while following is not None and following[0] <= clock.now:
            at, prompt, output = following
            number = next(numbers)
            params = SamplingParams(max_tokens=output, temperature=0.0, priority=0 if number % 10 else -10)
            request = Request(str(number), prompts[prompt], params, arrival=at)
            request.token_ids = bytearray(prompt)  # a byte a token, since nobody reads them: many may wait
            core.add_request(request)
            following = next(coming, None)
        for request in core.step():
            if len(request.token_ids) == request.num_prompt_tokens + 1:
                ttft.append(clock.now - request.arrival)
                if request.params.priority < 0:
                    urgent_ttft.append(ttft[-1])
            finished += request.status is Status.FINISHED
    if (len(ttft), finished) != (count, count):
        raise RuntimeError(f"{count} requests, but {len(ttft)} first tokens and {finished} ends")
    return Outcome(
        ttft=np.array(ttft),
        urgent_ttft=np.array(urgent_ttft),
        utilisation=clock.busy / clock.now,
        rows=clock.row_seconds / clock.busy,
        preemptions=core.stats().num_preemptions,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of traces (*.csv), or one trace")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--speeds", type=float, nargs="+", default=[1, 10, 100])
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-model-len", type=int, default=131072)
    parser.add_argument("--kv-tokens", type=int, default=400_000, help="tokens that the KV cache holds")
    parser.add_argument("--step-us", type=float, default=4000.0)
    parser.add_argument("--token-us", type=float, default=20.0)
    parser.add_argument("--context-token-us", type=float, default=0.03)
    args = parser.parse_args()
    step_time = StepTime(args.step_us * 1e-6, args.token_us * 1e-6, args.context_token_us * 1e-6)
    print("trace | speed | policy | utilisation | rows a step | TTFT p50, p99 (s) | urgent p99 | preemptions | host s")
    for path in sorted(args.folder.glob("*.csv")) if args.folder.is_dir() else [args.folder]:
        trace = read_trace(path, args.max_model_len)
        for speed in args.speeds:
            for policy in args.policies:
                config = SchedulerConfig(
                    args.max_num_seqs, args.max_num_batched_tokens, args.max_model_len, policy=policy
                )
                began = time.process_time()
                got = simulate(trace, config, step_time, count=args.requests, speed=speed, kv_tokens=args.kv_tokens)
                p50, p99 = np.percentile(got.ttft, [50, 99])
                host = time.process_time() - began
                urgent = np.percentile(got.urgent_ttft, 99)
                cells = (path.stem, f"{speed:g}", policy, f"{got.utilisation:.2f}", f"{got.rows:.0f}")
                times = (f"{p50:.3f}, {p99:.3f}", f"{urgent:.3f}", str(got.preemptions), f"{host:.0f}")
                print(*cells, *times, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
