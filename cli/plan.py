"""qtool plan: from an analysis and a budget to a scheme for every layer."""

from __future__ import annotations

import re
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import typer

from qtool.cli.common import Json, Quiet, Reporter

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


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
        str | None, typer.Argument(metavar="[MODEL]", help="Check that the analysis is of this model.")
    ] = None,
    avg_bits: Annotated[
        float | None,
        typer.Option("--avg-bits", help="Bits per weight over the blocks' linears, scales and zero points counted."),
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option("--max-bytes", help="Limit for all weights of the artifact: 90MB, 1.5GiB.")
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", help="REGEX (stays in 16 bits) or REGEX=SCHEME, by layer name; may be repeated."),
    ] = None,
    output: Annotated[Path, typer.Option("--out", "-o", help="Where the plan goes.")] = Path("plan.json"),
    quiet: Quiet = False,
    json_result: Json = False,
) -> None:
    """Choose the scheme of every layer: least damage within the budget, solved exactly."""
    from qtool.quant.checkpoint import Checkpoint
    from qtool.quant.errors import QtoolError
    from qtool.quant.fingerprint import model_fingerprint
    from qtool.quant.hub import resolve_model
    from qtool.quant.planfile import PlanFile
    from qtool.quant.scheme import FLOAT, scheme_name
    from qtool.quant.textfile import check_writable, write_text
    from qtool.sensitivity.allocate import Keep, Limits, allocate, best_uniform, uniform_allocations
    from qtool.sensitivity.record import UNITS, Sensitivity

    reporter = Reporter(quiet, json_result)
    check_writable(output)
    found = Sensitivity.load(sensitivity)
    if model is not None:
        with Checkpoint(resolve_model(model)) as checkpoint:
            if (other := model_fingerprint(checkpoint)) != found.fingerprint:
                raise QtoolError(
                    f"{sensitivity} is of another model (fingerprint {found.fingerprint[:12]}, "
                    f"{model} has {other[:12]}); analyze again"
                )
    limit = None if max_bytes is None else parse_bytes(max_bytes)
    wishes = [Keep.parse(text) for text in keep or []]
    chosen = allocate(found, Limits(max_bytes=limit, avg_bits=avg_bits), keep=wishes)
    details = {
        "model": found.model,
        "metric": found.metric,
        "unit": UNITS[found.metric],
        "sensitivity_calibration": dict(found.calibration),
        "limits": {"avg_bits": avg_bits, "max_bytes": limit, "keep": [f"{w.pattern}={w.scheme}" for w in wishes]},
        "average_bits": chosen.average_bits,
        "linear_bytes": chosen.linear_bytes,
        "total_bytes": chosen.total_bytes,
        "predicted_damage": chosen.damage,
    }
    write_text(output, PlanFile(chosen.plan, found.fingerprint, details).to_json())
    counts = Counter(scheme_name(scheme) for scheme in chosen.plan.layers.values())

    rows = [["this plan", f"{chosen.average_bits:.3f}", f"{chosen.total_bytes / 1e6:.2f}", f"{chosen.damage:.4g}"]]
    uniform = uniform_allocations(found)
    for name, other_plan in sorted(uniform.items(), key=lambda item: item[1].linear_bytes):
        size = f"{other_plan.total_bytes / 1e6:.2f}"
        rows.append([f"uniform {name}", f"{other_plan.average_bits:.3f}", size, f"{other_plan.damage:.4g}"])
    header = ["plan", "bits per weight", "MB of weights", f"damage ({found.metric})"]
    reporter.table(f"{found.model}: {UNITS[found.metric]}", header, rows)
    spread = ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
    reporter.line(f"layers: {spread}")
    if (rival := best_uniform(uniform, chosen.linear_bytes)) is not None and uniform[rival].damage > 0:
        ratio = chosen.damage / uniform[rival].damage
        reporter.line(f"predicted damage: {ratio:.2f}x that of {rival} everywhere, the best uniform plan no larger")
    floats = sorted(name for name, scheme in chosen.plan.layers.items() if scheme_name(scheme) == FLOAT)
    if floats:
        reporter.line(f"in 16 bits: {', '.join(floats[:6])}{' ...' if len(floats) > 6 else ''}")
    reporter.say(f"wrote {output}; next: qtool quantize {found.model} --plan {output}")
    reporter.result({"plan": str(output), "schemes": dict(counts), **details})
