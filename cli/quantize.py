"""qtool quantize: a 16-bit model in, a smaller one out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from qtool.cli.common import Device, Json, Model, Quiet, Reporter
from qtool.cli.engine_options import parse_bytes
from qtool.cli.originals import quantize_by_original

if TYPE_CHECKING:
    from qtool.quant.formats import FormatName
    from qtool.quant.kv_calibration import KVRecord
    from qtool.quant.numerics import GridSearch
    from qtool.quant.pipeline import QuantizeReport
    from qtool.quant.scheme import QuantPlan


def default_out(model: str, plan: QuantPlan | None, scheme_name: str, method: str) -> Path:
    """`./MODEL-w4g128-gptq`: where the artifact goes when --out is not given."""
    name = Path(model.rstrip("/")).name or "model"
    return Path(f"{name}-{'plan' if plan is not None else scheme_name}-{method}")


def block_of(layer: str) -> str:
    """`3` for `model.layers.3.mlp.up_proj`."""
    return next((part for part in layer.split(".") if part.isdigit()), layer)


def summary_rows(report: QuantizeReport) -> list[list[str]]:
    """One row for each kind of layer and scheme: how many, mean and worst relative error, against plain rounding."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, record in report.layers.items():
        kinds.setdefault((name.rpartition(".")[2], record.scheme), []).append(name)
    rows = []
    for (kind, scheme), names in kinds.items():
        records = [report.layers[n] for n in names]
        worst = max(names, key=lambda n: report.layers[n].relative_error)
        rows.append(
            [
                kind,
                scheme,
                str(len(names)),
                f"{sum(r.relative_error for r in records) / len(records):.4f}",
                f"{sum(r.rtn_error for r in records) / len(records):.4f}",
                f"{report.layers[worst].relative_error:.4f}",
                block_of(worst),
            ]
        )
    return rows


def kv_line(kv: Sequence[KVRecord]) -> str:
    """What an int8 KV cache does to attention, in a line."""
    static, dynamic = [r.static_error for r in kv], [r.dynamic_error for r in kv]
    worst = max(range(len(kv)), key=lambda i: static[i])
    return (
        f"KV cache int8: attention outputs off by {sum(static) / len(kv):.4f} with the stored scales (worst "
        f"{static[worst]:.4f}, block {worst}), by {sum(dynamic) / len(kv):.4f} with a scale for each token and head"
    )


def command(
    context: typer.Context,
    model: Model,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to make; default ./MODEL-SCHEME-METHOD.")
    ] = None,
    bits: Annotated[int, typer.Option("--w-bit", help="Bits per weight: 4 or 8.")] = 4,
    group: Annotated[
        int | None,
        typer.Option(
            "--group", help="Inputs per scale: 128, 64, 32, or -1 for per channel (the default with --a-bit)."
        ),
    ] = None,
    act_bits: Annotated[
        int | None, typer.Option("--a-bit", help="8: activations in 8 bits too, per token at run time (W8A8).")
    ] = None,
    symmetric: Annotated[bool, typer.Option("--sym/--asym", help="Symmetric, or with zero points.")] = True,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            help="Stages joined by +, in this order: rotation; awq or smoothquant (with --a-bit 8); rtn, gptq or "
            "rounding.",
        ),
    ] = "gptq",
    iters: Annotated[
        int, typer.Option("--iters", help="Steps of the rounding search in each block (methods with rounding).")
    ] = 50,
    head: Annotated[
        str | None, typer.Option("--head", help="Scheme of the output projection, e.g. w8; default: 16 bits.")
    ] = None,
    untie: Annotated[
        bool, typer.Option("--untie", help="Store a head that is the embedding by itself; rotation needs that.")
    ] = False,
    alpha: Annotated[
        float, typer.Option("--alpha", help="SmoothQuant: 0 leaves weights as they are, 1 makes activations all alike.")
    ] = 0.5,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="Per-layer plan (qtool plan); replaces --w-bit, --group, --sym, --a-bit."),
    ] = None,
    grid: Annotated[
        str | None, typer.Option("--grid", help="Search for scales: minmax, signed or mse; default by method.")
    ] = None,
    output_format: Annotated[
        str, typer.Option("--format", help="compressed-tensors; gptq or awq for uniform plans.")
    ] = "compressed-tensors",
    kv_cache: Annotated[
        str,
        typer.Option("--kv-cache", help="int8: measure and store scales for an int8 KV cache; float: none."),
    ] = "float",
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help='Calibration text: .txt, or .jsonl of {"text": ...} or {"messages": [{"role": ..., "content": ...}]}; '
            "default: the Python library's own.",
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--plain",
            help="Calibrate on plain text as answers in the model's chat template, or as it is; default: --chat where "
            "the model has a template.",
        ),
    ] = None,
    num_sequences: Annotated[int, typer.Option("--samples", help="Calibration sequences.")] = 32,
    seq_len: Annotated[int, typer.Option("--seq-len", help="Tokens of each sequence.")] = 512,
    seed: Annotated[
        int,
        typer.Option(
            "--seed", help="Of random choices (rotation, rounding search); other than 0: shuffles the documents too."
        ),
    ] = 0,
    backend: Annotated[
        str,
        typer.Option("--backend", help="qtool, or an original package: autoawq (qtool[autoawq]) or auto-gptq."),
    ] = "qtool",
    device: Device = "auto",
    activation_memory: Annotated[
        str | None,
        typer.Option(
            "--activation-memory",
            metavar="SIZE",
            help="Hidden states of the samples beyond it go to disk; default 256MiB, on a GPU a quarter of its own.",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over, where a run to the same folder was cut short and left blocks.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the output folder if it exists.")] = False,
    quiet: Quiet = False,
    json_result: Json = False,
) -> None:
    """Quantize MODEL to 4 or 8 bits, by one scheme or a per-layer plan; write a model folder that servers read."""
    from qtool.quant.artifact import check_target
    from qtool.quant.calibration import calibration_set
    from qtool.quant.checkpoint import Checkpoint
    from qtool.quant.device import resolve_device
    from qtool.quant.errors import QtoolError
    from qtool.quant.fingerprint import model_fingerprint
    from qtool.quant.hub import resolve_model
    from qtool.quant.job import calibration_notes, prepare
    from qtool.quant.pipeline import quantize
    from qtool.quant.planfile import read_plan
    from qtool.quant.scheme import PER_CHANNEL, SUPPORTED_GROUPS, QuantScheme, parse_scheme
    from qtool.quant.usage import return_freed_memory

    return_freed_memory()
    reporter = Reporter(quiet, json_result)
    if group is None:
        group = 128 if act_bits is None else PER_CHANNEL
    if group not in (*SUPPORTED_GROUPS, PER_CHANNEL):
        # checkpoints with other groups are read; ours are to open in every server
        raise QtoolError(f"--group {group}: use 128, 64, 32, or -1 (one scale per output channel)")
    if backend != "qtool":
        quantize_by_original(
            context,
            backend,
            model,
            out,
            bits=bits,
            group=group,
            symmetric=symmetric,
            data=data,
            num_sequences=num_sequences,
            seq_len=seq_len,
            seed=seed,
            chat=chat,
            force=force,
            reporter=reporter,
        )
        return
    memory = None if activation_memory is None else parse_bytes(activation_memory)
    scheme = QuantScheme(bits, group, symmetric, act_bits)
    head_scheme = None if head is None else parse_scheme(head)
    plan_file = None if plan is None else read_plan(plan)
    layer_plan = None if plan_file is None else plan_file.plan
    target = out or default_out(model, layer_plan, scheme.name, method)
    check_target(target, overwrite=force)
    resolve_device(device)
    chosen_grid = cast("GridSearch | None", grid)
    chosen_format = cast("FormatName", output_format)
    uniform = scheme if layer_plan is None else None
    with reporter.progress() as progress:
        folder = resolve_model(model, progress=progress)
        with Checkpoint(folder) as checkpoint:
            if plan_file is not None:
                plan_file.check_model(model_fingerprint(checkpoint), str(plan))
            job = prepare(
                checkpoint,
                scheme=uniform,
                plan=layer_plan,
                head=head_scheme,
                method=method,
                untie=untie,
                grid=chosen_grid,
                format=chosen_format,
                kv_cache=kv_cache,
                iters=iters,
                alpha=alpha,
                seed=seed,
            )
        if data is not None and not job.calibrated:
            reporter.say(f"method {method} looks at no text: --data is left aside")
        for note in job.notes:
            reporter.say(note)
        calibration = None
        if job.calibrated:
            calibration = calibration_set(
                folder, data=data, num_sequences=num_sequences, seq_len=seq_len, seed=seed, chat=chat
            )
            for note in calibration_notes(job, calibration):
                reporter.say(note)
        report = quantize(
            folder,
            target,
            scheme=uniform,
            plan=layer_plan,
            head=head_scheme,
            method=method,
            untie=untie,
            calibration=calibration,
            device=device,
            seed=seed,
            iters=iters,
            alpha=alpha,
            grid=chosen_grid,
            format=chosen_format,
            kv_cache=kv_cache,
            activation_memory=memory,
            fresh=fresh,
            overwrite=force,
            source=model,
            progress=progress,
        )
    said = {*job.notes, *(() if calibration is None else calibration_notes(job, calibration))}
    for note in report.notes:
        if note not in said:
            reporter.warn(note)
    measured = next(iter(report.layers.values())).measured
    reporter.table(
        f"{model} by {method}: relative error of the layers' {measured}s",
        ["layer", "scheme", "count", "mean error", "plain rounding", "worst", "in block"],
        summary_rows(report),
    )
    if report.kv:
        reporter.line(kv_line(report.kv))
    reporter.line(
        f"{report.source_bytes / 1e6:.1f} MB → {report.artifact_bytes / 1e6:.1f} MB, {report.average_bits:.2f} bits "
        f"per weight in the blocks, {report.seconds:.0f} s: {report.out}"
    )
    reporter.result(report.to_dict())
