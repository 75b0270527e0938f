"""The report's figures as SVG text. Colours are CSS variables of the page, so that they follow light and dark."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

_LAYER = re.compile(r"(?:^|\.)(\d+)\.(.+)$")


def _svg(width: float, height: float, label: str, body: Sequence[str]) -> str:
    """An SVG that scales down with the page but never up."""
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px" role="img" '
        f'aria-label="{escape(label)}">' + "".join(body) + "</svg>"
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _rect(x: float, y: float, width: float, height: float, kind: str, title: str = "", style: str = "") -> str:
    extra = f' style="{style}"' if style else ""
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" class="{kind}"{extra}'
    return f"{shape}><title>{escape(title)}</title></rect>" if title else f"{shape}/>"


@dataclass(frozen=True)
class IntervalRow:
    """One row of the interval plot: a loss with its interval, as multiples of its threshold."""

    name: str
    verdict: str
    loss: float
    low: float
    high: float
    label: str


def interval_plot(rows: Sequence[IntervalRow]) -> str:
    """One row a metric; 0 is "as the base", 1 is the limit. What lies beyond the axis ends in an arrow."""
    left, right, top, step = 190.0, 150.0, 34.0, 40.0
    width = 980.0
    span = [v for row in rows for v in (row.low, row.high, row.loss) if math.isfinite(v)]
    most = min(6.0, max(2.0, math.ceil(max(span, default=2.0) + 0.25)))
    least = max(-3.0, min(-1.0, math.floor(min(span, default=-1.0))))
    height = top + step * len(rows) + 30

    def x(value: float) -> float:
        return left + (min(max(value, least), most) - least) / (most - least) * (width - left - right)

    bottom = top + step * len(rows)
    body = [_rect(left, top, x(1) - left, bottom - top, "allowed")]
    for tick in range(int(least), int(most) + 1):
        body.append(_line(x(tick), top, x(tick), bottom, "limit" if tick == 1 else "zero" if tick == 0 else "grid"))
        name = {0: "as the base", 1: "limit"}.get(tick, f"{tick}×" if tick > 0 else f"−{-tick}×")
        body.append(_text(x(tick), bottom + 18, name, "tick", "middle"))
    body.append(_text(left, top - 14, "← better", "tick"))
    body.append(_text(width - right, top - 14, "worse →", "tick", "end"))
    for i, row in enumerate(rows):
        y = top + step * (i + 0.5)
        kind = row.verdict.lower()
        body.append(_text(left - 14, y + 4, row.name, "name", "end"))
        body.append(_text(width - right + 14, y + 4, row.label, "value"))
        if not math.isfinite(row.loss):
            body.append(_text(x(1) + 10, y + 4, "not a finite number", "value"))
            continue
        body.append(_line(x(row.low), y, x(row.high), y, f"interval {kind}"))
        for end in (row.low, row.high):
            if end <= most:
                body.append(_line(x(end), y - 6, x(end), y + 6, f"interval {kind}"))
        if row.high > most:
            tip = x(most)
            body.append(f'<path d="M{tip - 2:.1f} {y - 7:.1f} l9 7 l-9 7 z" class="mark {kind}"/>')
        if row.loss <= most:
            body.append(f'<circle cx="{x(row.loss):.1f}" cy="{y:.1f}" r="6" class="mark {kind}"/>')
    return _svg(width, height, "Loss of each metric with its interval, as multiples of its limit", body)


def kl_histogram(kl: Tensor, marks: Sequence[tuple[str, float]]) -> str:
    """How many tokens have how much KL, on a logarithmic axis; `marks` are named values drawn as lines."""
    width, height, left, bottom, top = 980.0, 264.0, 56.0, 222.0, 56.0
    values = np.nan_to_num(kl.double().numpy(), nan=np.inf)
    floor, ceiling = 1e-7, 1e2
    logs = np.log10(np.clip(values, floor, ceiling))
    low = math.floor(float(np.quantile(logs, 0.005)))
    high = max(low + 2, math.ceil(float(logs.max()) + 0.01))
    bins = np.linspace(low, high, 61)
    counts, _ = np.histogram(np.clip(logs, low, high), bins)
    most = max(int(counts.max()), 1)

    def x(log: float) -> float:
        return left + (log - low) / (high - low) * (width - left - 20)

    body = [_line(left, bottom, width - 20, bottom, "axis")]
    for share in (0.5, 1.0):
        y = bottom - share * (bottom - top)
        body += [_line(left, y, width - 20, y, "grid"), _text(left - 8, y + 4, f"{int(most * share):,}", "tick", "end")]
    for i, count in enumerate(counts):
        tall = (bottom - top) * count / most
        span = f"{10 ** bins[i]:.2g} to {10 ** bins[i + 1]:.2g} nats: {count:,} tokens"
        if count:
            body.append(_rect(x(bins[i]) + 0.75, bottom - tall, x(bins[i + 1]) - x(bins[i]) - 1.5, tall, "bar", span))
    for power in range(low, high + 1):
        name = "≤ 1e-7" if power == low == -7 else f"1e{power}" if power < -2 else f"{10.0**power:g}"
        body.append(_text(x(power), bottom + 18, name, "tick", "middle"))
    body.append(_text(width - 20, bottom + 38, "KL(base ‖ candidate) of one token, nats", "tick", "end"))
    level = 0
    for name, value in sorted(marks, key=lambda mark: mark[1]):
        if not floor <= value <= ceiling or not low <= math.log10(value) <= high:
            continue
        at = x(math.log10(value))
        body.append(_line(at, 12 + 14 * (level % 3), at, bottom, "limit" if name == "limit" else "marker"))
        body.append(_text(at + 4, 21 + 14 * (level % 3), f"{name} {value:.3g}", "tick"))
        level += 1
    return _svg(width, height, "Histogram of token KL", body)


def window_plot(base: Sequence[float], candidate: Sequence[float]) -> str:
    """Perplexity of every window under both models: a line from the base's to the candidate's."""
    width, left, top, step = 980.0, 90.0, 20.0, 20.0 if len(base) <= 20 else 9.0
    finite = [v for v in (*base, *candidate) if math.isfinite(v)]
    low, high = min(finite) * 0.95, max(finite) * 1.05
    height = top + step * len(base) + 34

    def x(value: float) -> float:
        return left + (math.log(value) - math.log(low)) / (math.log(high) - math.log(low)) * (width - left - 20)

    bottom = top + step * len(base)
    body = []
    for tick in _nice_ticks(low, high):
        body += [
            _line(x(tick), top - 8, x(tick), bottom, "grid"),
            _text(x(tick), bottom + 18, f"{tick:g}", "tick", "middle"),
        ]
    for i, (b, c) in enumerate(zip(base, candidate)):
        y = top + step * (i + 0.5)
        if step > 12:
            body.append(_text(left - 12, y + 4, f"window {i}", "tick", "end"))
        if math.isfinite(b) and math.isfinite(c):
            body.append(_line(x(b), y, x(c), y, "link"))
            body.append(f'<circle cx="{x(c):.1f}" cy="{y:.1f}" r="5" class="candidate"><title>{c:.3f}</title></circle>')
        if math.isfinite(b):
            body.append(f'<circle cx="{x(b):.1f}" cy="{y:.1f}" r="4" class="base"><title>{b:.3f}</title></circle>')
    return _svg(width, height, "Perplexity of each window", body)


def trend_plot(runs: Sequence[str], losses: Mapping[str, Sequence[float | None]], verdicts: Sequence[str]) -> str:
    """Loss of every metric as a multiple of its limit, a band a metric, run after run; `runs` are the names of dots."""
    width, left, right, top, tall = 980.0, 190.0, 80.0, 14.0, 74.0
    height = top + tall * len(losses) + 24

    def x(run: int) -> float:
        return left + (run + 0.5) / len(runs) * (width - left - right)

    body = []
    for band, (name, values) in enumerate(losses.items()):
        bottom = top + tall * (band + 1) - 12
        finite = [v for v in values if v is not None]
        most, least = min(max(1.25, *finite, 1.25), 6.0), max(min(0.0, *finite, 0.0), -3.0)

        def y(value: float, most: float = most, least: float = least, bottom: float = bottom) -> float:
            return bottom - (min(max(value, least), most) - least) / (most - least) * (tall - 20)

        body += [_line(left, y(1), width - right, y(1), "limit"), _line(left, y(0), width - right, y(0), "zero")]
        body += [_text(left - 14, y(0.5) + 4, name, "name", "end"), _text(width - right + 8, y(1) + 4, "limit", "tick")]
        points = [(i, v) for i, v in enumerate(values) if v is not None]
        body += [_line(x(i), y(v), x(j), y(w), "link") for (i, v), (j, w) in pairwise(points)]
        for i, v in points:
            title = escape(f"{runs[i]}: {v:.2f} of the limit")
            dot = f'<circle cx="{x(i):.1f}" cy="{y(v):.1f}" r="4" class="mark {verdicts[i].lower()}">'
            body.append(f"{dot}<title>{title}</title></circle>")
    body.append(_text(left, height - 6, "oldest run", "tick"))
    body.append(_text(width - right, height - 6, "this run", "tick", "end"))
    return _svg(width, height, "Loss of each metric over the runs, as multiples of its limit", body)


def parting_plot(curves: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Share of outputs still in common after 1, 2, … tokens: a falling staircase a set."""
    width, height, left, right, top, bottom = 980.0, 250.0, 56.0, 150.0, 18.0, 208.0
    longest = max(len(shares) for _, shares in curves)

    def x(token: float) -> float:
        return left + token / longest * (width - left - right)

    def y(share: float) -> float:
        return bottom - share * (bottom - top)

    body = []
    for share in (0.0, 0.5, 1.0):
        kind = "marker" if share == 0.5 else "axis" if share == 0 else "grid"
        body += [_line(left, y(share), width - right, y(share), kind)]
        body += [_text(left - 8, y(share) + 4, f"{100 * share:.0f} %", "tick", "end")]
    for tick in sorted({round(longest * part / 4) for part in range(5)}):
        body.append(_text(x(tick), bottom + 18, str(tick), "tick", "middle"))
    body.append(_text(width - right, bottom + 38, "tokens generated", "tick", "end"))
    for place, (name, shares) in enumerate(curves):
        steps = [f"M{x(0):.1f} {y(1.0):.1f}"]
        for token, share in enumerate(shares, 1):
            steps.append(f"V{y(share):.1f}H{x(token):.1f}")  # lost at a token: the fall stands where that token begins
        body.append(f'<path d="{"".join(steps)}" class="curve curve{place % 4}"/>')
        body.append(_text(width - right + 14, top + 6 + 20 * place, name, f"name curve{place % 4}-name"))
    return _svg(width, height, "Share of greedy generations still in common", body)


def _nice_ticks(low: float, high: float) -> list[float]:
    """1, 1.5, 2, 3, 5 and 7 times powers of ten between the ends; at most ten of them."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**e for e in exponents for m in (1, 1.5, 2, 3, 5, 7) if low <= m * 10.0**e <= high]
    return ticks[:: math.ceil(len(ticks) / 10)] if ticks else []


def scheme_map(schemes: Mapping[str, Mapping[str, Any]], blamed: Collection[str] = ()) -> str:
    """One cell a layer: a column a block, a row a projection; colour by bits, strength by measured error.

    Layers in `blamed` are framed and named.
    """
    cells: dict[tuple[int, str], tuple[str, Mapping[str, Any]]] = {}
    for name, facts in schemes.items():
        if match := _LAYER.search(name):
            cells[int(match[1]), match[2]] = (name, facts)
    if not cells:
        return ""
    rows = list(dict.fromkeys(role for _, role in cells))
    blocks = sorted({block for block, _ in cells})
    errors = [layer_error(facts) for _, facts in cells.values()]
    worst = max((e for e in errors if e is not None), default=0.0)
    left, top, side = 160.0, 22.0, min(26.0, 800.0 / len(blocks))
    tall = 24.0
    body = []
    for column, block in enumerate(blocks):
        if len(blocks) <= 40 or block % 5 == 0:
            body.append(_text(left + side * (column + 0.5), top - 7, str(block), "tick", "middle"))
    for r, role in enumerate(rows):
        y = top + tall * r
        body.append(_text(left - 10, y + tall / 2 + 4, role.split(".")[-1], "name", "end"))
        for column, block in enumerate(blocks):
            if (block, role) not in cells:
                continue
            name, facts = cells[block, role]
            error = layer_error(facts)
            strength = 0.35 + 0.65 * math.sqrt(error / worst) if error is not None and worst > 0 else 1.0
            title = f"{name}: {facts['scheme']}" + (f", error {error:.4g}" if error is not None else "")
            kind = f"cell {scheme_class(str(facts['scheme']))}"
            body.append(_rect(left + side * column, y + 1, side - 2, tall - 2, kind, title, f"opacity:{strength:.2f}"))
            if name in blamed:
                body.append(_rect(left + side * column - 1, y, side, tall, "blamed", f"{title}: stands out"))
    return _svg(left + side * len(blocks) + 10, top + tall * len(rows) + 8, "Scheme of every layer", body)


def scheme_class(name: str) -> str:
    """The CSS class of a scheme: `bits4`, `bits8` or `bits16`."""
    return "bits4" if name.startswith("w4") else "bits8" if name.startswith("w8") else "bits16"


def layer_error(facts: Mapping[str, Any]) -> float | None:
    """Distance from the base where it was measured, else the error when the layer was quantized; None for neither."""
    value = facts.get("distance", facts.get("relative_error"))
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
