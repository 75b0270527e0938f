"""qtool plan: from an analysis and a budget to a scheme for every layer, or to the whole trade-off."""

from __future__ import annotations

import json
import re
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qtool.cli.common import Device, Json, Quiet, Reporter

if TYPE_CHECKING:
    from qtool.quant.calibration import CalibrationSet
    from qtool.sensitivity.allocate import Allocation, Keep, Latency, Limits
    from qtool.sensitivity.record import Sensitivity
    from qtool.sensitivity.verify import Checked, Measure

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

AvgBits = Annotated[
    float | None,
    typer.Option("--avg-bits", help="Bits per weight over the blocks' linears, scales and zero points counted."),
]
MaxBytes = Annotated[
    str | None, typer.Option("--max-bytes", help="Limit for all weights of the artifact: 90MB, 1.5GiB.")
]
MaxLatency = Annotated[
    float | None,
    typer.Option(
        "--max-latency-ms",
        help="Limit for the time that one decode step spends in the blocks' linears on this device, as measured.",
    ),
]
Wishes = Annotated[
    list[str] | None,
    typer.Option("--keep", help="REGEX (stays in 16 bits) or REGEX=SCHEME, by layer name; may be repeated."),
]
Batch = Annotated[
    int, typer.Option("--batch", min=1, max=65536, help="Sequences in the decode step that --max-latency-ms is about.")
]


def parse_bytes(text: str) -> int:
    """`90MB`, `1.5GiB`, `90000000` → bytes. Raises QtoolError for anything else."""
    from qtool.quant.errors import QtoolError

    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise QtoolError(f"--max-bytes {text!r}: write a size such as 90MB, 1.5GiB or 90000000")
    return int(Decimal(match[1]) * _UNITS[match[2].upper()])


def command(
    sensitivity: Annotated[Path, typer.Argument(metavar="SENSITIVITY", help="The file that `qtool analyze` wrote.")],
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Check that the analysis is of this model; needed for --verify."),
    ] = None,
    avg_bits: AvgBits = None,
    max_bytes: MaxBytes = None,
    max_latency_ms: MaxLatency = None,
    max_kl: Annotated[
        float | None,
        typer.Option("--max-kl", help="The smallest plan of at most this KL (nats per token); exact with --verify."),
    ] = None,
    keep: Wishes = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Measure the plan as a whole; where the prediction misses by 10 %, correct and solve again.",
        ),
    ] = False,
    frontier: Annotated[
        bool, typer.Option("--frontier", help="All budgets at once: a table, JSON, and a picture beside it (.png).")
    ] = False,
    axis: Annotated[str, typer.Option("--axis", help="What --frontier trades for damage: size or latency.")] = "size",
    batch: Batch = 1,
    output: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where the result goes; default plan.json or frontier.json.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Text for --verify, .txt or .jsonl; default: the Python library's own."),
    ] = None,
    device: Device = "auto",
    quiet: Quiet = False,
    json_result: Json = False,
) -> None:
    """Choose the scheme of every layer: least damage within the budget (or least bytes within --max-kl), exactly."""
    from qtool.quant.device import resolve_device
    from qtool.quant.errors import QtoolError
    from qtool.quant.textfile import check_writable
    from qtool.sensitivity.allocate import Keep, Limits
    from qtool.sensitivity.latency import group_latency
    from qtool.sensitivity.record import KL_METRICS, Sensitivity
    from qtool.sensitivity.verify import joint_measure

    reporter = Reporter(quiet, json_result)
    target = output or Path("frontier.json" if frontier else "plan.json")
    check_writable(target)
    if axis not in ("size", "latency"):
        raise QtoolError(f"--axis {axis}: use size or latency")
    budgets = {"--avg-bits": avg_bits, "--max-bytes": max_bytes, "--max-latency-ms": max_latency_ms, "--max-kl": max_kl}
    given = [option for option, value in budgets.items() if value is not None]
    if frontier and given:
        raise QtoolError(f"--frontier shows every budget: leave out {', '.join(given)}")
    if frontier and target.suffix == ".png":
        raise QtoolError(f"--out {target}: names the JSON file; the picture goes beside it, so it cannot end in .png")
    if verify and model is None:
        raise QtoolError("--verify measures the plan: give MODEL after the sensitivity file")
    limit = None if max_bytes is None else parse_bytes(max_bytes)
    limits = None if frontier else Limits(limit, avg_bits, max_latency_ms, max_kl)
    wishes = [Keep.parse(text) for text in keep or []]
    place = resolve_device(device)
    found = Sensitivity.load(sensitivity)
    if max_kl is not None and found.metric not in KL_METRICS and not verify:
        raise QtoolError(f"--max-kl: {sensitivity} holds the metric {found.metric}, no KL; add MODEL and --verify")
    with reporter.progress() as progress:
        text = None
        if model is not None:
            folder = _check_model(model, found, str(sensitivity))
            if verify:
                text = _text(folder, found, data, reporter)
        latency: Latency | None = None
        if max_latency_ms is not None or (frontier and axis == "latency"):
            latency = group_latency(found, place, tokens=batch, progress=progress)
        measure = None if text is None else joint_measure(folder, text.tokens, place, progress, rounding=found.rounding)
        if limits is None:
            _frontier(found, wishes, latency, measure, target, reporter)
        else:
            _plan(found, limits, wishes, latency, measure, target, reporter)


def _check_model(model: str, found: Sensitivity, file: str) -> Path:
    """The model's folder. Raises QtoolError where the analysis is of another model."""
    from qtool.quant.checkpoint import Checkpoint
    from qtool.quant.errors import QtoolError
    from qtool.quant.fingerprint import model_fingerprint
    from qtool.quant.hub import resolve_model
    from qtool.quant.structure import linear_shapes

    folder = resolve_model(model)
    with Checkpoint(folder) as checkpoint:
        shapes = linear_shapes(checkpoint)
        if (other := model_fingerprint(checkpoint)) != found.fingerprint:
            raise QtoolError(
                f"{file} is of another model (fingerprint {found.fingerprint[:12]}, "
                f"{model} has {other[:12]}); analyze again"
            )
    if shapes != found.shapes:
        raise QtoolError(f"{file}: its layers are not those of {model}; analyze again")
    return folder


def _text(folder: Path, found: Sensitivity, data: Path | None, reporter: Reporter) -> CalibrationSet:
    """As many sequences as the analysis was made on."""
    from qtool.quant.calibration import calibration_set

    of_analysis = found.calibration
    text = calibration_set(
        folder, data=data, num_sequences=of_analysis["num_sequences"], seq_len=of_analysis["seq_len"], seed=0
    )
    if text.fingerprint != of_analysis.get("fingerprint"):
        reporter.say(f"--verify measures on {text.source}, the analysis on other text ({of_analysis['source']})")
    return text


def _plan(
    found: Sensitivity,
    limits: Limits,
    wishes: list[Keep],
    latency: Latency | None,
    measure: Measure | None,
    target: Path,
    reporter: Reporter,
) -> None:
    from qtool.quant.planfile import PlanFile
    from qtool.quant.scheme import FLOAT, scheme_name
    from qtool.quant.textfile import write_text
    from qtool.sensitivity.allocate import allocate, best_uniform, uniform_allocations
    from qtool.sensitivity.frontier import table
    from qtool.sensitivity.record import UNITS
    from qtool.sensitivity.verify import check

    checked = None if measure is None else check(found, limits, measure, keep=wishes, latency=latency)
    chosen = allocate(found, limits, keep=wishes, latency=latency) if checked is None else checked.allocation
    details = {
        "model": found.model,
        "metric": found.metric,
        "rounding": found.rounding,
        "unit": UNITS[found.metric],
        "sensitivity_calibration": dict(found.calibration),
        "limits": {
            "avg_bits": limits.avg_bits,
            "max_bytes": limits.max_bytes,
            "max_latency_ms": limits.max_latency_ms,
            "max_kl": limits.max_damage,
            "keep": [f"{w.pattern}={w.scheme}" for w in wishes],
        },
        "average_bits": chosen.average_bits,
        "linear_bytes": chosen.linear_bytes,
        "total_bytes": chosen.total_bytes,
        "latency_ms": chosen.latency_ms,
        "predicted_damage": chosen.damage,
        "verified": None if checked is None else checked.to_dict(),
    }
    write_text(target, PlanFile(chosen.plan, found.fingerprint, details).to_json())

    uniform = uniform_allocations(found, latency)
    named = [("this plan", chosen), *((f"uniform {n}", a) for n, a in _by_size(uniform))]
    reporter.table(f"{found.model}: {UNITS[found.metric]}", *table(named, timed=latency is not None))
    counts = Counter(scheme_name(scheme) for scheme in chosen.plan.layers.values())
    spread = ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
    reporter.line(f"layers: {spread}")
    if (rival := best_uniform(uniform, chosen.linear_bytes)) is not None and uniform[rival].damage > 0:
        ratio = chosen.damage / uniform[rival].damage
        reporter.line(f"predicted damage: {ratio:.2f}x that of {rival} everywhere, the best uniform plan no larger")
    floats = sorted(name for name, scheme in chosen.plan.layers.items() if scheme_name(scheme) == FLOAT)
    if floats:
        reporter.line(f"in 16 bits: {', '.join(floats[:6])}{' ...' if len(floats) > 6 else ''}")
    if checked is not None:
        _show_check(checked, reporter)
    reporter.say(f"wrote {target}; next: qtool quantize {found.model} --plan {target}")
    reporter.result({"plan": str(target), "schemes": dict(counts), **details})


def _show_check(checked: Checked, reporter: Reporter) -> None:
    error = 100 * (checked.predicted / checked.measured - 1) if checked.measured > 0 else 0.0
    how = "by the sum of damages" if not checked.correction.points else "by the fitted correction"
    reporter.line(
        f"measured as a whole: KL {checked.measured:.4g} nats per token; predicted {how}: {checked.predicted:.4g} "
        f"({error:+.1f} %)"
    )
    if checked.correction.points:
        reporter.line(
            f"correction: KL = {checked.correction.scale:.3g} x sum^{checked.correction.exponent:.3f}, "
            f"fitted to {len(checked.correction.points)} plans"
        )


def _by_size(uniform: dict[str, Allocation]) -> list[tuple[str, Allocation]]:
    return sorted(uniform.items(), key=lambda item: item[1].linear_bytes)


def _frontier(
    found: Sensitivity,
    wishes: list[Keep],
    latency: Latency | None,
    measure: Measure | None,
    target: Path,
    reporter: Reporter,
) -> None:
    from qtool.quant.textfile import write_bytes, write_text
    from qtool.sensitivity.allocate import uniform_allocations
    from qtool.sensitivity.frontier import document, frontier, picture, table
    from qtool.sensitivity.record import UNITS
    from qtool.sensitivity.verify import correct_curve

    curve = frontier(found, keep=wishes, latency=latency)
    correction = None if measure is None else correct_curve(curve, measure)
    uniform = uniform_allocations(found, latency)
    timed = latency is not None
    unit = UNITS["kl"] if correction is not None else UNITS[found.metric]
    image = target.with_suffix(".png")
    result = document(found, curve, latency, correction)
    write_text(target, json.dumps(result, indent=1) + "\n")
    write_bytes(image, picture(curve, uniform, correction, unit, timed=timed))
    named = [*(("mixed", p) for p in curve), *((f"uniform {n}", a) for n, a in _by_size(uniform))]
    reporter.table(f"{found.model}: {unit}", *table(named, correction, timed=timed))
    reporter.say(f"wrote {target} and {image}")
    reporter.result({**result, "json": str(target), "picture": str(image)})
