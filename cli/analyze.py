"""qtool analyze: which layer bears which scheme, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qtool.cli.common import Device, Json, Model, Quiet, Reporter

Granularity = Annotated[
    str,
    typer.Option(
        "--granularity",
        help="What shares a scheme: group (q,k,v; gate,up: as servers fuse them) or layer (less damage at the "
        "same size; vLLM and SGLang do not read such artifacts).",
    ),
]
Rounding = Annotated[
    str,
    typer.Option(
        "--rounding",
        help="Of the candidates: rtn (to nearest) or gptq (on one half of the samples, measured on the other).",
    ),
]


def command(
    model: Model,
    output: Annotated[
        Path, typer.Option("--out", "-o", help="The JSON file; the page with the picture goes beside it (.html).")
    ] = Path("sensitivity.json"),
    schemes: Annotated[
        str, typer.Option("--schemes", help="Candidates, comma-separated: fp16, w8, w8g128, w4g128, w4g64, w4g64-asym")
    ] = "fp16,w8,w4g128,w4g64,w4g32",
    metric: Annotated[
        str, typer.Option("--metric", help="fisher (fast, predicts KL), kl (measured, slow), output or weight.")
    ] = "fisher",
    rounding: Rounding = "rtn",
    granularity: Granularity = "group",
    data: Annotated[
        Path | None, typer.Option("--data", help="Calibration text, .txt or .jsonl; default: the Python library's own.")
    ] = None,
    num_sequences: Annotated[int, typer.Option("--samples", help="Calibration sequences.")] = 16,
    seq_len: Annotated[int, typer.Option("--seq-len", help="Tokens of each sequence.")] = 512,
    seed: Annotated[int, typer.Option("--seed", help="Other than 0: shuffle the calibration documents.")] = 0,
    device: Device = "auto",
    quiet: Quiet = False,
    json_result: Json = False,
) -> None:
    """Measure how much each group of layers of MODEL suffers under each scheme; write JSON and a picture."""
    from qtool.quant.calibration import calibration_set
    from qtool.quant.checkpoint import Checkpoint
    from qtool.quant.errors import QtoolError
    from qtool.quant.hub import resolve_model
    from qtool.quant.scheme import FLOAT
    from qtool.quant.structure import linear_shapes
    from qtool.quant.textfile import check_writable, write_text
    from qtool.sensitivity import report
    from qtool.sensitivity.probe import analyze, check_request
    from qtool.sensitivity.record import UNITS

    reporter = Reporter(quiet, json_result)
    names = [name for name in schemes.split(",") if name.strip()]
    check_writable(output)
    page = output.with_suffix(".html")
    if page == output:
        raise QtoolError(f"--out {output}: names the JSON file; the page goes beside it, so it cannot end in .html")
    check_request(names, metric, device, rounding, granularity)
    with reporter.progress() as progress:
        folder = resolve_model(model, progress=progress)
        with Checkpoint(folder) as checkpoint:
            linear_shapes(checkpoint)  # a model that cannot be analyzed is refused before its text is read
        calibration = calibration_set(folder, data=data, num_sequences=num_sequences, seq_len=seq_len, seed=seed)
        for note in calibration.notes:
            reporter.say(note)
        result = analyze(
            folder,
            name=model,
            schemes=names,
            metric=metric,
            rounding=rounding,
            granularity=granularity,
            calibration=calibration,
            device=device,
            progress=progress,
        )
    write_text(output, result.to_json())
    write_text(page, report.html_page(result))
    reporter.table(f"The most sensitive groups of {model} ({UNITS[metric]})", *report.top_rows(result))
    reporter.table("By kind (summed over blocks)", *report.kind_rows(result))
    reporter.line(report.verdict(result))
    variants = sum(name != FLOAT for g in result.groups for name in g.damage)
    reporter.line(
        f"cost: {result.forward_passes:.4g} forward passes, {result.forward_passes / variants:.3f} for each of "
        f"{variants} groups and schemes"
    )
    reporter.say(f"wrote {output} and {page}; next: qtool plan {output} --avg-bits 4.5 -o plan.json")
    reporter.result(
        {
            "sensitivity": str(output),
            "page": str(page),
            "metric": metric,
            "rounding": rounding,
            "granularity": granularity,
            "forward_passes": result.forward_passes,
            "fingerprint": result.fingerprint,
            "verdict": report.verdict(result),
            "most_sensitive": [
                {"group": g.name, "damage": dict(g.damage)} for g in report.most_sensitive(result)[: report.TOP]
            ],
        }
    )
