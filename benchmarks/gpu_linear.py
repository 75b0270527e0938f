"""Quantized linear layers against the memory limit and against 16-bit cuBLAS, on one NVIDIA GPU.

    python benchmarks/gpu_linear.py                 # the table
    python benchmarks/gpu_linear.py --tune          # measure all cuts first; kept for this machine

Method: the copy ceiling is measured first. Every product is replayed from a CUDA graph over weights that take turns
and together exceed the L2 cache. cuBLAS and the modes take turns three times, from 128 tokens on each for 0.1 s before
it is timed: what large products reach is a matter of power, and the second to run would find the device hot. Medians.
All multiply the same layer, normally distributed weights as they are or rounded to nearest, by fresh random
activations; the relative error is against the float64 product of the dequantized weight (for int8 activations: with the
activations rounded to int8). "share" is the packed weight's bytes over the time, over the copy ceiling. With --json or
$OUT, all figures are written as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from qtool.quant.algorithms.rtn import rtn
from qtool.quant.scheme import QuantScheme
from qtool.runtime.kernels.cuda.choice import Choice, bucket_of, choose, encode, save_tuned
from qtool.runtime.kernels.cuda.layout import PackedWeight, pack_weight
from qtool.runtime.kernels.cuda.linear import apply_choice
from qtool.runtime.kernels.cuda.timing import calls_of, copies, copy_ceiling, graph_microseconds, in_turns, settling
from qtool.runtime.kernels.cuda.tuning import candidates, precompile, product, random_weight, tune
from qtool.runtime.kernels.interface import LinearSpec

SHAPES = {  # name → (rows, cols)
    "7B qkv": (12288, 4096),
    "7B o": (4096, 4096),
    "7B gate_up": (22016, 4096),
    "7B down": (4096, 11008),
    "8B qkv": (6144, 4096),
    "8B gate_up": (28672, 4096),
    "8B down": (4096, 14336),
}
MODES = {"w4a16": "w4g128", "w4a8": "w4g128a8", "w8a8": "w8a8", "w8a16": "w8"}  # or any scheme by its own name
Row = dict[str, object]


def exact_product(x: Tensor, weight: Tensor, act_bits: int | None) -> Tensor:
    """Float64 x @ weight.T, x rounded per token to int8 where the scheme does so. weight: [N, K] float32, exact."""
    x = x.double()
    if act_bits:
        scale = x.abs().amax(dim=1, keepdim=True) / 127
        x = (x / scale).round() * scale
    parts = [x @ part.double().T for part in weight.split(4096)]
    return torch.cat(parts, dim=1)


@dataclass(frozen=True)
class Layer:
    """One linear layer in one mode: its packed weight, copies that take turns, and the exact weight [N, K] float32."""

    shape: str
    mode: str
    spec: LinearSpec
    packed: PackedWeight
    rounds: list[PackedWeight]
    dense: Tensor

    def activations(self, count: int) -> Tensor:
        """Fresh random ones. [count, K]"""
        return torch.randn(count, self.spec.cols, device=self.dense.device).to(self.spec.dtype)

    def product(self, x: Tensor) -> Callable[[int], object]:
        """The product of x by the chosen kernel."""
        out = torch.full((len(x), self.spec.rows), torch.nan, dtype=self.spec.dtype, device=x.device)
        return product(self.rounds, x, self.spec, choose(self.spec, len(x), x.device), out)

    def row(self, x: Tensor, microseconds: float, ceiling: float) -> Row:
        """What is told of a product that took so long."""
        choice = choose(self.spec, len(x), x.device)
        size = sum(t.numel() * t.element_size() for t in (self.packed.codes, self.packed.scales, self.packed.zeros))
        row: Row = {
            "shape": self.shape,
            "mode": self.mode,
            "tokens": len(x),
            "microseconds": microseconds,
            "bytes": size,
            "gbs": size / microseconds / 1e3,
            "share": size / microseconds / 1e3 / ceiling,
            "choice": encode(choice),
        }
        if self.spec.scheme.act_bits and choice is not None:
            row["microseconds_with_quantization"] = with_quantization(self.rounds, x, self.spec, choice)
        return row

    def error(self, count: int) -> float:
        """Relative error of the product of `count` tokens."""
        x = self.activations(count)
        want = exact_product(x, self.dense, self.spec.scheme.act_bits)
        got = apply_choice(x, self.packed, self.spec, choose(self.spec, count, x.device))
        return float((got.double() - want).norm() / want.norm())


def spec_of(shape: str, mode: str, dtype: torch.dtype) -> LinearSpec:
    """The linear of a named shape in a mode. Raises QtoolError for a mode that is neither of MODES nor a scheme."""
    return LinearSpec(*SHAPES[shape], QuantScheme.parse(MODES.get(mode, mode)), dtype=dtype)


def make_layer(shape: str, mode: str, dense: Tensor) -> Layer:
    """The layer whose 16-bit weight [N, K] is `dense`, each weight rounded to nearest."""
    spec = spec_of(shape, mode, dense.dtype)
    weight = rtn(dense, spec.scheme, scale_dtype=torch.float16)
    packed = pack_weight(weight, spec.scheme.act_bits or 16, weight.codes.device)
    rounds = [replace(packed, codes=codes, scales=scales) for codes, scales in copies((packed.codes, packed.scales))]
    return Layer(shape, mode, spec, packed, rounds, weight.dequantize(torch.float32))


def with_quantization(rounds: list[PackedWeight], x: Tensor, spec: LinearSpec, choice: Choice) -> float:
    """Microseconds of quantizing the activations and multiplying."""
    each = calls_of(len(x), len(rounds))
    return graph_microseconds(lambda i: apply_choice(x, rounds[i % len(rounds)], spec, choice), each)


def dense_product(weights: list[tuple[Tensor, ...]], x: Tensor) -> Callable[[int], object]:
    """The 16-bit product of x by weights that take turns."""
    return lambda i: torch.nn.functional.linear(x, weights[i % len(weights)][0])


def measure_shape(
    shape: str, modes: list[str], tokens: list[int], dtype: torch.dtype, ceiling: float
) -> tuple[list[Row], dict[tuple[str, int], float]]:
    """One row for each mode and number of tokens, and the 16-bit product's microseconds by (shape, tokens).

    Float64 products come last: what heats the device slows its clock for what follows.
    """
    rows, cols = SHAPES[shape]
    weights = copies((torch.randn(rows, cols, dtype=dtype, device="cuda") / cols**0.5,))
    layers = {mode: make_layer(shape, mode, weights[0][0]) for mode in modes}
    dense: dict[tuple[str, int], float] = {}
    found: list[Row] = []
    for count in sorted(tokens):
        x = torch.randn(count, cols, device="cuda").to(dtype)
        calls = [dense_product(weights, x), *(layer.product(x) for layer in layers.values())]
        each = calls_of(count, len(weights), *(len(layer.rounds) for layer in layers.values()))
        dense[shape, count], *times = in_turns(calls, each, settle=settling(count))
        found += [layer.row(x, us, ceiling) for layer, us in zip(layers.values(), times, strict=True)]
    for row in found:
        row["error"] = layers[str(row["mode"])].error(int(str(row["tokens"])))
    return found, dense


def tune_all(shapes: list[str], modes: list[str], tokens: list[int], dtype: torch.dtype) -> list[Row]:
    """Measure all cuts, keep the best for this machine, return all timings."""
    device = torch.device("cuda", torch.cuda.current_device())
    specs = {(s, m): spec_of(s, m, dtype) for s in shapes for m in modes}

    buckets = sorted({bucket_of(t) for t in tokens})
    start = time.time()
    jobs = [(spec, b, c) for spec in specs.values() for b in buckets for c in candidates(spec, b, device)]
    precompile(jobs, device)
    print(f"compiled for {len(jobs)} candidates in {time.time() - start:.0f} s", flush=True)
    every: list[Row] = []
    for (shape, _), spec in specs.items():
        best: dict[str, Choice] = {}
        for name, timings in tune(random_weight(spec), spec, buckets).items():
            best[name] = timings[0].choice
            for t in timings:
                if t.problem is not None:
                    print(f"left out: {name} {encode(t.choice)}: {t.problem}")
            every += [{"key": name, "shape": shape, **asdict(t), "choice": encode(t.choice)} for t in timings]
        save_tuned(torch.cuda.get_device_name(), best)
        torch.cuda.empty_cache()
    print(f"tuned {len(specs)} layers in {time.time() - start:.0f} s", flush=True)
    return every


def show(rows: list[Row], dense: dict[tuple[str, int], float], shapes: list[str], tokens: list[int]) -> None:
    """Print µs · share of the ceiling · times cuBLAS, one line for each shape and number of tokens."""
    at = {(r["shape"], r["tokens"], r["mode"]): r for r in rows}
    modes = list(dict.fromkeys(str(r["mode"]) for r in rows))
    print(f"{'layer':11s} {'M':>4s} {'16-bit':>7s}" + "".join(f" | {m:^20s}" for m in modes))
    for shape in shapes:
        for count in tokens:
            line = f"{shape:11s} {count:4d} {dense[shape, count]:7.2f}"
            for mode in modes:
                r = at[shape, count, mode]
                us = float(str(r["microseconds"]))
                share = float(str(r["share"]))
                line += f" | {us:7.2f} {share:4.0%} {dense[shape, count] / us:5.2f}x"
            print(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated")
    parser.add_argument("--modes", default="w4a16,w4a8,w8a8", help=f"of {', '.join(MODES)}, or w4g32-asym and so on")
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64", help="numbers of tokens (M)")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--tune", action="store_true", help="measure all cuts first and keep the best")
    parser.add_argument("--json", type=Path, help="where all figures go (default: $OUT/gpu_linear.json, if OUT is set)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs an NVIDIA GPU", file=sys.stderr)
        return 1
    shapes, modes = args.shapes.split(","), args.modes.split(",")
    tokens = [int(t) for t in args.tokens.split(",")]
    dtype = getattr(torch, args.dtype)

    ceiling = copy_ceiling(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.dtype}; copy ceiling {ceiling:.0f} GB/s")
    timings = tune_all(shapes, modes, tokens, dtype) if args.tune else []
    specs = [spec_of(shape, mode, dtype) for shape, mode in itertools.product(shapes, modes)]
    device = torch.device("cuda", torch.cuda.current_device())
    precompile([(spec, count, choose(spec, count, device)) for spec in specs for count in tokens], device)
    rows: list[Row] = []
    dense: dict[tuple[str, int], float] = {}
    few = [t for t in tokens if not settling(t)]
    many = [t for t in tokens if settling(t)]  # of all shapes after those of few: they heat the device
    for part, shape in itertools.product(filter(None, (few, many)), shapes):
        found, times = measure_shape(shape, modes, part, dtype, ceiling)
        rows += found
        dense |= times
        torch.cuda.empty_cache()
    show(rows, dense, shapes, tokens)
    worst = max(rows, key=lambda r: float(str(r["error"])))
    print(f"largest relative error {worst['error']:.2e} ({worst['shape']}, {worst['mode']}, M = {worst['tokens']})")

    path = args.json or (Path(os.environ["OUT"]) / "gpu_linear.json" if os.environ.get("OUT") else None)
    if path is not None:
        for row in rows:
            row["microseconds_16_bit"] = dense[str(row["shape"]), int(str(row["tokens"]))]
        figures = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "ceiling_gbs": ceiling,
            "rows": rows,
            "tuning": timings,
        }
        path.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
