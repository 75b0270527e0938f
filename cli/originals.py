"""The part of qtool quantize that hands the work to an original package (--backend)."""

from __future__ import annotations

from pathlib import Path

import typer

from qtool.cli.common import Reporter

# parameters of the verb that the originals honour; one that is given besides is refused by name
HONOURED = (
    *("model", "out", "bits", "group", "symmetric", "data", "num_sequences", "seq_len", "seed"),
    *("chat", "force", "quiet", "json_result", "backend"),
)


def given_parameters(context: typer.Context) -> dict[str, str]:
    """Parameter → how it is called on the command line, of those that were given there."""
    names = {p.name: p.opts[0] for p in context.command.params if p.name is not None}
    sources = {name: context.get_parameter_source(name) for name in names}
    return {name: names[name] for name, source in sources.items() if source is not None and source.name != "DEFAULT"}


def quantize_by_original(
    context: typer.Context,
    backend: str,
    model: str,
    out: Path | None,
    *,
    bits: int,
    group: int,
    symmetric: bool,
    data: Path | None,
    num_sequences: int,
    seq_len: int,
    seed: int,
    chat: bool | None,
    force: bool,
    reporter: Reporter,
) -> None:
    """Run `qtool quantize` by an original.

    Raises:
        QtoolError: an unknown backend, an option that it cannot honour, and whatever quantize_original raises.
    """
    from qtool.quant.artifact import check_target
    from qtool.quant.backends.original import backend_named, check_request, quantize_original
    from qtool.quant.calibration import calibration_set
    from qtool.quant.checkpoint import Checkpoint
    from qtool.quant.errors import QtoolError
    from qtool.quant.hub import resolve_model
    from qtool.quant.scheme import QuantScheme

    original = backend_named(backend)
    given = given_parameters(context)
    if refused := [option for name, option in given.items() if name not in HONOURED]:
        raise QtoolError(f"--backend {backend} works in its own way and takes no {', '.join(refused)}: leave that out")
    scheme = QuantScheme(bits, group, symmetric if "symmetric" in given else original.SYMMETRIC)
    target = out or Path(f"{Path(model.rstrip('/')).name or 'model'}-{scheme.name}-{backend}")
    check_target(target, overwrite=force)
    with reporter.progress() as progress:
        folder = resolve_model(model, progress=progress)
        with Checkpoint(folder) as checkpoint:
            check_request(original, checkpoint, scheme)
        calibration = calibration_set(
            folder, data=data, num_sequences=num_sequences, seq_len=seq_len, seed=seed, chat=chat
        )
        for note in calibration.notes:
            reporter.say(note)
        report = quantize_original(
            backend,
            folder,
            target,
            scheme=scheme,
            calibration=calibration,
            seed=seed,
            overwrite=force,
            source=model,
            progress=progress,
        )
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    reporter.line(f"{model} by {versions}")
    reporter.line(
        f"{report.source_bytes / 1e6:.1f} MB → {report.artifact_bytes / 1e6:.1f} MB, {report.average_bits:.2f} bits "
        f"per weight in the blocks, {report.seconds:.0f} s: {report.out}"
    )
    reporter.result(report.to_dict())
