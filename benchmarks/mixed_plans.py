"""Mixed plans against uniform ones: what the allocator's plans do to a real model, measured end to end.

    python benchmarks/mixed_plans.py smollm2-135m --text wiki.test.txt --calibration calib.jsonl --bits 4.5 5.0 6.0

Analyzes the model with each --metric, plans each budget, quantizes by --method, and measures on windows of --text the
mean KL of the logits against the 16-bit model, perplexity, and top-1 agreement. Plans to beat: the best uniform plans,
the greedy rule (largest damage saved per byte first), and "first and last blocks in 8 bits".
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

from qtool.quant.algorithms.rtn import rtn
from qtool.quant.blockwise import quantize_block
from qtool.quant.calibration import BlockWalker, calibration_set
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.device import resolve_device
from qtool.quant.documents import load_tokenizer
from qtool.quant.hub import resolve_model
from qtool.quant.job import DEFAULT_ITERS, Job, prepare
from qtool.quant.numerics import GridSearch
from qtool.quant.scheme import QuantPlan
from qtool.sensitivity.allocate import Allocation, Limits, allocate, describe, greedy, uniform_allocations
from qtool.sensitivity.probe import analyze
from qtool.sensitivity.record import Sensitivity
from qtool.sensitivity.verify import run_all


@dataclass(frozen=True)
class Outcome:
    """A plan's measurement: mean KL (nats per token), perplexity, share of equal top-1 tokens."""

    kl: float
    perplexity: float
    top1: float


def final_states(
    checkpoint: Checkpoint, tokens: Tensor, device: torch.device, plan: QuantPlan | None, grid: GridSearch
) -> tuple[BlockWalker, Sequence[Tensor]]:
    """The hidden states after the last block, every linear rounded to nearest as the plan says."""
    walker = BlockWalker(checkpoint, tokens, device=device)
    for block in walker:
        for name, linear in block.linears.items():
            if plan is not None and (scheme := plan[name]) is not None:
                linear.weight.data = rtn(linear.weight.data, scheme, search=grid).dequantize()
    return walker, walker.states


def calibrated_states(
    checkpoint: Checkpoint, tokens: Tensor, device: torch.device, plan: QuantPlan, job: Job, calibration: Tensor
) -> Sequence[Tensor]:
    """The hidden states of `tokens` after the last block, which the quantizer's method has rounded on `calibration`."""
    walker = BlockWalker(checkpoint, calibration, device=device)
    targets = walker.states.copy() if job.settings.stages.search else None
    states = BlockWalker(checkpoint, tokens, device=device).states
    for block in walker:
        if targets is not None:
            run_all(block, targets)
        schemes = {name: plan[name] for name in block.linears}
        quantize_block(block, walker.structure, schemes, job.settings, targets)
        run_all(block, states)
    return states


@torch.no_grad()
def compare(walker: BlockWalker, tokens: Tensor, base: Sequence[Tensor], other: Sequence[Tensor]) -> Outcome:
    """Measure the states `other` against `base` through the 16-bit head."""
    head = walker.head()
    kl = nll = same = 0.0
    count = predicted = 0
    rows = iter(tokens.split(1))
    for a, b in zip(base, other, strict=True):
        for one_a, one_b in zip(a.split(1), b.split(1), strict=True):
            p, q = head(one_a)[0].log_softmax(-1), head(one_b)[0].log_softmax(-1)
            labels = next(rows)[0, 1:].to(q.device)
            kl += float((p.exp() * (p - q)).sum(-1).double().sum())
            same += float((p.argmax(-1) == q.argmax(-1)).sum())
            nll -= float(q[:-1].gather(-1, labels[:, None]).double().sum())
            count, predicted = count + len(p), predicted + len(labels)
    return Outcome(kl / count, math.exp(nll / predicted), same / count)


def first_and_last(sensitivity: Sensitivity, avg_bits: float, low: str, high: str) -> Allocation:
    """The rule of thumb: blocks from both ends inward get `high` while they fit, the rest `low`."""
    last = max(g.block for g in sensitivity.groups)
    names = [low] * len(sensitivity.groups)
    best = describe(sensitivity, names)
    for depth in range(last // 2 + 1):
        names = [high if min(g.block, last - g.block) <= depth else low for g in sensitivity.groups]
        tried = describe(sensitivity, names)
        if tried.average_bits > avg_bits:
            break
        best = tried
    return best


def windows(folder: Path, text: Path, count: int, length: int) -> Tensor:
    """The first `count` windows of `length` tokens of a text: [count, length]."""
    ids = load_tokenizer(folder)(text.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    return torch.tensor(ids[: count * length], dtype=torch.int64).view(count, length)


def candidate_plans(sensitivities: Mapping[str, Sensitivity], bits: list[float]) -> dict[str, Allocation]:
    first = next(iter(sensitivities.values()))
    plans = {f"uniform {name}": a for name, a in uniform_allocations(first).items() if name != "fp16"}
    for budget in bits:
        plans[f"first and last, {budget:g} bits"] = first_and_last(first, budget, "w4g64", "w8")
        for metric, sensitivity in sensitivities.items():
            limits = Limits(avg_bits=budget)
            plans[f"greedy {metric}, {budget:g} bits"] = greedy(sensitivity, limits)
            plans[f"exact {metric}, {budget:g} bits"] = allocate(sensitivity, limits)
    return plans


def print_rank_correlations(sensitivities: Mapping[str, Sensitivity]) -> None:
    """Spearman's correlation of the damages of all groups and schemes, for every two metrics."""
    damages = {
        metric: [value for g in found.groups for name, value in sorted(g.damage.items()) if name != "fp16"]
        for metric, found in sensitivities.items()
    }
    for one, other in itertools.combinations(damages, 2):
        rank = spearmanr(damages[one], damages[other]).statistic
        passes = (sensitivities[m].forward_passes for m in (one, other))
        print(f"Spearman {one} / {other}: {rank:.3f}; forward passes {' / '.join(f'{n:.4g}' for n in passes)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True, help="evaluation text")
    parser.add_argument("--calibration", type=Path, help=".jsonl or .txt for the analysis; default: the library's text")
    parser.add_argument("--schemes", default="fp16,w8,w4g64")
    parser.add_argument("--metric", nargs="+", default=["fisher"])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--bits", type=float, nargs="+", default=[4.5, 5.0, 6.0])
    parser.add_argument("--granularity", default="group", choices=["group", "layer"])
    parser.add_argument("--rounding", default="rtn", choices=["rtn", "gptq"], help="of the analysis")
    parser.add_argument("--method", default="rtn", help="of quantizing: rtn, gptq, rounding")
    parser.add_argument("--iters", type=int, default=DEFAULT_ITERS, help="of the rounding search, each block")
    parser.add_argument("--quantize-samples", type=int, default=32, help="sequences of --seq-len for --method")
    parser.add_argument("--grid", nargs="+", default=["minmax"], choices=["minmax", "signed", "mse"], help="rtn's")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--only", help="regular part of the plan names to measure, for a quick look")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()

    folder, device = resolve_model(args.model), resolve_device(args.device)
    calibration = calibration_set(
        folder, data=args.calibration, num_sequences=args.samples, seq_len=args.seq_len, seed=0
    )
    quantizer_text = calibration_set(
        folder, data=args.calibration, num_sequences=args.quantize_samples, seq_len=args.seq_len, seed=0
    )
    sensitivities = {}
    for metric in args.metric:
        started = time.perf_counter()
        sensitivities[metric] = analyze(
            folder,
            schemes=args.schemes.split(","),
            metric=metric,
            rounding=args.rounding,
            granularity=args.granularity,
            calibration=calibration,
            device=args.device,
        )
        print(f"analyzed with {metric} in {time.perf_counter() - started:.0f} s", flush=True)
    if len(args.metric) > 1:
        print_rank_correlations(sensitivities)
    tokens = windows(folder, args.text, args.windows, args.window)
    results: list[dict[str, Any]] = []
    with Checkpoint(folder) as checkpoint:
        walker, base = final_states(checkpoint, tokens, device, None, "minmax")
        print(f"16-bit perplexity {compare(walker, tokens, base, base).perplexity:.3f}\n")
        print("| plan | rounding | average bits | predicted | mean KL | ppl | top-1 % |\n|---|---|---|---|---|---|---|")
        for name, plan in candidate_plans(sensitivities, args.bits).items():
            if args.only and args.only not in name:
                continue
            for grid in args.grid if args.method == "rtn" else [args.method]:
                if args.method == "rtn":
                    _, states = final_states(checkpoint, tokens, device, plan.plan, grid)
                else:
                    job = prepare(checkpoint, plan=plan.plan, method=args.method, iters=args.iters)
                    states = calibrated_states(checkpoint, tokens, device, plan.plan, job, quantizer_text.tokens)
                got = compare(walker, tokens, base, states)
                bits = plan.average_bits
                print(
                    f"| {name} | {grid} | {bits:.3f} | {plan.damage:.4g} | {got.kl:.4f} | {got.perplexity:.2f} "
                    f"| {100 * got.top1:.1f} |",
                    flush=True,
                )
                results.append(
                    {
                        "plan": name,
                        "grid": grid,
                        "bits": bits,
                        "predicted": plan.damage,
                        "kl": got.kl,
                        "perplexity": got.perplexity,
                        "top1": got.top1,
                    }
                )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
