"""The comparison's numbers as text, and pieces of HTML that the report's sections share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape

from qtool.evalsets.compare import Comparison
from qtool.evalsets.gate import GatedMetric
from qtool.evalsets.parting import Parting
from qtool.evalsets.statistics import Verdict

HEADER = ("metric", "base", "candidate", "Δ", "Δ %", "interval", "p", "p (Holm)", "limit", "verdict")
MINUS = "−"
LARGE = 1e9  # from here on digits behind the point say nothing


def signed(value: float, digits: int, suffix: str = "") -> str:
    """`+1.50`, `−0.30`, with a true minus sign; `0.00` without a sign."""
    size = number(abs(value), f".{digits}f")
    if not math.isfinite(value):
        return size
    text = f"{size}{suffix}"
    if float(size) == 0:
        return text
    return ("+" if value > 0 else MINUS) + text


def number(value: float, form: str) -> str:
    """A number by its format, where it is one; short where it is so large that a table would not hold its digits."""
    if not math.isfinite(value):
        return "not finite"
    return format(value, form if abs(value) < LARGE else ".4g")


def span(ends: Sequence[float], form: Callable[[float], str], suffix: str = "") -> str:
    """`low to high`; nothing to be told where they are no numbers."""
    return f"{form(ends[0])} to {form(ends[1])}{suffix}" if all(map(math.isfinite, ends)) else "–"


def probability(p: float | None) -> str:
    if p is None:
        return "–"
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def metric_row(m: GatedMetric) -> tuple[str, ...]:
    """One metric as the cells of HEADER."""
    tail = (probability(m.p), probability(m.p_holm))
    low, high = m.interval.low, m.interval.high
    percent = partial(signed, digits=2)
    base = math.nan if m.base is None else m.base
    if m.kind == "kl":
        interval = span((low, high), partial(number, form=".4f"))
        cells = ("–", number(m.candidate, ".4f"), signed(m.loss, 4), "–", interval, *tail, f"≤ {m.threshold:g}")
    elif m.kind == "perplexity":
        cells = (
            number(base, ".3f"), number(m.candidate, ".3f"),
            signed(m.candidate - base, 3), signed(100 * m.loss, 2, " %"),
            span((100 * low, 100 * high), percent, " %"), *tail, f"≤ +{100 * m.threshold:g} %",
        )  # fmt: skip
    elif m.kind == "accuracy":
        relative = signed(-100 * m.loss / base, 2, " %") if base else "–"
        cells = (
            f"{100 * base:.1f} %", f"{100 * m.candidate:.1f} %", signed(-100 * m.loss, 2, " pt"), relative,
            span((-100 * high, -100 * low), percent, " pt"), *tail, f"≥ {MINUS}{100 * m.threshold:g} pt",
        )  # fmt: skip
    else:
        cells = (
            number(base, ".4g"), number(m.candidate, ".4g"),
            signed(m.candidate - base, 4), signed(-100 * m.loss, 2, " %"),
            span((-100 * high, -100 * low), percent, " %"), *tail, f"≥ {MINUS}{100 * m.threshold:g} %",
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
    """Why the verdict is what it is: a line for each part that is not finite, and for each metric that did not pass, or
    one for all that did."""
    lines = [str(part) for part in comparison.not_finite]
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
