"""The comparison's numbers as text, and pieces of HTML that the report's sections share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from qtool.evalsets.compare import Comparison
from qtool.evalsets.gate import GatedMetric
from qtool.evalsets.parting import Parting
from qtool.evalsets.statistics import Verdict

HEADER = ("metric", "base", "candidate", "Δ", "Δ %", "interval", "p", "p (Holm)", "limit", "verdict")
MINUS = "−"


def signed(value: float, digits: int, suffix: str = "") -> str:
    """`+1.50`, `−0.30`, with a true minus sign; `0.00` without a sign."""
    if not math.isfinite(value):
        return "not finite"
    text = f"{abs(value):.{digits}f}{suffix}"
    if float(f"{abs(value):.{digits}f}") == 0:
        return text
    return ("+" if value > 0 else MINUS) + text


def probability(p: float | None) -> str:
    if p is None:
        return "–"
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def metric_row(m: GatedMetric) -> tuple[str, ...]:
    """One metric as the cells of HEADER."""
    tail = (probability(m.p), probability(m.p_holm))
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


def median_text(p: Parting) -> str:
    """The token after which half of the generations have parted; `> 64` where more than half are the same till then."""
    return f"> {p.max_tokens}" if p.median is None else str(p.median)


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


def chip(verdict: Verdict) -> str:
    return f'<span class="chip {verdict.value.lower()}">{verdict.value}</span>'


def tile(value: str, name: str) -> str:
    return f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table from cells that are HTML already."""
    head = "".join(f"<th>{h}</th>" for h in header)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def facts_list(facts: dict[str, str]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items()) + "</dl>"


def visible(text: str) -> str:
    """Text with its line ends and tabs shown."""
    return escape(text.replace("\n", "↵").replace("\t", "⇥")) or "∅"
