"""Our lm-eval model class beside lm-eval's own over transformers, on the same multiple-choice items in one run.

    python benchmarks/harness_speed.py MODEL --items ITEMS.jsonl [--dtype float32] [--batch-sizes 1,8,32,64]

Both get the same requests (context, choice) as strings. lm-eval's class first runs a tenth of the items at every batch
size; the fastest is used. Then the two take turns, `--rounds` times each; the best time of each counts. Loading is left
out for both. Printed as JSON: seconds, their ratio, accuracies, items whose choice differs, the largest difference of a
log-likelihood.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from qtool.evalsets.harness import QtoolLM, serve
from qtool.evalsets.items import Item
from qtool.evalsets.own_sets import read_choice_set
from qtool.quant.documents import load_tokenizer
from qtool.quant.hub import resolve_model

TRIED = 10  # one item in so many is run at every batch size


def requests_of(items: Sequence[Item]) -> list[Instance]:
    """One request a choice, as lm-eval makes them of a multiple-choice task."""
    pairs = [(item.context, item.delimiter + choice) for item in items for choice in item.choices]
    return [Instance("loglikelihood", doc={}, arguments=pair, idx=i) for i, pair in enumerate(pairs)]


@dataclass(frozen=True)
class Run:
    """Wall-clock and processor seconds, and the log-likelihood of every choice of every item."""

    wall: float
    cpu: float
    scores: list[float]


def timed(lm: Any, items: Sequence[Item]) -> Run:
    """Let a model class score every choice of the items."""
    requests = requests_of(items)
    wall, cpu = time.perf_counter(), time.process_time()
    scores = [score for score, _ in lm.loglikelihood(requests, disable_tqdm=True)]
    return Run(time.perf_counter() - wall, time.process_time() - cpu, scores)


def chosen(items: Sequence[Item], scores: Sequence[float]) -> list[int]:
    """The likeliest choice of each item."""
    picked, at = [], 0
    for item in items:
        own = list(scores[at : at + len(item.choices)])
        picked.append(own.index(max(own)))
        at += len(own)
    return picked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--items", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-sizes", default="1,8,32,64")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=int, default=None, help="the first so many items")
    wish = parser.parse_args()

    folder = resolve_model(wish.model)
    items = read_choice_set(wish.items).items[: wish.limit]
    tokenizer = load_tokenizer(folder)
    theirs = HFLM(pretrained=str(folder), dtype=wish.dtype, device=wish.device, batch_size=1)
    tried = {}
    for size in map(int, wish.batch_sizes.split(",")):
        theirs.batch_size_per_gpu = size
        tried[size] = timed(theirs, items[::TRIED]).wall
    theirs.batch_size_per_gpu = min(tried, key=lambda size: tried[size])
    runs: dict[str, list[Run]] = {"qtool": [], "transformers": []}
    for _ in range(wish.rounds):
        # a new engine a round: nothing of the round before is in its prefix cache
        served = serve(folder, dtype=wish.dtype, device=wish.device)
        runs["transformers"].append(timed(theirs, items))
        runs["qtool"].append(timed(QtoolLM(served=served, tokenizer=tokenizer), items))
    right = [item.answer for item in items]
    own, other = (runs[name][-1].scores for name in ("qtool", "transformers"))
    picks = {"qtool": chosen(items, own), "transformers": chosen(items, other)}
    best = {name: min(run.wall for run in found) for name, found in runs.items()}
    result = {
        "items": len(items),
        "requests": len(own),
        "threads": torch.get_num_threads(),
        "batch_size": theirs.batch_size_per_gpu,
        "seconds_of_a_tenth": {size: round(spent, 2) for size, spent in tried.items()},
        "seconds": {name: [round(run.wall, 2) for run in found] for name, found in runs.items()},
        "processor_seconds": {name: [round(run.cpu, 2) for run in found] for name, found in runs.items()},
        "times_faster": round(best["transformers"] / best["qtool"], 2),
        "accuracy": {
            name: sum(p == a for p, a in zip(found, right, strict=True)) / len(items) for name, found in picks.items()
        },
        "items_chosen_differently": sum(a != b for a, b in zip(*picks.values(), strict=True)),
        "largest_difference_nats": max(abs(a - b) for a, b in zip(own, other, strict=True)),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
