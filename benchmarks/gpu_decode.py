"""Decode end to end on one NVIDIA GPU, random weights of a published shape: `qtool bench decode` with a profile.

    python benchmarks/gpu_decode.py --shape llama-2-7b --modes fp16,w4:int8,w4a8:int8,w8a8:int8

A mode may name its KV cache after a colon (float or int8). With --profile, the kernels of decode steps of one request and
of steps with 64 requests are listed by time. With --json or $OUT, figures are written as they come.
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

from qtool.runtime.decode_bench import MODES, SHAPES, DecodeBench, Load, random_decoder, run_mode

LOADS = {64: Load(64, 192), 256: Load(256, 512)}


def profile(shape: str, mode: str, kv: str) -> str:
    """Device time by kernel: ten decode steps of one request, then ten steps that begin with 64 requests at once."""
    device = torch.device("cuda", torch.cuda.current_device())
    decoder = random_decoder(
        SHAPES[shape], MODES[mode], dtype=torch.float16, device=device, max_model_len=1024, kv_mode=kv
    )
    bench = DecodeBench(decoder, max_num_seqs=64, max_model_len=1024)
    text = ""
    for count, steps in ((1, 10), (64, 10)):
        core = bench.engine(count)
        for i in range(count):
            core.add_request(bench._request(str(i), 256, 100))
        if count == 1:
            for _ in range(5):
                core.step()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            for _ in range(steps):
                core.step()
            torch.cuda.synchronize()
        wall = 1e3 * (time.perf_counter() - begin)
        rows = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)[:14]
        total = sum(e.self_device_time_total for e in found.key_averages()) / 1e3
        text += f"{shape} {mode} kv {kv}, {count} requests, {steps} steps: {wall:.1f} ms, device busy {total:.1f} ms\n"
        text += "".join(
            f"  {e.self_device_time_total / steps:9.1f} us a step {e.count / steps:7.1f} calls  {e.key[:90]}\n"
            for e in rows
        )
        while core.has_unfinished():
            core.step()
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-2-7b", choices=SHAPES)
    parser.add_argument("--modes", default="fp16,w4:int8,w4a8:int8,w8a8:int8", help=f"of {', '.join(MODES)}")
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
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.shape}, float16", flush=True)
    begin = time.perf_counter()
    for name in args.modes.split(","):
        if time.perf_counter() - begin > args.deadline:
            print(f"{name}: left out, past the deadline")
            continue
        mode, _, kv = name.partition(":")
        started = time.perf_counter()
        found = run_mode(
            args.shape,
            mode,
            kv_mode=kv or "float",
            device=torch.device("cuda", torch.cuda.current_device()),
            loads=loads,
            prompts=prompts,
        )
        figures.append(asdict(found))
        many = ", ".join(f"{n} at once {v:,.0f} tok/s" for n, v in found.many.items())
        ttft = ", ".join(f"TTFT {n}: {v:.1f} ms" for n, v in found.ttft_ms.items())
        print(
            f"{mode:5s} kv {found.kv:5s}: decode {found.single:6.1f} tok/s, {many}, {ttft}, start {found.start_seconds:.1f} s, "
            f"weights {found.weight_bytes / 1e9:.2f} GB ({time.perf_counter() - started:.0f} s in all)",
            flush=True,
        )
        if path is not None:
            path.write_text(json.dumps(figures, indent=1))
        torch.cuda.empty_cache()
        if args.profile:
            print(profile(args.shape, mode, kv or "float"), flush=True)
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
