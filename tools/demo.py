"""`make demo`: the whole loop once on the default model, each step a qtool command that you can repeat.

fetch → analyze → plan → quantize → compare → bench, then one table: before and after.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MODEL = "smollm2-135m"
VERDICTS = {0: "PASS", 1: "FAIL", 2: "INCONCLUSIVE"}


def run(*words: str, ok: tuple[int, ...] = (0,)) -> tuple[int, Any]:
    """Run one qtool command with --json; show the command, pass its progress through, return (status, result)."""
    print(f"\n$ qtool {shlex.join(words)}", file=sys.stderr, flush=True)
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "qtool.cli", *words, "--json"], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode not in ok:
        sys.exit(done.returncode)
    print(f"  ({time.monotonic() - start:.0f} s)", file=sys.stderr, flush=True)
    return done.returncode, json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where the artifact and the reports go")
    parser.add_argument("--avg-bits", default="6.5", help="budget: average bits per weight over the blocks' linears")
    args = parser.parse_args()
    out: Path = args.out
    if out.exists():
        # only ever our own earlier output: the marker is written first
        if not (out / ".qtool-demo").exists():
            sys.exit(f"error: {out} exists and is no earlier demo output: choose another --out")
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / ".qtool-demo").touch()

    start = time.monotonic()
    sensitivity, plan, artifact, report = (str(out / n) for n in ("sensitivity.json", "plan.json", "model", "report"))
    run("fetch", MODEL)
    run("analyze", MODEL, "--out", sensitivity)
    _, planned = run("plan", sensitivity, "--avg-bits", args.avg_bits, "--out", plan)
    run("quantize", MODEL, "--plan", plan, "--out", artifact)
    size = ("--windows", "16", "--generations", "8")
    status, comparison = run("compare", MODEL, artifact, *size, "--out", report, ok=(0, 1, 2))
    bench = ("--concurrency", "1,8", "--num-requests", "10")
    before, after = (run("bench", folder, *bench)[1]["results"] for folder in (MODEL, artifact))

    print_table(comparison, before, after)
    print(f"plan      {', '.join(f'{n} × {s}' for s, n in planned['schemes'].items())}")
    print(f"verdict   {VERDICTS[status]}")
    print(f"report    {comparison['report']}")
    print(f"artifact  {artifact}   (qtool serve {artifact}; qtool chat {artifact})")
    print(f"took      {time.monotonic() - start:.0f} s")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def print_table(comparison: Any, before: Any, after: Any) -> None:
    """The closing table: what the model was, and what it is now."""
    metrics = {m["name"]: m for m in comparison["metrics"]}
    table = Table("", "before", "after", "gate", title=f"{MODEL}, before and after", title_justify="left")
    sizes = [comparison[side]["bytes"] for side in ("base", "candidate")]
    table.add_row("weights, MB", *(f"{size / 1e6:.1f}" for size in sizes))
    for name, metric in metrics.items():
        table.add_row(name, *(_number(metric[side]) for side in ("base", "candidate")), metric["verdict"])
    table.add_row("same top-1 token, %", "100", f"{100 * comparison['divergence']['same_top1']:.1f}")
    for b, a in zip(before, after, strict=True):
        table.add_row(f"tokens/s, {b['concurrency']} at once", *(f"{r['output_tokens_per_s']:.0f}" for r in (b, a)))
        table.add_row(f"TTFT p50, ms, {b['concurrency']} at once", *(f"{1e3 * r['ttft']['p50']:.0f}" for r in (b, a)))
    Console().print(table)


if __name__ == "__main__":
    main()
