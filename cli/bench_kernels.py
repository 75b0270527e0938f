"""`qtool bench kernels`: each linear of a model's shape against the memory limit and against 16-bit weights."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated

import typer

from qtool.cli.bench_decode import numbers
from qtool.cli.common import Device, Json, Quiet, Reporter
from qtool.quant.errors import QtoolError


def command(
    shape: Annotated[str, typer.Option("--shape", help="llama-2-7b, llama-2-13b or llama-3-8b.")] = "llama-2-7b",
    layers: Annotated[
        str | None, typer.Option("--layers", help="Rather than a model's: ROWSxCOLS, comma-separated.")
    ] = None,
    schemes: Annotated[str, typer.Option("--schemes", help="Schemes to measure beside fp16.")] = "w4g128,w4g128a8,w8a8",
    tokens: Annotated[str, typer.Option("--tokens", help="Numbers of tokens (M).")] = "1,16,64",
    dtype: Annotated[str, typer.Option("--dtype", help="Activations: float16, bfloat16 or float32.")] = "bfloat16",
    device: Device = "auto",
    quiet: Quiet = False,
    json_result: Json = False,
) -> None:
    """Measure the products of a decode step as they are served here, with weights that no cache holds.

    Each cell: microseconds, share of the copy ceiling (weight bytes over time, over what a large copy moves), speed-up
    over 16-bit weights. Rounding 16-bit activations to int8 counts. The times go into this device's table too, which
    `qtool plan --max-latency-ms` reads.
    """
    import torch

    from qtool.quant.device import resolve_device
    from qtool.quant.scheme import parse_scheme
    from qtool.runtime.decode_bench import SHAPES
    from qtool.runtime.kernels.measure import LinearCase, copy_ceiling, device_name, measure_linears, save_times
    from qtool.runtime.models import decoder_config

    if dtype not in ("float16", "bfloat16", "float32"):
        raise QtoolError(f"--dtype must be float16, bfloat16 or float32, got {dtype!r}")
    counts = numbers("--tokens", tokens)
    names = list(dict.fromkeys(["fp16", *(s.strip() for s in schemes.split(",") if s.strip())]))
    for name in names:
        parse_scheme(name)
    if layers is not None:
        matches = [re.fullmatch(r"(\d+)x(\d+)", part.strip()) for part in layers.split(",")]
        if any(m is None or 0 in map(int, m.groups()) for m in matches):
            raise QtoolError(f"--layers must look like 4096x4096,12288x4096, got {layers!r}")
        sizes = {m[0]: (int(m[1]), int(m[2])) for m in matches if m}
    elif shape in SHAPES:
        c = decoder_config(SHAPES[shape])
        width = c.num_heads * c.head_dim
        sizes = {
            "qkv": (width + 2 * c.num_kv_heads * c.head_dim, c.hidden_size),
            "o": (c.hidden_size, width),
            "gate_up": (2 * c.intermediate_size, c.hidden_size),
            "down": (c.hidden_size, c.intermediate_size),
        }
    else:
        raise QtoolError(f"--shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    where, kind = resolve_device(device), getattr(torch, dtype)
    reporter = Reporter(quiet, json_result)
    ceiling = copy_ceiling(where)
    cases = [LinearCase(*size, name, m) for size in sizes.values() for name in names for m in counts]
    with reporter.progress() as progress:
        found = measure_linears(cases, where, kind, progress)
    save_times(found, where, kind)
    times = {t.case: t for t in found}
    rows = []
    for layer, size in sizes.items():
        for m in counts:
            dense = times[LinearCase(*size, "fp16", m)].microseconds
            cells = [times[LinearCase(*size, name, m)] for name in names]
            figures = [
                f"{t.microseconds:,.1f} · {t.gb_per_s / ceiling:.0%} · {dense / t.microseconds:.2f}" for t in cells
            ]
            rows.append((layer if layers else f"{layer} {size[0]}x{size[1]}", str(m), *figures))
    reporter.table(
        f"{device_name(where)}, {dtype}; copy ceiling {ceiling:,.0f} GB/s: µs · share of it · × 16-bit",
        ["layer", "M", *names],
        rows,
    )
    reporter.result(
        {
            "device": device_name(where),
            "torch": torch.__version__,
            "dtype": dtype,
            "ceiling_gb_per_s": ceiling,
            "times": [asdict(t) for t in found],
        }
    )
