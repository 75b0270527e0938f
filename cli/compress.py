"""qtool compress: analyze, plan, quantize and compare in one, until the gate passes."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qtool.cli.analyze import Granularity, Rounding
from qtool.cli.common import EXIT_FAIL, EXIT_INCONCLUSIVE, EXIT_PASS, Device, Json, Model, Quiet, Reporter
from qtool.cli.plan import AvgBits, Batch, MaxBytes, MaxLatency, Wishes, parse_bytes

if TYPE_CHECKING:
    from qtool.sensitivity.compress import Outcome

_EXITS = {"PASS": EXIT_PASS, "FAIL": EXIT_FAIL}


def _percent(option: str, text: str) -> float:
    """`2%` or `2` → 0.02. Raises QtoolError for anything that is no percentage above 0."""
    from qtool.quant.errors import QtoolError

    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%?\s*", text)
    if match is None or float(match[1]) == 0:
        raise QtoolError(f"{option} {text!r}: write a percentage such as 2%")
    return float(match[1]) / 100


def command(
    model: Model,
    avg_bits: AvgBits = None,
    max_bytes: MaxBytes = None,
    max_latency_ms: MaxLatency = None,
    gate: Annotated[
        str,
        typer.Option("--gate", help="2% (accuracy in points, perplexity in percent), or a TOML file: docs/gate.md."),
    ] = "2%",
    gate_kl: Annotated[
        float | None, typer.Option("--gate-kl", help="Mean KL per token, nats; default: as --gate says, or 0.1.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to make; default ./MODEL-compressed. NAME-report beside.")
    ] = None,
    keep: Wishes = None,
    relax: Annotated[
        str, typer.Option("--relax", help="By how much the budget grows when the gate does not pass.")
    ] = "5%",
    max_steps: Annotated[int, typer.Option("--max-steps", min=1, help="Budgets that are tried at most.")] = 12,
    schemes: Annotated[
        str | None, typer.Option("--schemes", help="Candidates, as in `qtool analyze`.", show_default=False)
    ] = None,
    metric: Annotated[str, typer.Option("--metric", help="Of the analysis: fisher, kl, output or weight.")] = "fisher",
    rounding: Rounding = "rtn",
    granularity: Granularity = "group",
    method: Annotated[str, typer.Option("--method", help="Of quantizing, as in `qtool quantize`.")] = "gptq",
    data: Annotated[
        Path | None, typer.Option("--data", help="Calibration text, .txt or .jsonl; default: the Python library's own.")
    ] = None,
    num_sequences: Annotated[int, typer.Option("--samples", help="Calibration sequences for quantizing.")] = 32,
    seq_len: Annotated[int, typer.Option("--seq-len", help="Tokens of each sequence.")] = 512,
    text: Annotated[
        Path | None, typer.Option("--text", help="Text for the gate, as --data of `qtool compare`. Default: built in.")
    ] = None,
    windows: Annotated[int, typer.Option("--windows", help="Windows of that text.")] = 8,
    max_windows: Annotated[
        int, typer.Option("--max-windows", help="Windows to go up to while the verdict is INCONCLUSIVE.")
    ] = 64,
    context: Annotated[int, typer.Option("--context", help="Tokens in a window.")] = 1024,
    tasks: Annotated[
        list[str] | None,
        typer.Option("--tasks", help="Multiple-choice set, as in `qtool compare`; `none`: no set."),
    ] = None,
    batch: Batch = 1,
    device: Device = "auto",
    seed: Annotated[int, typer.Option("--seed", help="Of calibration and comparison.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace the output folder if it exists.")] = False,
    quiet: Quiet = False,
    json_result: Json = False,
) -> int:
    """Make MODEL as small as asked for (or as fast), and prove that it is still good.

    Analyzes, plans, quantizes and compares; while the gate does not pass, the budget grows step by step. The same
    command goes on where it was stopped, and is done at once where it was finished. Exit status: 0 PASS, 1 FAIL at
    the largest budget, 2 INCONCLUSIVE there.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # lm-eval's bars; tqdm reads it when it is imported
    from qtool.evalsets.builtin import BUILT_IN
    from qtool.evalsets.compare import DEFAULT_SET
    from qtool.evalsets.gatefile import read_gate
    from qtool.quant.calibration import calibration_set
    from qtool.quant.errors import QtoolError
    from qtool.quant.hub import resolve_model
    from qtool.quant.method import parse_method
    from qtool.sensitivity.allocate import Keep, Limits
    from qtool.sensitivity.candidates import DEFAULT_SCHEMES
    from qtool.sensitivity.compress import Wish, compress
    from qtool.sensitivity.probe import NUM_SEQUENCES, check_request

    reporter = Reporter(quiet, json_result)
    thresholds = read_gate(gate)
    if gate_kl is not None:
        thresholds = replace(thresholds, max_kl=gate_kl)
    wish = Wish(
        limits=Limits(None if max_bytes is None else parse_bytes(max_bytes), avg_bits, max_latency_ms),
        keep=tuple(Keep.parse(wish) for wish in keep or []),
        thresholds=thresholds,
        schemes=DEFAULT_SCHEMES if schemes is None else tuple(s for s in schemes.split(",") if s.strip()),
        metric=metric,
        rounding=rounding,
        granularity=granularity,
        method=method,
        batch=batch,
        relax=_percent("--relax", relax),
        max_steps=max_steps,
        windows=windows,
        max_windows=max(windows, max_windows),
        context=context,
        text=text,
        tasks=(DEFAULT_SET,) if tasks is None else tuple(t for t in tasks if t != "none"),
        device=device,
        seed=seed,
    )
    check_request(wish.schemes, metric, device, rounding, granularity)
    parse_method(method)
    for file in (text, *(Path(t) for t in wish.tasks if t not in BUILT_IN)):
        if file is not None and not file.is_file():
            raise QtoolError(f"{file}: no such file")
    target = out or Path(f"{Path(model.rstrip('/')).name or 'model'}-compressed")
    with reporter.progress() as progress:
        folder = resolve_model(model, progress=progress)
        analysis, calibration = (
            calibration_set(folder, data=data, num_sequences=count, seq_len=seq_len, seed=seed)
            for count in (min(NUM_SEQUENCES, num_sequences), num_sequences)
        )
        outcome = compress(
            folder,
            target,
            wish,
            analysis=analysis,
            calibration=calibration,
            name=model,
            overwrite=force,
            command=["qtool", *sys.argv[1:]],
            progress=progress,
            say=reporter.say,
        )
    _show(reporter, outcome, target)
    return _EXITS.get(outcome.verdict, EXIT_INCONCLUSIVE)


def _show(reporter: Reporter, outcome: Outcome, target: Path) -> None:
    rows = [
        [
            str(i),
            f"{step.average_bits:.3f}",
            f"{step.total_bytes / 1e6:.2f}",
            "" if step.latency_ms is None else f"{step.latency_ms:.3f}",
            str(step.windows),
            step.verdict,
        ]
        for i, step in enumerate(outcome.steps, start=1)
    ]
    reporter.table("Budgets tried", ["step", "bits per weight", "MB of weights", "ms", "windows", "verdict"], rows)
    for reason in outcome.steps[-1].reasons:
        reporter.line(f"  {reason}")
    if outcome.out is None:
        reporter.line(f"{outcome.verdict}: nothing was written to {target}  (report: {outcome.report})")
    else:
        again = ", as an equal run left it" if outcome.repeated else ""
        grown = "" if len(outcome.steps) == 1 else f" at budget {len(outcome.steps)}"
        reporter.line(f"{outcome.verdict}{grown}: {outcome.out}{again}  (report: {outcome.report})")
    reporter.result(outcome.to_dict())
