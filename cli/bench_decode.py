"""`qtool bench decode`: the decode path end to end, on random weights of a known shape."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from qtool.cli.common import Device, Json, Quiet, Reporter
from qtool.quant.errors import QtoolError


def numbers(option: str, text: str) -> list[int]:
    """`1,16,64` → numbers of at least 1; none for an empty text. Raises QtoolError, naming the option."""
    try:
        found = [int(part) for part in text.split(",") if part]
    except ValueError:
        found = [0]
    if any(n < 1 for n in found):
        raise QtoolError(f"{option} must be numbers of at least 1 such as 1,16,64, got {text!r}")
    return found


def command(
    shape: Annotated[str, typer.Option("--shape", help="llama-2-7b, llama-2-13b or llama-3-8b.")] = "llama-2-7b",
    config: Annotated[
        Path | None, typer.Option("--config", help="Take the shape from this config.json instead.")
    ] = None,
    modes: Annotated[
        str,
        typer.Option(
            "--modes",
            help="Of fp16, w4, w4a8, w8a8; -h8 after it: with an int8 head; each may name its KV cache after a colon: "
            "w4:int8, w4-h8:float.",
        ),
    ] = "fp16,w4:int8,w4a8:int8,w8a8:int8",
    in_flight: Annotated[str, typer.Option("--in-flight", help="Requests at once; 0 or more loads.")] = "64,256",
    num_requests: Annotated[
        int | None,
        typer.Option(
            "--num-requests", help="Of each load. Default: 3 × in flight, 2 × from 256 on.", show_default=False
        ),
    ] = None,
    input_len: Annotated[int, typer.Option("--input-len", help="Tokens of each prompt under load.")] = 256,
    short: Annotated[int, typer.Option("--short", help="Output tokens of four requests in five.")] = 50,
    long: Annotated[int, typer.Option("--long", help="Output tokens of the fifth.")] = 500,
    prompts: Annotated[str, typer.Option("--prompts", help="Prompt lengths whose TTFT is measured.")] = "512,2048",
    dtype: Annotated[str, typer.Option("--dtype", help="float16 or bfloat16.")] = "float16",
    device: Device = "auto",
    quiet: Quiet = False,
    json_result: Json = False,
) -> None:
    """Measure the engine without a checkpoint: weights are random, of a published model's shape.

    Decode speed of one request (prompt 128), output tokens per second with many in flight, time to the first token.
    Greedy, end-of-sequence ignored, no prefix caching.
    """
    import torch

    from qtool.quant.device import resolve_device
    from qtool.quant.textfile import read_json
    from qtool.runtime.decode_bench import SHAPES, Load, mode_schemes, open_bench, run_mode
    from qtool.runtime.models import decoder_config

    counts, lengths = numbers("--in-flight", in_flight), numbers("--prompts", prompts)
    for option, value in (("--input-len", input_len), ("--short", short), ("--long", long)):
        if value < 1:
            raise QtoolError(f"{option} must be at least 1, got {value}")
    if num_requests is not None and num_requests < 1:
        raise QtoolError(f"--num-requests must be at least 1, got {num_requests}")
    if dtype not in ("float16", "bfloat16"):
        raise QtoolError(f"--dtype must be float16 or bfloat16, got {dtype!r}")
    if config is None and shape not in SHAPES:
        raise QtoolError(f"--shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    wanted = [(name.partition(":")[0], name.partition(":")[2] or "float") for name in modes.split(",")]
    for mode, kv in wanted:
        try:
            mode_schemes(mode)
        except QtoolError as error:
            raise QtoolError(f"--modes: {error}") from None
        if kv not in ("float", "int8"):
            raise QtoolError(f"--modes: a KV cache is float or int8, got {mode}:{kv}")
    settings = SHAPES[shape] if config is None else read_json(config)
    decoder_config(settings)  # refused before weights are made
    where = resolve_device(device)
    loads = [Load(n, num_requests or n * (2 if n >= 256 else 3), input_len, short, long) for n in counts]
    reporter = Reporter(quiet, json_result)
    name = shape if config is None else str(config)
    figures = []
    with reporter.progress() as progress:
        for mode, kv in wanted:
            bench = open_bench(
                name,
                mode,
                kv_mode="int8" if kv == "int8" else "float",
                device=where,
                loads=loads,
                prompts=lengths,
                dtype=getattr(torch, dtype),
                settings=settings,
            )
            figures.append(run_mode(bench, name, mode, loads, lengths, progress))
            del bench
            if where.type == "cuda":
                torch.cuda.empty_cache()
    on = torch.cuda.get_device_name(where) if where.type == "cuda" else "CPU"
    columns = [f"{n} at once, tok/s" for n in counts] + [f"TTFT {n}, ms" for n in lengths]
    rows = [
        (f"{f.mode}, KV {f.kv}", f"{f.single:,.1f}", *(f"{v:,.0f}" for v in f.many.values()),
         *(f"{v:.1f}" for v in f.ttft_ms.values()), f"{f.start_seconds:.1f}", f"{f.weight_bytes / 1e9:.2f}")
        for f in figures
    ]  # fmt: skip
    header = ["mode", "1 at once, tok/s", *columns, "start s", "weights GB"]
    reporter.table(f"{name}, {dtype}, random weights, {on}", header, rows)
    reporter.result({"device": on, "torch": torch.__version__, "dtype": dtype, "modes": [asdict(f) for f in figures]})
