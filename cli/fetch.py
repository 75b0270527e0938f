"""qtool fetch: bring a model to this machine and say where it lies."""

from __future__ import annotations

from typing import Annotated

import typer

from qtool.cli.common import Json, Quiet, Reporter


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="smollm2-135m (the default model), or a hub id.")],
    quiet: Quiet = False,
    json_result: Json = False,
) -> None:
    """Download MODEL into the cache and print its folder."""
    from qtool.quant.checkpoint import Checkpoint
    from qtool.quant.hub import resolve_model

    reporter = Reporter(quiet, json_result)
    with reporter.progress() as progress:
        folder = resolve_model(model, progress=progress)
    with Checkpoint(folder) as checkpoint:
        size = checkpoint.num_bytes()
    reporter.say(f"{model}: {size / 1e6:.1f} MB of weights")
    reporter.line(str(folder))
    reporter.result({"model": model, "folder": str(folder), "weight_bytes": size})
