"""The comparison for people: one self-contained HTML file, and the rows that the command line prints too."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

import numpy as np

from qtool.evalsets import charts
from qtool.evalsets.compare import Comparison
from qtool.evalsets.divergence import Position
from qtool.evalsets.gate import GatedMetric
from qtool.evalsets.harness import TaskResult
from qtool.evalsets.history import Past, metric_names
from qtool.evalsets.ranking import ranked, to_document, worst_verdict
from qtool.evalsets.statistics import Verdict
from qtool.quant.textfile import write_text

HEADER = ("metric", "base", "candidate", "Δ", "Δ %", "interval", "p", "p (Holm)", "limit", "verdict")
MINUS = "−"
_BITS = {"bits4": "4 bits", "bits8": "8 bits", "bits16": "16 bits"}
_SHOWN_FLIPS = 20


def signed(value: float, digits: int, suffix: str = "") -> str:
    """`+1.50`, `−0.30`, with a true minus sign; `0.00` without a sign."""
    if not math.isfinite(value):
        return "not finite"
    text = f"{abs(value):.{digits}f}{suffix}"
    if float(f"{abs(value):.{digits}f}") == 0:
        return text
    return ("+" if value > 0 else MINUS) + text


def _probability(p: float | None) -> str:
    if p is None:
        return "–"
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def metric_row(m: GatedMetric) -> tuple[str, ...]:
    """One metric as the cells of HEADER."""
    tail = (_probability(m.p), _probability(m.p_holm))
    if m.kind == "kl":
        interval = f"{m.interval.low:.4f} to {m.interval.high:.4f}"
        cells = ("–", f"{m.candidate:.4f}", signed(m.loss, 4), "–", interval, *tail, f"≤ {m.threshold:g}")
    elif m.kind == "perplexity":
        low, high = (signed(100 * v, 2) for v in (m.interval.low, m.interval.high))
        base = m.base if m.base is not None else math.nan
        cells = (
            f"{base:.3f}", f"{m.candidate:.3f}", signed(m.candidate - base, 3), signed(100 * m.loss, 2, " %"),
            f"{low} to {high} %", *tail, f"≤ +{100 * m.threshold:g} %",
        )  # fmt: skip
    elif m.kind == "accuracy":
        low, high = (signed(-100 * v, 2) for v in (m.interval.high, m.interval.low))
        base = m.base or 0.0
        relative = signed(-100 * m.loss / base, 2, " %") if base else "–"
        cells = (
            f"{100 * base:.1f} %", f"{100 * m.candidate:.1f} %", signed(-100 * m.loss, 2, " pt"), relative,
            f"{low} to {high} pt", *tail, f"≥ {MINUS}{100 * m.threshold:g} pt",
        )  # fmt: skip
    else:
        low, high = (signed(-100 * v, 2) for v in (m.interval.high, m.interval.low))
        base = m.base if m.base is not None else math.nan
        cells = (
            f"{base:.4g}", f"{m.candidate:.4g}", signed(m.candidate - base, 4), signed(-100 * m.loss, 2, " %"),
            f"{low} to {high} %", *tail, f"≥ {MINUS}{100 * m.threshold:g} %",
        )  # fmt: skip
    return (m.name, *cells, m.verdict.value)


def change(m: GatedMetric) -> str:
    """The change that the gate judges: KL itself, perplexity in percent, accuracy in points."""
    row = dict(zip(HEADER, metric_row(m)))
    return row["candidate"] if m.kind == "kl" else row["Δ"] if m.kind == "accuracy" else row["Δ %"]


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def reasons(comparison: Comparison) -> list[str]:
    """Why the verdict is what it is: one line for each metric that did not pass, or one for all that did."""
    lines = []
    for m in (m for m in comparison.metrics if m.counts):
        row = dict(zip(HEADER, metric_row(m)))
        if m.verdict is Verdict.FAIL:
            lines.append(f"{m.name}: {change(m)}, limit {row['limit']}" + (f" ({m.note})" if m.note else ""))
        elif m.verdict is not Verdict.PASS:
            lines.append(f"{m.name}: {change(m)} ({row['interval']}), limit {row['limit']}; {m.note}")
    return lines or [
        f"Every metric is within its limit with {100 * (1 - comparison.settings['alpha']):g} % confidence."
    ]


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
            _divergence_section(c),
            *(_task_section(m, before, after) for m, (before, after) in zip(c.metrics[2:], c.tasks)),
            _scheme_section(c),
            _worst_section(c.windows.worst),
            _reproduce_section(c, command),
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
        [*(f'<span class="nowrap">{escape(cell)}</span>' for cell in ranking_row(i, c)[:-1]), _chip(c.verdict)]
        for i, c in enumerate(best_first, 1)
    ]
    return (
        f'<header class="{verdict.value.lower()}"><div class="kicker">qtool compare · ranking</div>'
        f"<h1>{len(best_first)} candidates</h1>"
        f'<div class="models">against <b>{escape(best_first[0].base.name)}</b></div>'
        '<p class="soft">What passes comes first, and the smaller of what passes. The run passes where all pass.</p>'
        f"{_table(RANKING_HEADER, rows)}</header>"
    )


def _chip(verdict: Verdict) -> str:
    return f'<span class="chip {verdict.value.lower()}">{verdict.value}</span>'


def _tile(value: str, name: str) -> str:
    return f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'


def _head(c: Comparison) -> str:
    size = signed(100 * (c.candidate.bytes / c.base.bytes - 1), 0, " %")
    tiles = [_tile(size, f"size of the weights: {megabytes(c.base.bytes)} → {megabytes(c.candidate.bytes)}")]
    for m in c.metrics:
        row = dict(zip(HEADER, metric_row(m)))
        if m.kind == "kl":
            tiles.append(_tile(row["candidate"], "mean token KL, nats"))
        elif m.kind == "perplexity":
            tiles.append(_tile(row["Δ %"], f"perplexity: {row['base']} → {row['candidate']}"))
        else:
            tiles.append(_tile(row["Δ"], f"{m.name}: {row['base']} → {row['candidate']}"))
    tiles.insert(3, _tile(f"{100 * c.divergence.same_top1:.1f} %", "of tokens: same likeliest next token"))
    why = "".join(f"<li>{escape(line)}</li>" for line in (*reasons(c), *c.notes))
    return (
        f'<header class="{c.verdict.value.lower()}"><div class="kicker">qtool compare · accuracy regression gate</div>'
        f"<h1>{c.verdict.value}</h1>"
        f'<div class="models"><b>{escape(c.candidate.name)}</b> against <b>{escape(c.base.name)}</b></div>'
        f'<ul class="reasons">{why}</ul><div class="tiles">{"".join(tiles)}</div></header>'
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table from cells that are HTML already."""
    head = "".join(f"<th>{h}</th>" for h in header)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _trend_section(past: Sequence[Past]) -> str:
    if len(past) < 2:
        return ""
    losses = {name: [run.losses.get(name) for run in past] for name in metric_names(past)}
    names = [f"{run.started} {run.candidate}" for run in past]
    plot = charts.trend_plot(names, losses, [run.verdict.value for run in past])
    rows = [
        (escape(run.started), escape(run.candidate), megabytes(run.bytes), _chip(run.verdict))
        for run in reversed(past[-10:])
    ]
    return (
        '<section><h2>Trend</h2><p class="soft">Runs with this base and these questions, from the history.</p>'
        f"<figure>{plot}<figcaption>Loss of each metric as a multiple of its limit at the time; the colour is the "
        f"run’s verdict.</figcaption></figure>{_table(('started', 'candidate', 'weights', 'verdict'), rows)}</section>"
    )


def _table_section(c: Comparison) -> str:
    rows = []
    for m in c.metrics:
        cells = [f'<span class="nowrap">{escape(cell)}</span>' for cell in metric_row(m)[:-1]]
        rows.append([*cells, _chip(m.verdict)])
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
        f"{_table(HEADER, rows)}"
        f"<figure>{plot}<figcaption>Loss of each metric as a multiple of its limit, with its interval. "
        "The green band is allowed.</figcaption></figure></section>"
    )


def _divergence_section(c: Comparison) -> str:
    d, noise = c.divergence, c.noise
    text = c.settings["text"]
    marks = [("median", d.kl.p50), ("mean", d.kl.mean), ("p99", d.kl.p99), ("limit", c.metrics[0].threshold)]
    low, high = d.delta_nll_interval.low, d.delta_nll_interval.high
    facts = {
        "KL per token": f"mean {d.kl.mean:.4g}, median {d.kl.p50:.4g}, p99 {d.kl.p99:.4g}, max {d.kl.max:.4g} nats",
        "same likeliest token": f"{100 * d.same_top1:.2f} %",
        "five likeliest tokens shared": f"{100 * d.top5_overlap:.2f} %",
        "Δ negative log-likelihood": f"{signed(d.delta_nll, 5)} nats per token ({signed(low, 5)} to {signed(high, 5)})",
        "noise floor": f"the base against itself: KL mean {noise.mean_kl:.2g}, max {noise.max_kl:.2g} nats over "
        f"{noise.tokens:,} tokens"
        + (f"; {noise.flips} of {noise.items} answers changed" if noise.flips is not None else ""),
    }
    base = np.exp(c.windows.window_means("base_nll")).tolist()
    candidate = np.exp(c.windows.window_means("candidate_nll")).tolist()
    finite = any(math.isfinite(v) for v in base)
    windows = (
        f"<figure>{charts.window_plot(base, candidate)}<figcaption>Perplexity of each window, logarithmic. "
        '<span class="key dot base"></span>base <span class="key dot candidate"></span>candidate</figcaption></figure>'
        if finite
        else ""
    )
    return (
        "<section><h2>Divergence from the base, token by token</h2>"
        f'<p class="soft">{text["windows"]} windows of {text["context"]:,} tokens of {escape(str(text["source"]))}.</p>'
        f"{_facts(facts)}"
        f"<figure>{charts.kl_histogram(c.windows.joined('kl'), marks)}"
        "<figcaption>How many tokens have how much KL (logarithmic).</figcaption></figure>"
        f"{windows}</section>"
    )


def _task_section(m: GatedMetric, base: TaskResult, candidate: TaskResult) -> str:
    facts = {"items": f"{m.items:,}" + (f" ({m.missing} missing)" if m.missing else "")}
    if base.chance is not None:
        facts["accuracy of guessing"] = f"{100 * base.chance:.1f} %"
    if base.normalised and candidate.normalised:
        shared = [i for i in base.normalised if i in candidate.normalised]
        b, c = (100 * float(np.mean([r[i] for i in shared])) for r in (base.normalised, candidate.normalised))
        facts["accuracy by likelihood per character"] = f"{b:.1f} % → {c:.1f} %"
    if m.losses is not None:
        facts["answers that flipped"] = f"{m.losses} lost, {m.gains} gained"
        facts["exact McNemar p"] = f"{_probability(m.p_two_sided)} two-sided, {_probability(m.p)} for a drop"
    if m.detectable is not None:
        facts["smallest drop that FAILs four times in five"] = f"{100 * m.detectable:.1f} points"
    if m.settle is not None:
        facts["items that would settle it"] = f"about {m.settle:,}"
    lost = [i for i in base.scores if i in candidate.scores and base.scores[i] > candidate.scores[i]]
    rows = [(f"<code>{escape(i)}</code>", escape(base.texts[i][-240:])) for i in lost[:_SHOWN_FLIPS]]
    table = ""
    if rows:
        count = f"first {len(rows)} of {len(lost)}" if len(lost) > len(rows) else str(len(lost))
        table = f"<h3>Answers lost ({count})</h3>" + _table(("item", "right answer"), rows, "flips")
    return f"<section><h2>{escape(m.name)} {_chip(m.verdict)}</h2>{_facts(facts)}{table}</section>"


def _scheme_section(c: Comparison) -> str:
    figure = charts.scheme_map(c.schemes)
    if not figure:
        return ""
    count = Counter(str(facts["scheme"]) for facts in c.schemes.values())
    kinds = sorted({charts.scheme_class(name) for name in count}, key=list(_BITS).index)
    legend = "".join(f'<span class="key {kind}"></span>{_BITS[kind]}' for kind in kinds)
    schemes = ", ".join(f"{escape(name)} × {n}" for name, n in count.most_common())
    errors = {n: f["relative_error"] for n, f in c.schemes.items() if isinstance(f.get("relative_error"), int | float)}
    worst = sorted(errors, key=lambda n: -errors[n])[:8]
    table = _table(
        ("layer", "scheme", "relative error"),
        [(f"<code>{escape(n)}</code>", escape(str(c.schemes[n]["scheme"])), f"{errors[n]:.4g}") for n in worst],
    )
    return (
        f'<section><h2>Scheme of every layer</h2><p class="soft">{schemes}</p><p class="legend">{legend}</p>'
        f"<figure>{figure}<figcaption>A column a block, a row a projection; the stronger the colour, the larger the "
        "error that was measured when the layer was quantized.</figcaption></figure>"
        + (f"<h3>Layers with the largest error</h3>{table}" if worst else "")
        + "</section>"
    )


def _visible(text: str) -> str:
    """Text with its line ends and tabs shown."""
    return escape(text.replace("\n", "↵").replace("\t", "⇥")) or "∅"


def _choices(choices: tuple[tuple[str, float], ...]) -> str:
    lines = (f'<div><span class="tok">{_visible(t)}</span> {100 * p:.1f} %</div>' for t, p in choices)
    return f'<div class="choices">{"".join(lines)}</div>'


def _worst_section(worst: Sequence[Position]) -> str:
    rows = [
        (
            f"{p.kl:.3f}" if math.isfinite(p.kl) else "not finite",
            f"{p.window} · {p.token}",
            f'<div class="text">{_visible(p.before)} <mark>{_visible(p.following)}</mark></div>',
            _choices(p.base),
            _choices(p.candidate),
        )
        for p in worst
    ]
    header = (
        "KL, nats", "window · token", "text, and the token that follows",
        "base expects", "candidate expects",
    )  # fmt: skip
    return f"<section><h2>The {len(rows)} places that differ most</h2>{_table(header, rows, 'worst')}</section>"


def _facts(facts: dict[str, str]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items()) + "</dl>"


def _reproduce_section(c: Comparison, command: Sequence[str]) -> str:
    text, env = c.settings["text"], c.environment
    facts = {
        "started": c.started,
        "base": f"{c.base.format}, {c.base.bytes:,} bytes, sha256 {c.base.fingerprint}",
        "candidate": f"{c.candidate.format}, {c.candidate.bytes:,} bytes, sha256 {c.candidate.fingerprint}",
        "tokenizer": f"sha256 {c.settings['tokenizer']}",
        "text": f"{text['source']}, {text['windows']} × {text['context']} tokens, sha256 {text['fingerprint']}",
        **{
            f"set {t['name']}": f"{t['source']}, {t['items']} items, sha256 {t['fingerprint']}"
            for t in c.settings["tasks"]
        },
        "limits": ", ".join(f"{m.name} {m.threshold:g}{'' if m.counts else ' (does not count)'}" for m in c.metrics),
        "statistics": f"α {c.settings['alpha']}, {c.settings['resamples']:,} resamples, seed {c.settings['seed']}",
        "runtime": f"dtype {c.settings['dtype']}, device {c.settings['device']}; logits compared in float32",
        "speed": ", ".join(
            f"{who} {m.text_tokens_per_s:,.0f} prompt tokens/s ({m.seconds:.0f} s, {m.load_seconds:.0f} s to load)"
            for who, m in (("base", c.base), ("candidate", c.candidate))
        ),
        "kept from an earlier run": "; ".join(
            f"{who}: {', '.join(m.recalled) or 'nothing'}" for who, m in (("base", c.base), ("candidate", c.candidate))
        ),
        "machine": f"{env['platform']}, {env['cpus']} CPUs, {env['threads']} threads"
        + (f", {', '.join(env['gpus'])}" if env["gpus"] else ""),
        "versions": f"Python {env['python']}, " + ", ".join(f"{k} {v}" for k, v in env["versions"].items()),
    }
    return (
        f"<section><h2>To repeat it</h2><pre><code>{escape(shlex.join(command))}</code></pre>{_facts(facts)}</section>"
    )
