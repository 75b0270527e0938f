"""What the engine's features bring on a real model: `python benchmarks/engine_features.py MODEL`.

- chunked: the TTFT of short requests while prompts of 2,000 tokens come in, prompts whole or in chunks.
- prefix: the TTFT of a prompt whose first 512 tokens are in the cache, against the same engine without a cache.
- waste: share of the KV slots in use that hold no token, over a mix of 80 % short and 20 % long answers.
- kv: requests that a KV cache of 64 MiB holds at once, in bfloat16 and in int8, and what int8 costs (KL).
- head: what an int8 head costs (KL).
- stop: tokens, steps and seconds that a stop string and the end of a form save.
- swap: what preemption by swap and by recompute take in a cache that is too small.

With `--clock cpu` and one thread (OMP_NUM_THREADS=1), time is what the process computed, and it jumps where nothing is
to be done: other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from qtool.runtime.bench import BenchRequest, mixed_workload, ordinary_tokens, run_engine
from qtool.runtime.engine.params import SamplingParams, StructuredOutputsParams
from qtool.runtime.llm import LLM
from qtool.runtime.llm_engine import LLMEngine
from qtool.runtime.warm_up import warm_up

MIB = 1 << 20
DTYPE = "bfloat16"  # `auto` measures which is faster, and a busy machine may answer one way and then the other


@dataclass(frozen=True)
class Arrival:
    """`at`: seconds from the start."""

    at: float
    prompt: list[int]
    output: int


class Clock:
    """Seconds of the wall, or of the process's own computing."""

    def __init__(self, kind: str) -> None:
        self._read = time.monotonic if kind == "wall" else time.process_time
        self._wall = kind == "wall"
        self._skipped = 0.0

    def now(self) -> float:
        return self._read() + self._skipped

    def wait_until(self, moment: float) -> None:
        left = max(0.0, moment - self.now())
        if self._wall:
            time.sleep(left)
        else:
            self._skipped += left


CLOCK = Clock("wall")


def open_loop(engine: LLMEngine, arrivals: Sequence[Arrival]) -> list[float]:
    """Seconds from the moment that each request was due to its first token."""
    start, first = CLOCK.now(), [0.0] * len(arrivals)
    todo = list(enumerate(arrivals))[::-1]
    while todo or engine.has_unfinished():
        while todo and start + todo[-1][1].at <= CLOCK.now():
            number, arrival = todo.pop()
            params = SamplingParams(max_tokens=arrival.output, temperature=0, ignore_eos=True)
            engine.add_request(str(number), arrival.prompt, params)
        if not engine.has_unfinished():
            CLOCK.wait_until(start + todo[-1][1].at)
            continue
        for output in engine.step():
            number = int(output.request_id)
            if len(output.outputs[0].token_ids) == 1:
                first[number] = CLOCK.now() - start - arrivals[number].at
    return first


def chunked(model: str, tokens: list[int], short: int, rate: float, every: float, chunk: int) -> None:
    """`rate` short requests a second (32 tokens in, 8 out), and one of 2,000 tokens every `every` seconds."""
    rng = random.Random(0)
    gaps = np.cumsum([rng.expovariate(rate) for _ in range(short)]).tolist()
    arrivals = [Arrival(at, rng.choices(tokens, k=32), 8) for at in gaps]
    arrivals += [
        Arrival(every * (i + 0.5), rng.choices(tokens, k=2000), 8) for i in range(max(1, int(gaps[-1] / every)))
    ]
    arrivals.sort(key=lambda a: a.at)
    p99 = {}
    for name, budget in (("whole", 4096), (f"in chunks of {chunk}", chunk)):
        engine = LLMEngine(model, dtype=DTYPE, max_num_batched_tokens=budget, max_num_seqs=32, max_model_len=2100)
        warm_up(engine)
        found = open_loop(engine, arrivals)
        times = [t for t, a in zip(found, arrivals) if len(a.prompt) == 32]
        long = [t for t, a in zip(found, arrivals) if len(a.prompt) == 2000]
        p50, p99[name] = np.percentile(times, [50, 99])
        print(
            f"prompts {name}: TTFT of {len(times)} short requests p50 {p50:.3f} s, p99 {p99[name]:.3f} s; of "
            f"{len(long)} long ones p50 {np.median(long):.2f} s",
            flush=True,
        )
    whole, parts = p99.values()
    print(f"chunked prefill: p99 TTFT of short requests {whole / parts:.1f}× lower", flush=True)


def prefix(model: str, tokens: list[int], count: int) -> None:
    rng = random.Random(1)
    shared = rng.choices(tokens, k=512)
    own = [rng.choices(tokens, k=16) for _ in range(count)]
    medians = []
    for caching in (False, True):
        engine = LLMEngine(model, dtype=DTYPE, prefix_caching=caching, max_model_len=1024)
        warm_up(engine)
        open_loop(engine, [Arrival(0.0, shared + rng.choices(tokens, k=16), 1)])  # the first fills the cache
        times = [open_loop(engine, [Arrival(0.0, shared + rest, 1)])[0] for rest in own]
        medians.append(statistics.median(times))
        print(f"prefix caching {'on' if caching else 'off'}: median TTFT {medians[-1] * 1000:.1f} ms", flush=True)
    print(f"prefix caching: TTFT {medians[0] / medians[1]:.1f}× lower", flush=True)


def waste(model: str, tokens: list[int], count: int) -> None:
    engine = LLMEngine(model, dtype=DTYPE, max_num_seqs=16, max_model_len=1024, prefix_caching=False)
    warm_up(engine)
    load: list[BenchRequest] = mixed_workload(count, 128, seed=2, token_ids=tokens)
    kv = run_engine(engine, load, concurrency=16).kv
    assert kv is not None
    print(
        f"KV waste: {kv.waste:.2%} of the slots in use; {kv.blocks_in_use_at_end} blocks in use at the end", flush=True
    )


def text_logits(llm: LLM, text: str) -> torch.Tensor:
    """Logits of the first 2,048 tokens of a text, in windows of 512."""
    ids = llm.engine.encode(text)[:2048]
    return torch.cat(list(llm.prompt_logits([ids[i : i + 512] for i in range(0, len(ids), 512)])))


def divergence(base: torch.Tensor, other: torch.Tensor) -> str:
    """KL(base‖other) of the next token, in words."""
    p, q = (x.log_softmax(-1).double() for x in (base, other))
    kl = (p.exp() * (p - q)).sum(-1)
    same = (p.argmax(-1) == q.argmax(-1)).double().mean()
    return (
        f"KL mean {kl.mean():.2e} nats, p99 {kl.quantile(0.99):.2e}, largest {kl.max():.2e}, the same likeliest token "
        f"at {same:.2%}, over {len(kl)} tokens"
    )


def kv(model: str, tokens: list[int], text: str) -> None:
    fits, logits = [], []
    for dtype in ("float", "int8"):
        llm = LLM(
            model, dtype=DTYPE, kv_cache_dtype=dtype, kv_cache_memory=64 * MIB, max_num_seqs=64, max_model_len=1024
        )
        rng = random.Random(3)
        params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
        for i in range(48):
            llm.engine.add_request(str(i), rng.choices(tokens, k=240), params)
        most = 0
        while llm.engine.has_unfinished():
            llm.engine.step()
            most = max(most, llm.engine.stats().num_running)
        fits.append(most)
        logits.append(text_logits(llm, text))
        print(f"{dtype}: {llm.engine.memory.kv_tokens} tokens, {most} requests of 256 at once", flush=True)
    print(f"int8 KV cache: {fits[1] / fits[0]:.2f}× the requests; {divergence(*logits)}", flush=True)


def head(model: str, text: str) -> None:
    logits = []
    for dtype in ("auto", "int8"):  # in float32, so that nothing else rounds
        llm = LLM(model, dtype="float32", head_dtype=dtype, max_num_seqs=4, max_model_len=512)
        logits.append(text_logits(llm, text))
    print(f"int8 head: {divergence(*logits)}", flush=True)


def stop(model: str, count: int) -> None:
    prompts = [f"Question {i}: name a colour and say why you like it.\nAnswer:" for i in range(count)]
    form = StructuredOutputsParams(choice=["red", "green", "blue"])
    base: dict[str, Any] = {"max_tokens": 96, "temperature": 0, "ignore_eos": True}
    kinds = {
        "to the end": SamplingParams(**base),
        "stop='.'": SamplingParams(**base, stop=["."]),
        "a choice": SamplingParams(**base, structured_outputs=form),
    }
    llm = LLM(model, dtype=DTYPE, max_model_len=512, max_num_seqs=16, prefix_caching=False)
    llm.generate(prompts[:2], kinds["a choice"])  # loads the grammar's tokenizer
    full: tuple[int, float] | None = None
    for name, params in kinds.items():
        before, began = llm.engine.stats(), CLOCK.now()
        outputs = llm.generate(prompts, params)
        seconds, after = CLOCK.now() - began, llm.engine.stats()
        made = after.generation_tokens - before.generation_tokens
        given = sum(len(o.outputs[0].token_ids) for o in outputs)
        full = full or (made, seconds)
        print(
            f"{name}: {made} tokens computed, {given} given, {after.num_steps - before.num_steps} steps, "
            f"{seconds:.1f} s ({made / full[0]:.0%} of the tokens, {seconds / full[1]:.0%} of the time)",
            flush=True,
        )


def swap(model: str, tokens: list[int]) -> None:
    rng = random.Random(4)
    prompts = [rng.choices(tokens, k=200) for _ in range(12)]
    params = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)
    for mode in ("recompute", "swap", "auto"):
        llm = LLM(
            model, dtype=DTYPE, kv_cache_memory=48 * MIB, swap_space=64 * MIB, max_model_len=512, preemption_mode=mode,
            prefix_caching=False,
        )  # fmt: skip
        warm_up(llm.engine)
        began = CLOCK.now()
        llm.generate(prompts, params)
        seconds, stats = CLOCK.now() - began, llm.engine.stats()
        print(
            f"{mode}: {seconds:.1f} s, {stats.num_preemptions} preemptions, {stats.num_swaps} by swap, "
            f"{stats.prompt_tokens} prompt tokens computed",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--only", nargs="+", default=["chunked", "prefix", "waste", "kv", "head", "stop", "swap"])
    parser.add_argument("--text", help="file whose first 2,048 tokens show what int8 costs", required=True)
    parser.add_argument("--short-requests", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=10, help="prompts of `prefix`, requests of `waste` by threes")
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--every", type=float, default=12.0, help="seconds between the long prompts")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--chunk", type=int, default=256)
    args = parser.parse_args()
    global CLOCK
    CLOCK = Clock(args.clock)
    with open(args.text, encoding="utf-8") as file:
        text = file.read(100_000)
    probe = LLMEngine(args.model, max_model_len=64, kv_cache_memory=8 * MIB)
    tokens = ordinary_tokens(probe.config["vocab_size"], probe.tokenizer.all_special_ids)
    del probe
    parts: dict[str, Callable[[], None]] = {
        "chunked": lambda: chunked(args.model, tokens, args.short_requests, args.rate, args.every, args.chunk),
        "prefix": lambda: prefix(args.model, tokens, args.repeats),
        "waste": lambda: waste(args.model, tokens, 3 * args.repeats),
        "kv": lambda: kv(args.model, tokens, text),
        "head": lambda: head(args.model, text),
        "stop": lambda: stop(args.model, 8),
        "swap": lambda: swap(args.model, tokens),
    }
    for name in args.only:
        parts[name]()


if __name__ == "__main__":
    main()
