"""`qtool bench`: throughput and latencies of an engine in this process, or of a server at a URL."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from qtool.cli import bench_decode, bench_kernels
from qtool.cli.common import Device, Json, Quiet, Reporter
from qtool.cli.engine_options import (
    BlockSize,
    DraftModel,
    Dtype,
    GpuMemoryUtilization,
    HeadDtype,
    KVCacheDtype,
    KVCacheMemory,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    NumSpeculativeTokens,
    Speculative,
    engine_args,
)
from qtool.quant.errors import QtoolError

if TYPE_CHECKING:
    from qtool.runtime.bench import BenchRequest, BenchResult

# Another server's vocabulary is not known; these ids are ordinary tokens in every common one.
_URL_TOKENS = range(256, 1000)


def command(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Model to run in this process; leave out with --url.")
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Base URL of an OpenAI-compatible server, without /v1.")
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            "--concurrency",
            help="Requests in flight, comma-separated. Default: 1,4,16; 16 with --compare-static.",
            show_default=False,
        ),
    ] = None,
    num_requests: Annotated[
        int | None,
        typer.Option(
            "--num-requests", help="Requests per run. Default: 4 × the concurrency, at least 10.", show_default=False
        ),
    ] = None,
    input_len: Annotated[int, typer.Option("--input-len", help="Tokens of each prompt, drawn at random.")] = 128,
    request_rate: Annotated[
        float | None,
        typer.Option("--request-rate", help="Open loop: Poisson arrivals, this many requests a second."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Open loop: replay a CSV file (arrival_s,input_tokens,output_tokens)."),
    ] = None,
    trace_speed: Annotated[float, typer.Option("--trace-speed", help="10 replays the trace ten times as fast.")] = 1.0,
    compare_static: Annotated[
        bool,
        typer.Option("--compare-static", help="Run the same load with static (request-level) batching as well."),
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Seed of prompts, lengths and arrivals.")] = 0,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="QTOOL_API_KEY", help="Key for the server at --url.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_num_seqs: MaxNumSeqs = 64,
    max_num_batched_tokens: MaxNumBatchedTokens = 2048,
    max_model_len: MaxModelLen = "auto",
    gpu_memory_utilization: GpuMemoryUtilization = None,
    kv_cache_memory: KVCacheMemory = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    head_dtype: HeadDtype = "auto",
    block_size: BlockSize = 16,
    speculative: Speculative = None,
    draft_model: DraftModel = None,
    num_speculative_tokens: NumSpeculativeTokens = None,
    quiet: Quiet = False,
    json_result: Json = False,
) -> None:
    """Measure throughput, TTFT, TPOT, ITL and end-to-end latency.

    The load is 80 % short answers (10 to 50 tokens, uniform) and 20 % long ones (500 tokens) in random order, greedy,
    with end-of-sequence ignored. A closed loop keeps `--concurrency` requests in flight; `--request-rate` and
    `--trace` are open loops.

    Without a model: `qtool bench decode` (the engine on random weights of a known shape) and `qtool bench kernels`
    (its linears). A model folder of such a name is ./decode.
    """
    levels = _levels(concurrency or ("16" if compare_static else "1,4,16"))
    _check(model, url, num_requests, input_len, request_rate, trace, trace_speed, compare_static, concurrency)
    if compare_static and speculative is not None:
        raise QtoolError("--compare-static is without speculation: leave out --speculative")
    arguments = engine_args(
        dtype=dtype,
        device=device,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_memory=kv_cache_memory,
        kv_cache_dtype=kv_cache_dtype,
        head_dtype=head_dtype,
        block_size=block_size,
        speculative=speculative,
        draft_model=draft_model,
        num_speculative_tokens=num_speculative_tokens,
    )
    from qtool.runtime.bench import mixed_workload, read_trace

    def loads(token_ids: Sequence[int]) -> list[tuple[int | None, list[BenchRequest]]]:
        """(concurrency, or None for an open loop; the requests) of each run."""
        if trace is not None:
            return [(None, read_trace(trace, speed=trace_speed, seed=seed, token_ids=token_ids))]
        counts = [(level, num_requests or max(10, 4 * level)) for level in levels]
        if request_rate is not None:
            count = num_requests or 32
            return [(None, mixed_workload(count, input_len, seed=seed, token_ids=token_ids, rate=request_rate))]
        return [  # prompts of their own, so that no run finds those of another in a prefix cache
            (level, mixed_workload(count, input_len, seed=seed + run, token_ids=token_ids))
            for run, (level, count) in enumerate(counts)
        ]

    reporter = Reporter(quiet, json_result)
    document: dict[str, Any]
    if url is not None:
        results, document = _bench_url(url.rstrip("/").removesuffix("/v1"), api_key, loads, reporter)
        title = f"{document['model']} at {document['url']}"
    else:
        assert model is not None
        results = _bench_model(model, arguments, loads, reporter)
        document = {"model": model}
        title = f"{model}: continuous batching"
    document |= {"seed": seed, "results": [result.as_json() for result in results]}
    _show(reporter, title, results)
    if compare_static:
        assert model is not None
        static = _bench_model(model, arguments | {"static_batching": True}, loads, reporter)
        _show(reporter, f"{model}: static batching", static)
        ratios = [a.output_tokens_per_s / b.output_tokens_per_s for a, b in zip(results, static)]
        document |= {"static": [result.as_json() for result in static], "continuous_over_static": ratios}
        for result, ratio in zip(results, ratios):
            reporter.line(f"{_name(result)}: continuous over static batching, output tokens/s: {ratio:.2f}×")
    reporter.result(document)
    failed = [result for result in results if result.num_failed]
    if failed:
        raise QtoolError(f"{sum(r.num_failed for r in failed)} requests failed; the first: {failed[0].first_error}")


class _Group(TyperGroup):
    """`qtool bench MODEL` beside `qtool bench decode` and `qtool bench kernels`: what is no subcommand is a model."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.commands else ["model", *args])


app = typer.Typer(cls=_Group, help="Measure throughput and latencies of an engine; `decode`, `kernels`: of its parts.")
app.command("model")(command)
app.command("decode")(bench_decode.command)
app.command("kernels")(bench_kernels.command)


Loads = Callable[[Sequence[int]], list[tuple[int | None, "list[BenchRequest]"]]]


def _bench_model(model: str, arguments: dict[str, Any], loads: Loads, reporter: Reporter) -> list[BenchResult]:
    """Run the loads one after another on a fresh engine, which is gone afterwards."""
    from qtool.runtime.bench import check_fits, ordinary_tokens, run_engine
    from qtool.runtime.llm_engine import LLMEngine
    from qtool.runtime.warm_up import warm_up

    engine = LLMEngine(model, **arguments)
    tokens = ordinary_tokens(engine.config["vocab_size"], engine.tokenizer.all_special_ids)
    runs = loads(tokens)
    for _, workload in runs:
        check_fits(workload, engine.max_model_len)
    warm_up(engine)
    with reporter.progress() as progress:
        results = [run_engine(engine, load, concurrency=level, progress=progress) for level, load in runs]
    del engine
    gc.collect()
    return results


def _bench_url(
    url: str, api_key: str | None, loads: Loads, reporter: Reporter
) -> tuple[list[BenchResult], dict[str, Any]]:
    from qtool.runtime.bench import check_fits
    from qtool.runtime.server.load_client import run_url, served_model

    card = served_model(url, api_key)
    runs = loads(_URL_TOKENS)
    if isinstance(limit := card.get("max_model_len"), int):
        for _, workload in runs:
            check_fits(workload, limit)
    with reporter.progress() as progress:
        results = [
            run_url(url, card["id"], load, concurrency=level, api_key=api_key, progress=progress)
            for level, load in runs
        ]
    return results, {"url": url, "model": card["id"]}


def _levels(text: str) -> list[int]:
    try:
        levels = [int(part) for part in text.split(",")]
    except ValueError:
        levels = []
    if not levels or min(levels) < 1:
        raise QtoolError(f"--concurrency must be numbers of at least 1 such as 1,4,16, got {text!r}")
    return levels


def _check(
    model: str | None,
    url: str | None,
    num_requests: int | None,
    input_len: int,
    rate: float | None,
    trace: Path | None,
    trace_speed: float,
    compare_static: bool,
    concurrency: str | None,
) -> None:
    """Refuse what cannot be meant. Raises QtoolError."""
    if (model is None) == (url is None):
        raise QtoolError("give either MODEL (in this process) or --url (a running server)")
    if compare_static and url is not None:
        raise QtoolError("--compare-static needs MODEL: a running server has one way of batching")
    if num_requests is not None and num_requests < 1:
        raise QtoolError(f"--num-requests must be at least 1, got {num_requests}")
    if input_len < 1:
        raise QtoolError(f"--input-len must be at least 1, got {input_len}")
    if rate is not None and not 0 < rate < float("inf"):
        raise QtoolError(f"--request-rate must be above 0, got {rate}")
    if not 0 < trace_speed < float("inf"):
        raise QtoolError(f"--trace-speed must be above 0, got {trace_speed}")
    if trace is not None and not trace.is_file():
        raise QtoolError(f"--trace: there is no file {trace}")
    loops = [
        name
        for name, given in (("--concurrency", concurrency), ("--request-rate", rate), ("--trace", trace))
        if given is not None
    ]
    if len(loops) > 1:
        raise QtoolError(f"{' and '.join(loops)} exclude each other: choose one kind of load")


def _name(result: BenchResult) -> str:
    return "open loop" if result.concurrency is None else f"concurrency {result.concurrency}"


def _show(reporter: Reporter, title: str, results: Sequence[BenchResult]) -> None:
    from qtool.runtime.bench import result_rows

    reporter.table(title, ["", *map(_name, results)], list(result_rows(results)))
