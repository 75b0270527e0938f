"""qtool convert: the same quantized weights in another on-disk format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from qtool.cli.common import Json, Model, Quiet, Reporter

if TYPE_CHECKING:
    from qtool.quant.formats import FormatName


def command(
    model: Model,
    output_format: Annotated[str, typer.Option("--format", help="compressed-tensors, gptq or awq.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to make; default ./MODEL-FORMAT.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output folder if it exists.")] = False,
    quiet: Quiet = False,
    json_result: Json = False,
) -> None:
    """Store a quantized MODEL in another format, bit for bit; refused where the format cannot hold it exactly."""
    from qtool.quant.convert import convert

    reporter = Reporter(quiet, json_result)
    target = out or Path(f"{Path(model.rstrip('/')).name or 'model'}-{output_format}")
    with reporter.progress() as progress:
        report = convert(model, target, format=cast("FormatName", output_format), overwrite=force, progress=progress)
    reporter.line(f"{report.source_format} → {report.format}: {report.out}")
    reporter.result(report.to_dict())
