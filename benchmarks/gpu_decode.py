"""Decode end to end on one NVIDIA GPU, random weights of a published shape: `qtool bench decode` with a profile.

    python benchmarks/gpu_decode.py --shape llama-2-7b --modes fp16,w4:int8,w4a8:int8,w8a8:int8

A mode may end in -h8 (an int8 head) and name its KV cache after a colon (float or int8): w4a8-h8:int8. With --profile,
the kernels of some steps are listed by time. With --json or $OUT, figures are written as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from qtool.runtime.decode_bench import MODES, SHAPES, DecodeBench, Load, open_bench, run_mode

LOADS = {64: Load(64, 192), 256: Load(256, 512)}


def profile(bench: DecodeBench) -> str:
    """Device time by kernel: decode steps of one request, the first steps of 64 at once, later ones, a long prompt."""
    text = ""
    for name, count, prompt, skip, steps in (
        ("one request", 1, 256, 5, 10),
        ("64 requests, prompts", 64, 256, 0, 2),
        ("64 requests, decodes", 64, 256, 6, 5),
        ("prompt of 2048", 1, 2048, 0, 2),
    ):
        core = bench.engine(count)
        for i in range(count):
            core.add_request(bench.request(str(i), prompt, 24))
        for _ in range(skip):
            core.step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            begin = time.perf_counter()
            for _ in range(steps):
                core.step()
            torch.cuda.synchronize()
            wall = 1e3 * (time.perf_counter() - begin)
        events = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)
        total = sum(e.self_device_time_total for e in events) / 1e3
        text += f"{name}, {steps} steps: {wall:.2f} ms, kernels {total:.2f} ms\n"
        for e in events[:13]:
            each = e.self_device_time_total / e.count
            text += f"  {e.self_device_time_total / steps:9.1f} us a step, "
            text += f"{e.count / steps:6.1f} x {each:7.2f} us  {e.key[:80]}\n"
        while core.has_unfinished():
            core.step()
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-2-7b", choices=SHAPES)
    modes = f"of {', '.join(MODES)}, each with or without -h8"
    parser.add_argument("--modes", default="fp16,w4:int8,w4a8:int8,w8a8:int8", help=modes)
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--in-flight", default="64,256", help="of 64 and 256")
    parser.add_argument("--prompts", default="512,2048", help="lengths for the time to the first token")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which no further mode begins")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path, help="where all figures go (default: $OUT/gpu_decode-SHAPE.json)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs an NVIDIA GPU", file=sys.stderr)
        return 1
    out = os.environ.get("OUT")
    path = args.json or (Path(out) / f"gpu_decode-{args.shape}.json" if out else None)
    loads = [LOADS[int(n)] for n in args.in_flight.split(",") if n]
    prompts = [int(n) for n in args.prompts.split(",") if n]
    figures: list[dict[str, object]] = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.shape}, {args.dtype}", flush=True)
    begin = time.perf_counter()
    for name in args.modes.split(","):
        if time.perf_counter() - begin > args.deadline:
            print(f"{name}: left out, past the deadline")
            continue
        mode, _, kv = name.partition(":")
        started = time.perf_counter()
        device = torch.device("cuda", torch.cuda.current_device())
        bench = open_bench(
            args.shape,
            mode,
            kv_mode=kv or "float",
            device=device,
            loads=loads,
            prompts=prompts,
            dtype=getattr(torch, args.dtype),
        )
        found = run_mode(bench, args.shape, mode, loads, prompts)
        figures.append(asdict(found))
        many = ", ".join(f"{n} at once {v:,.0f} tok/s" for n, v in found.many.items())
        ttft = ", ".join(f"TTFT {n}: {v:.1f} ms" for n, v in found.ttft_ms.items())
        print(
            f"{mode:8s} kv {found.kv:5s}: decode {found.single:6.1f} tok/s, {many}, {ttft}, "
            f"start {found.start_seconds:.1f} s, weights {found.weight_bytes / 1e9:.2f} GB "
            f"({time.perf_counter() - started:.0f} s in all)",
            flush=True,
        )
        if path is not None:
            path.write_text(json.dumps(figures, indent=1))
        if args.profile:
            print(profile(bench), flush=True)
        del bench
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
