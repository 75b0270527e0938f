"""Paged decode and prefill attention against the memory limit, on one NVIDIA GPU.

    python benchmarks/gpu_attention.py

Decode: 64 sequences of 4,096 tokens; GB/s of keys and values over the time, and their share of the copy ceiling that is
measured first. Fragmented block tables, fresh random inputs, CUDA-graph replays, medians. Rotation and the write of the
new token are part of the kernel, so they count. Prefill: one prompt, all kernels (rotation and cache, laying out of the
keys, attention), TFLOP/s of the causal half.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from qtool.runtime.kernels.cuda.attention import attend, plan_step
from qtool.runtime.kernels.cuda.timing import copy_ceiling, graph_microseconds
from qtool.runtime.kernels.kv_cache import KVMode, make_kv_cache
from qtool.runtime.kernels.layer_ops import AttentionShape

SHAPES = {"7B": AttentionShape(32, 32, 128, 1e-5), "8B": AttentionShape(32, 8, 128, 1e-5)}
BLOCK = 16


def measure(shape: AttentionShape, mode: KVMode, sequences: int, context: int, tokens: int) -> float:
    """Microseconds of one step: `tokens` new tokens of each sequence after `context` in the cache."""
    device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.float16
    blocks = -(-(context + tokens) // BLOCK)
    cache = make_kv_cache(
        sequences * blocks, BLOCK, 2 * shape.num_kv_heads, shape.head_dim, dtype=dtype, mode=mode, device=device
    )
    if mode == "int8":
        cache.values.random_(-127, 128)
        assert cache.scales is not None
        cache.scales.uniform_(0.01, 0.02)
    else:
        cache.values.normal_()
    order = torch.randperm(sequences * blocks).view(sequences, blocks).tolist()
    plan = plan_step(
        [context] * sequences, [tokens] * sequences, order, block_size=BLOCK, shape=shape, device=device
    )  # fmt: skip
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    qkv = torch.randn(sequences * tokens, width, device=device).to(dtype)
    table = torch.rand(context + tokens, 1, shape.head_dim, device=device).to(dtype)
    return graph_microseconds(lambda i: attend(qkv, shape, None, (table, table), cache, plan, None), 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where all figures go (default: $OUT/gpu_attention.json)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs an NVIDIA GPU", file=sys.stderr)
        return 1
    ceiling = copy_ceiling(torch.device("cuda"))
    torch.cuda.empty_cache()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy ceiling {ceiling:.0f} GB/s")
    figures: dict[str, object] = {"device": torch.cuda.get_device_name(), "ceiling_gbs": ceiling}
    for name, shape in SHAPES.items():
        for sequences, context in ((64, 4095), (1, 4095), (256, 511)):
            first = 0.0
            for mode in ("float", "int8"):
                us = measure(shape, mode, sequences, context, 1)
                token = 2 * shape.num_kv_heads * (2 * shape.head_dim if mode == "float" else shape.head_dim + 2)
                gbs = sequences * (context + 1) * token / us / 1e3
                first = first or us
                figures[f"{name} decode {sequences}x{context + 1} {mode}"] = us
                print(
                    f"{name} decode {sequences:3d} x {context + 1}, {mode:5s}: {us:8.1f} us, {gbs:5.0f} GB/s, "
                    f"{gbs / ceiling:4.0%} of the ceiling, {first / us:.2f} x 16-bit",
                    flush=True,
                )
        for context, tokens in ((0, 512), (0, 2048), (2048, 2048), (8192, 512)):
            for mode in ("float", "int8"):
                us = measure(shape, mode, 1, context, tokens)
                flop = 4 * shape.num_heads * shape.head_dim * tokens * (context + tokens / 2)
                figures[f"{name} prefill {context}+{tokens} {mode}"] = us
                print(
                    f"{name} prefill {tokens} after {context}, {mode:5s}: {us:8.1f} us, {flop / us / 1e6:4.0f} TFLOP/s",
                    flush=True,
                )
    path = args.json or (Path(os.environ["OUT"]) / "gpu_attention.json" if os.environ.get("OUT") else None)
    if path is not None:
        path.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
