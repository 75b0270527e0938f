"""`qtool serve MODEL`: the model behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

import logging
import re
import signal
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qtool.cli import signals
from qtool.cli.common import Device, Model, Quiet, Reporter
from qtool.cli.engine_options import (
    BlockSize,
    Deterministic,
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
    PreemptionMode,
    SchedulingPolicy,
    Speculative,
    SwapSpace,
    engine_args,
)
from qtool.quant.errors import QtoolError

if TYPE_CHECKING:
    from qtool.runtime.memory_budget import MemoryBudget
    from qtool.runtime.server.engine_client import EngineClient


def command(
    model: Model,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 is every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="QTOOL_API_KEY", help="Key that clients must give for everything under /v1."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option("--served-model-name", help="Name that clients ask for. Default: MODEL.")
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
    swap_space: SwapSpace = None,
    preemption_mode: PreemptionMode = "auto",
    block_size: BlockSize = 16,
    speculative: Speculative = None,
    draft_model: DraftModel = None,
    num_speculative_tokens: NumSpeculativeTokens = None,
    scheduling_policy: SchedulingPolicy = "fcfs",
    deterministic: Deterministic = False,
    drain_s: Annotated[
        float, typer.Option("--drain-s", help="At Ctrl-C or SIGTERM, seconds for running requests to finish.")
    ] = 30.0,
    step_timeout_s: Annotated[
        float,
        typer.Option(
            "--step-timeout-s",
            help="An engine that finishes no step for so many seconds while requests wait hangs, and is replaced; "
            "0: never. Well above what --max-num-batched-tokens of a prompt take.",
        ),
    ] = 600.0,
    start_timeout_s: Annotated[
        float,
        typer.Option(
            "--start-timeout-s",
            help="An engine that gets no further for so many seconds while it loads, compiles or captures hangs, and "
            "is ended; 0: never. Not with --in-process.",
        ),
    ] = 1800.0,
    metrics_prefix: Annotated[
        str, typer.Option("--metrics-prefix", help="In front of metric names: `vllm:` suits dashboards made for vLLM.")
    ] = "qtool_",
    in_process: Annotated[
        bool,
        typer.Option("--in-process", help="Run the engine inside the server's process, not in one of its own."),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Serve a model over the OpenAI API: completions, chat, streaming, /health and /metrics.

    Exit status: 0 stopped by SIGTERM, 130 by Ctrl-C, 3 error, or the engine is lost.
    """
    if api_key == "":
        raise QtoolError("--api-key is empty; give a key, or leave the option out for an open server")
    if not 0 < drain_s < float("inf"):
        raise QtoolError(f"--drain-s must be seconds above 0, got {drain_s}")
    for option, seconds in (("--step-timeout-s", step_timeout_s), ("--start-timeout-s", start_timeout_s)):
        if not 0 <= seconds < float("inf"):
            raise QtoolError(f"{option} must be seconds, or 0 for none, got {seconds}")
    if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", metrics_prefix):
        raise QtoolError(f"--metrics-prefix must be letters, digits, _ and :, got {metrics_prefix!r}")
    arguments = engine_args(
        dtype=dtype,
        device=device,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        gpu_memory_utilization=gpu_memory_utilization,
        swap_space=swap_space,
        preemption_mode=preemption_mode,
        kv_cache_memory=kv_cache_memory,
        kv_cache_dtype=kv_cache_dtype,
        head_dtype=head_dtype,
        block_size=block_size,
        speculative=speculative,
        draft_model=draft_model,
        num_speculative_tokens=num_speculative_tokens,
        scheduling_policy=scheduling_policy,
        deterministic=deterministic,
    )
    from qtool.runtime.server.launch import bind, run, url_of

    listener = bind(host, port)
    reporter = Reporter(quiet)
    began = time.monotonic()
    try:
        if in_process:
            engine, memory = _engine_inside(model, arguments, step_timeout_s)
        else:
            engine, memory = _engine_outside(model, arguments, step_timeout_s, start_timeout_s)
        for line in memory.lines():
            reporter.say(line)

        from qtool.runtime.server.app import create_app

        name = served_model_name or model
        app = create_app(engine, model_name=name, api_key=api_key, metrics_prefix=metrics_prefix)

        def on_ready() -> None:
            if not quiet:  # one unbroken line, since programs wait for it
                seconds = time.monotonic() - began
                typer.echo(f"ready: {name} at {url_of(listener)}/v1 (after {seconds:.1f} s; Ctrl-C ends)", err=True)

        ended_by = run(app, listener, drain_s=drain_s, on_ready=on_ready, engine=engine)
    finally:
        listener.close()
    if ended_by == signal.SIGINT:
        raise KeyboardInterrupt
    reporter.say("stopped")


def _engine_inside(
    model: str, arguments: Mapping[str, Any], step_timeout_s: float
) -> tuple[EngineClient, MemoryBudget]:
    """The engine in a thread of this process."""
    from qtool.runtime.llm_engine import LLMEngine
    from qtool.runtime.server.async_engine import AsyncEngine
    from qtool.runtime.warm_up import warm_up

    engine = LLMEngine(model, **arguments)
    warm_up(engine)
    signals.check()
    return AsyncEngine(engine, step_timeout_s), engine.memory


def _engine_outside(
    model: str, arguments: Mapping[str, Any], step_timeout_s: float, start_timeout_s: float
) -> tuple[EngineClient, MemoryBudget]:
    """The engine in a process of its own, which loads the model while this one gets ready."""
    from qtool.quant.hub import resolve_model
    from qtool.runtime.server.engine_main import EngineSpec
    from qtool.runtime.server.engine_process import EngineProcess

    folder = resolve_model(model)
    signals.check()
    spec = EngineSpec(model, arguments, logging.getLogger("qtool").getEffectiveLevel(), start_timeout_s)
    process = EngineProcess(spec)
    try:
        from qtool.runtime.server.remote_engine import RemoteEngine
        from qtool.runtime.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(folder)
        signals.check()
        ready = process.wait_ready()
        signals.check()
    except BaseException:
        process.close()
        raise
    return RemoteEngine(spec, process, ready, tokenizer, step_timeout_s=step_timeout_s), ready.memory
