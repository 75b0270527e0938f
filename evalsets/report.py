"""The comparison for people: one self-contained HTML file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from qtool.evalsets import charts
from qtool.evalsets.compare import Comparison
from qtool.evalsets.history import Past, metric_names
from qtool.evalsets.parting import TEXT_SET
from qtool.evalsets.ranking import ranked, to_document, worst_verdict
from qtool.evalsets.report_cells import (
    HEADER,
    change,
    chip,
    median_text,
    megabytes,
    metric_row,
    reasons,
    signed,
    table,
    tile,
)
from qtool.evalsets.report_sections import (
    divergence_section,
    generation_section,
    noise_section,
    reproduce_section,
    scheme_section,
    task_section,
    worst_section,
)
from qtool.quant.textfile import write_text


def write_report(comparison: Comparison, out: Path, command: Sequence[str]) -> tuple[Path, Path]:
    """`write_reports` of one comparison."""
    return write_reports([comparison], out, command)


def write_reports(
    comparisons: Sequence[Comparison], out: Path, command: Sequence[str], past: Sequence[Past] = ()
) -> tuple[Path, Path]:
    """Write report.html and compare.json into the folder `out` (made where missing); returns both paths.

    Each file is written beside and renamed, so that a reader never sees half of one. compare.json follows
    compare.schema.json, which lies in this package. `past`: runs of the same series with these as its last, for
    the trend.
    """
    out.mkdir(parents=True, exist_ok=True)
    document = {**to_document(comparisons), "command": shlex.join(command)}
    pages = {
        "report.html": html(comparisons, command, past),
        "compare.json": json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
    }
    for name, text in pages.items():
        write_text(out / name, text)
    return out / "report.html", out / "compare.json"


def html(comparisons: Sequence[Comparison], command: Sequence[str], past: Sequence[Past] = ()) -> str:
    """The whole report as one HTML document that fetches nothing; several candidates follow their ranking."""
    style = files("qtool.evalsets").joinpath("report.css").read_text(encoding="utf-8")
    best_first = ranked(comparisons)
    title = f"{worst_verdict(comparisons).value}: {best_first[0].candidate.name} against {best_first[0].base.name}"
    sections = [] if len(comparisons) == 1 else [_ranking_section(best_first)]
    for c in best_first:
        sections += [
            _head(c),
            _table_section(c),
            divergence_section(c),
            generation_section(c),
            *(task_section(m, before, after) for m, (before, after) in zip(c.metrics[2:], c.tasks)),
            scheme_section(c),
            worst_section(c.windows.worst),
            noise_section(c),
            reproduce_section(c, command),
        ]
    sections.insert(2, _trend_section(past))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main>\n"
        + "\n".join(s for s in sections if s)
        + "\n</main></body></html>\n"
    )


RANKING_HEADER = ("rank", "candidate", "weights", "mean KL", "perplexity", "verdict")


def ranking_row(place: int, c: Comparison) -> tuple[str, ...]:
    """One candidate as the cells of RANKING_HEADER."""
    kl, perplexity = (change(m) for m in c.metrics[:2])
    return str(place), c.candidate.name, megabytes(c.candidate.bytes), kl, perplexity, c.verdict.value


def _ranking_section(best_first: Sequence[Comparison]) -> str:
    verdict = worst_verdict(best_first)
    rows = [
        [*(f'<span class="nowrap">{escape(cell)}</span>' for cell in ranking_row(i, c)[:-1]), chip(c.verdict)]
        for i, c in enumerate(best_first, 1)
    ]
    return (
        f'<header class="{verdict.value.lower()}"><div class="kicker">qtool compare · ranking</div>'
        f"<h1>{len(best_first)} candidates</h1>"
        f'<div class="models">against <b>{escape(best_first[0].base.name)}</b></div>'
        '<p class="soft">What passes comes first, and the smaller of what passes. The run passes where all pass.</p>'
        f"{table(RANKING_HEADER, rows)}</header>"
    )


def _head(c: Comparison) -> str:
    size = signed(100 * (c.candidate.bytes / c.base.bytes - 1), 0, " %")
    tiles = [tile(size, f"size of the weights: {megabytes(c.base.bytes)} → {megabytes(c.candidate.bytes)}")]
    for m in c.metrics:
        row = dict(zip(HEADER, metric_row(m)))
        if m.kind == "kl":
            tiles.append(tile(row["candidate"], "mean token KL, nats"))
        elif m.kind == "perplexity":
            tiles.append(tile(row["Δ %"], f"perplexity: {row['base']} → {row['candidate']}"))
        else:
            tiles.append(tile(row["Δ"], f"{m.name}: {row['base']} → {row['candidate']}"))
    tiles.insert(3, tile(f"{100 * c.divergence.same_top1:.1f} %", "of tokens: same likeliest next token"))
    text = next((p for p in c.partings if p.name == TEXT_SET), None)
    if text is not None:
        tiles.append(tile(median_text(text), "tokens until half of the greedy generations part"))
    why = "".join(f"<li>{escape(line)}</li>" for line in (*reasons(c), *c.notes))
    return (
        f'<header class="{c.verdict.value.lower()}"><div class="kicker">qtool compare · accuracy regression gate</div>'
        f"<h1>{c.verdict.value}</h1>"
        f'<div class="models"><b>{escape(c.candidate.name)}</b> against <b>{escape(c.base.name)}</b></div>'
        f'<ul class="reasons">{why}</ul><div class="tiles">{"".join(tiles)}</div></header>'
    )


def _trend_section(past: Sequence[Past]) -> str:
    if len(past) < 2:
        return ""
    losses = {name: [run.losses.get(name) for run in past] for name in metric_names(past)}
    names = [f"{run.started} {run.candidate}" for run in past]
    plot = charts.trend_plot(names, losses, [run.verdict.value for run in past])
    rows = [
        (escape(run.started), escape(run.candidate), megabytes(run.bytes), chip(run.verdict))
        for run in reversed(past[-10:])
    ]
    return (
        '<section><h2>Trend</h2><p class="soft">Runs with this base and these questions, from the history.</p>'
        f"<figure>{plot}<figcaption>Loss of each metric as a multiple of its limit at the time; the colour is the "
        f"run’s verdict.</figcaption></figure>{table(('started', 'candidate', 'weights', 'verdict'), rows)}</section>"
    )


def _table_section(c: Comparison) -> str:
    rows = []
    for m in c.metrics:
        cells = [f'<span class="nowrap">{escape(cell)}</span>' for cell in metric_row(m)[:-1]]
        rows.append([*cells, chip(m.verdict)])
    plot = charts.interval_plot(
        [
            charts.IntervalRow(
                m.name,
                m.verdict.value,
                m.loss / m.threshold,
                m.interval.low / m.threshold,
                m.interval.high / m.threshold,
                change(m),
            )
            for m in c.metrics
        ]
    )
    return (
        "<section><h2>The gate</h2>"
        f'<p class="soft">PASS: the one-sided {100 * (1 - c.settings["alpha"]):g} % bound of the loss is within the '
        "limit. FAIL: the loss is beyond the "
        "limit and significant after Holm’s correction. Anything else is INCONCLUSIVE. "
        f"Intervals, of level {100 * (1 - 2 * c.settings['alpha']):g} %, are paired bootstrap "
        "intervals, wider where items or flips are few; p is one-sided (exact McNemar for accuracies, "
        "paired t for perplexity).</p>"
        f"{table(HEADER, rows)}"
        f"<figure>{plot}<figcaption>Loss of each metric as a multiple of its limit, with its interval. "
        "The green band is allowed.</figcaption></figure></section>"
    )
