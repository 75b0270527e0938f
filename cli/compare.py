"""qtool compare: is the quantized model still good enough?"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qtool.cli.common import EXIT_FAIL, EXIT_INCONCLUSIVE, EXIT_PASS, Device, Json, Quiet, Reporter
from qtool.cli.engine_options import check_kv_cache_dtype

if TYPE_CHECKING:
    from qtool.evalsets.compare import Comparison
    from qtool.evalsets.gate import Thresholds
    from qtool.evalsets.history import History, Past

_EXITS = {"PASS": EXIT_PASS, "FAIL": EXIT_FAIL}


def command(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="BASE QUANT...",
            help="The 16-bit model, then quantized ones: folder, hub id or built-in name. Several are ranked.",
        ),
    ],
    data: Annotated[
        Path | None, typer.Option(help="Text for perplexity and KL: .txt, or .jsonl with text. Default: built in.")
    ] = None,
    windows: Annotated[int, typer.Option(help="Windows of text to measure.")] = 8,
    context: Annotated[int, typer.Option(help="Tokens in a window.")] = 1024,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="Items of your own: .jsonl (docs/tasks.md); `grammar`, `facts`, `arithmetic`, `retrieval`, `code`, "
            "`chinese`; or `none`. Repeatable."
        ),
    ] = None,
    generations: Annotated[
        int, typer.Option(min=0, help="Most prompts from the text to continue, to see where greedy outputs part.")
    ] = 32,
    lm_eval_tasks: Annotated[
        str, typer.Option("--lm-eval-tasks", metavar="NAME,...", help="lm-eval tasks by name, beside the others.")
    ] = "",
    lm_eval_limit: Annotated[
        int | None, typer.Option("--lm-eval-limit", min=2, help="Items of each lm-eval task; default: all.")
    ] = None,
    gate: Annotated[
        str,
        typer.Option("--gate", help="2% (accuracy in points, perplexity in percent), or a TOML file: docs/gate.md."),
    ] = "",
    max_kl: Annotated[
        float | None, typer.Option(help="Gate: mean KL per token, nats.  [default: 0.1]", show_default=False)
    ] = None,
    max_ppl_increase: Annotated[
        float | None, typer.Option(help="Gate: increase of perplexity, percent.  [default: 3]", show_default=False)
    ] = None,
    max_drop: Annotated[
        float | None, typer.Option(help="Gate: drop of accuracy, points.  [default: 2]", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for report.html and compare.json.")] = Path("compare-report"),
    junit: Annotated[Path | None, typer.Option("--junit", help="JUnit XML file to write, for CI.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Markdown file to write, for a comment.")] = None,
    history: Annotated[
        Path | None, typer.Option("--history", help="Folder that keeps runs, for a trend in the report.")
    ] = None,
    against: Annotated[
        str, typer.Option("--against", help="`last-pass`: BASE, left out then, is what passed last in --history.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="Activations: auto (as served), float32, bfloat16 or float16.")] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option("--kv-cache-dtype", help="KV cache of QUANT (BASE's stays as it is): auto, int8 or float.")
    ] = "auto",
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="Of the bootstrap and of lm-eval.")] = 0,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Ask both models everything; neither keep answers nor recall them.")
    ] = False,
    quiet: Quiet = False,
    json_result: Json = False,
) -> int:
    """Prove that QUANT is as good as BASE, or show where it is not.

    All models are served by the runtime and answer the same questions. Exit status: 0 PASS, 1 FAIL, 2 INCONCLUSIVE;
    with several candidates that of the worst, so that 0 says that all are good.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # lm-eval's bars; tqdm reads it when it is imported, and we have our own
    from qtool.evalsets import exports
    from qtool.evalsets.compare import DEFAULT_SET, compare_all
    from qtool.evalsets.history import History, series_of
    from qtool.evalsets.kept import baseline_folder
    from qtool.evalsets.ranking import to_document, worst_verdict
    from qtool.evalsets.report import write_reports
    from qtool.quant.errors import QtoolError
    from qtool.quant.textfile import check_folder, check_writable, write_text

    check_kv_cache_dtype(kv_cache_dtype)
    check_folder(out)
    for file in (junit, markdown):
        if file is not None:
            check_writable(file)
    thresholds = _thresholds(gate, max_kl, max_ppl_increase, max_drop)
    runs = None if history is None else History(history)
    base, quants = _sides(models, against, runs)
    sets = [DEFAULT_SET] if tasks is None else [t for t in tasks if t != "none"]
    names = [name.strip() for name in lm_eval_tasks.split(",") if name.strip()]
    reporter = Reporter(quiet, json_result)
    with reporter.progress() as progress:
        results = compare_all(
            base,
            quants,
            data=data,
            windows=windows,
            context=context,
            generations=generations,
            tasks=sets,
            lm_eval_tasks=names,
            lm_eval_limit=lm_eval_limit,
            thresholds=thresholds,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            device=device,
            seed=seed,
            progress=progress,
            cache=None if no_cache else baseline_folder(),
        )
    past: list[Past] = []
    unrecorded: QtoolError | None = None  # raised last: what was measured is reported all the same
    if runs is not None:
        try:
            for result in results:
                runs.add(result, against)
            past = runs.series(series_of(results[-1]))
        except QtoolError as error:
            unrecorded = error
    _print(reporter, results)  # first: a disk that is full now takes the report, not what was measured
    page, document = write_reports(results, out, ["qtool", *sys.argv[1:]], past)
    if junit is not None:
        write_text(junit, exports.junit(results))
    if markdown is not None:
        write_text(markdown, exports.markdown(results))
    if unrecorded is not None:
        raise unrecorded
    verdict = worst_verdict(results)
    reporter.line(f"{verdict.value}  (report: {page})")
    reporter.result({**to_document(results), "report": str(page), "json": str(document)})
    return _EXITS.get(verdict, EXIT_INCONCLUSIVE)


def _sides(models: list[str], against: str, runs: History | None) -> tuple[str, list[str]]:
    """The base and the candidates. Raises QtoolError where one of them is not given."""
    from qtool.quant.errors import QtoolError

    if not against:
        if len(models) < 2:
            raise QtoolError("name the base and at least one candidate: qtool compare BASE QUANT")
        return models[0], models[1:]
    if against != "last-pass":
        raise QtoolError(f"--against {against!r}: only last-pass is known; a base of a name is the first argument")
    if runs is None:
        raise QtoolError("--against last-pass: say with --history DIR which runs are meant")
    return runs.last_pass(), models


def _thresholds(gate: str, max_kl: float | None, max_ppl_increase: float | None, max_drop: float | None) -> Thresholds:
    """The gate's, where an option of its own overrides what --gate says."""
    from qtool.evalsets.gate import Thresholds
    from qtool.evalsets.gatefile import read_gate

    limits = read_gate(gate) if gate else Thresholds()
    return replace(
        limits,
        max_kl=limits.max_kl if max_kl is None else max_kl,
        max_ppl_increase=limits.max_ppl_increase if max_ppl_increase is None else max_ppl_increase / 100,
        max_drop=limits.max_drop if max_drop is None else max_drop / 100,
    )


def _print(reporter: Reporter, results: Sequence[Comparison]) -> None:
    from qtool.evalsets.ranking import ranked
    from qtool.evalsets.report import RANKING_HEADER, ranking_row

    best_first = ranked(results)
    for result in best_first:
        _print_one(reporter, result)
    if len(results) > 1:
        rows = [ranking_row(i, c) for i, c in enumerate(best_first, 1)]
        reporter.table(f"Against {results[0].base.name}, best first", RANKING_HEADER, rows)


def _print_one(reporter: Reporter, result: Comparison) -> None:
    from qtool.evalsets.report_cells import HEADER, change, median_text, megabytes, metric_row, number, reasons

    title = f"{result.candidate.name} against {result.base.name}"
    rows = [dict(zip(HEADER, metric_row(m))) for m in result.metrics]
    # what fits into 80 columns; the rest in lines below, and all of it in the report
    shown = [
        (r["metric"], r["base"], r["candidate"], change(m), r["limit"], r["verdict"])
        for r, m in zip(rows, result.metrics)
    ]
    reporter.table(title, ("metric", "base", "candidate", "change", "limit", "verdict"), shown)
    level = 100 * (1 - 2 * result.settings["alpha"])
    for row in rows:
        reporter.line(
            f"{row['metric']}: {level:g} % interval {row['interval']}, p {row['p']}, after Holm {row['p (Holm)']}"
        )
    d, noise = result.divergence, result.noise
    facts: dict[str, Any] = {
        "weights": f"{megabytes(result.base.bytes)} → {megabytes(result.candidate.bytes)}",
        "same top-1": f"{100 * d.same_top1:.2f} %",
        "top-5 shared": f"{100 * d.top5_overlap:.2f} %",
        "KL p50 / p99 / max": " / ".join(number(v, ".4f") for v in (d.kl.p50, d.kl.p99, d.kl.max)),
        "noise floor KL": f"{noise.mean_kl:.2g}",
    }
    reporter.line("  ".join(f"{name}: {value}" for name, value in facts.items()))
    for p in result.partings:
        reporter.line(
            f"greedy generations ({p.name}): half part within {median_text(p)} tokens, "
            f"{p.same} of {len(p.positions)} are the same to the end"
        )
    if kept := [m for m in (result.base, result.candidate) if m.recalled]:
        reporter.line("kept from an earlier run: " + "; ".join(f"{m.name}: {', '.join(m.recalled)}" for m in kept))
    for line in (*reasons(result), *result.notes):
        reporter.line(f"  {line}")
