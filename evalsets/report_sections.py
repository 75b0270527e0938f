"""The sections of the report that show what was measured in detail: text, tasks, layers, places, how to repeat it."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from functools import partial
from html import escape

import numpy as np

from qtool.evalsets import charts
from qtool.evalsets.compare import Comparison
from qtool.evalsets.divergence import Position
from qtool.evalsets.gate import GatedMetric
from qtool.evalsets.parting import TEXT_SET, share_in_common
from qtool.evalsets.report_cells import chip, facts_list, median_text, number, probability, signed, span, table, visible
from qtool.evalsets.task_runs import TaskResult

_BITS = {"bits4": "4 bits", "bits8": "8 bits", "bits16": "16 bits"}
_SHOWN_FLIPS = 20


def divergence_section(c: Comparison) -> str:
    """KL, agreement and perplexity over the text."""
    d, noise = c.divergence, c.noise
    text = c.settings["text"]
    marks = [("median", d.kl.p50), ("mean", d.kl.mean), ("p99", d.kl.p99), ("limit", c.metrics[0].threshold)]
    interval = span((d.delta_nll_interval.low, d.delta_nll_interval.high), partial(signed, digits=5))
    facts = {
        "KL per token": "mean {}, median {}, p99 {}, max {} nats".format(
            *(number(v, ".4g") for v in (d.kl.mean, d.kl.p50, d.kl.p99, d.kl.max))
        ),
        "same likeliest token": f"{100 * d.same_top1:.2f} %",
        "five likeliest tokens shared": f"{100 * d.top5_overlap:.2f} %",
        "Δ negative log-likelihood": f"{signed(d.delta_nll, 5)} nats per token ({interval})",
        "noise floor": f"the base against itself: mean {noise.mean_kl:.2g}, max {noise.max_kl:.2g} nats",
    }
    with np.errstate(over="ignore"):
        base, candidate = (np.exp(c.windows.window_means(f"{who}_nll")).tolist() for who in ("base", "candidate"))
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
        f"{facts_list(facts)}"
        f"<figure>{charts.kl_histogram(c.windows.joined('kl'), marks)}"
        "<figcaption>How many tokens have how much KL (logarithmic).</figcaption></figure>"
        f"{windows}</section>"
    )


def task_section(m: GatedMetric, base: TaskResult, candidate: TaskResult) -> str:
    """One task: flips, what could be detected, answers that were lost."""
    facts = {"items": f"{m.items:,}" + (f" ({m.missing} missing)" if m.missing else "")}
    if m.broken:
        facts["items with NaN or infinity"] = f"{m.broken:,} (counted as wrong)"
    if base.chance is not None:
        facts["accuracy of guessing"] = f"{100 * base.chance:.1f} %"
    if base.normalised and candidate.normalised:
        shared = [i for i in base.normalised if i in candidate.normalised]
        b, c = (100 * float(np.mean([r[i] for i in shared])) for r in (base.normalised, candidate.normalised))
        facts["accuracy by likelihood per character"] = f"{b:.1f} % → {c:.1f} %"
    if m.losses is not None:
        facts["answers that flipped"] = f"{m.losses} lost, {m.gains} gained"
        facts["exact McNemar p"] = f"{probability(m.p_two_sided)} two-sided, {probability(m.p)} for a drop"
    if m.detectable is not None:
        facts["smallest drop that FAILs four times in five"] = f"{100 * m.detectable:.1f} points"
    if m.settle is not None:
        facts["items that would settle it"] = f"about {m.settle:,}"
    lost = [i for i in base.scores if i in candidate.scores and base.scores[i] > candidate.scores[i]]
    rows: list[tuple[str, ...]] = [
        (f"<code>{escape(i)}</code>", escape(base.texts[i][-240:])) for i in lost[:_SHOWN_FLIPS]
    ]
    header: tuple[str, ...] = ("right answer",)
    if base.outputs and candidate.outputs:
        header = ("prompt and answer", "base gives", "candidate gives")
        both = [(base.outputs[i].text, candidate.outputs[i].text) for i in lost[: len(rows)]]
        rows = [(*row, *(visible(text[:400]) for text in pair)) for row, pair in zip(rows, both)]
    flips = ""
    if rows:
        count = f"first {len(rows)} of {len(lost)}" if len(lost) > len(rows) else str(len(lost))
        what = "Items that score less" if base.graded else "Answers lost"
        flips = f"<h3>{what} ({count})</h3>" + table(("item", *header), rows, "flips")
    return f"<section><h2>{escape(m.name)} {chip(m.verdict)}</h2>{facts_list(facts)}{flips}</section>"


def generation_section(c: Comparison) -> str:
    """Where greedy outputs of both models part; "" where nothing was generated."""
    if not c.partings:
        return ""
    rows = [
        (
            "beginnings of the text" if p.name == TEXT_SET else f"<code>{escape(p.name)}</code>",
            f"{len(p.positions)}",
            f"{p.max_tokens}",
            f"{p.same}",
            median_text(p),
            f"{p.mean_common:.1f}",
        )
        for p in c.partings
    ]
    header = ("prompts", "number", "longest output", "same to the end", "median", "mean in common")
    curves = [(p.name, share_in_common(p.positions, p.max_tokens)) for p in c.partings]
    noise = c.noise
    again = f" The base against itself: {noise.parted} of {noise.prompts} part." if noise.parted is not None else ""
    examples = [
        (
            str(e.position),
            f'<div class="text">{visible(e.before[-200:])}</div>',
            f'<div class="text">{visible(e.base[:160])}</div>',
            f'<div class="text">{visible(e.candidate[:160])}</div>',
        )
        for p in c.partings
        for e in p.examples
    ]
    parted = f"<h3>Outputs that part first</h3>{table(_EXAMPLE_HEADER, examples, 'parted')}" if examples else ""
    return (
        '<section><h2>Where greedy generations part</h2><p class="soft">Both models continue the same prompts, always '
        f"with the likeliest token; counted are the tokens before the first that differs.{again}</p>"
        f"{table(header, rows)}<figure>{charts.parting_plot(curves)}<figcaption>Share of the outputs that are still "
        f"the same after so many tokens.</figcaption></figure>{parted}</section>"
    )


_EXAMPLE_HEADER = ("tokens in common", "prompt, and what both say", "base goes on", "candidate goes on")


def noise_section(c: Comparison) -> str:
    """The base against itself: what no candidate can be better than."""
    noise = c.noise
    facts = {
        "KL per token": f"mean {noise.mean_kl:.2g}, max {noise.max_kl:.2g} nats over {noise.tokens:,} tokens",
    }
    if noise.parted is not None:
        facts["generations that part"] = f"{noise.parted} of {noise.prompts}"
    rows = [
        (
            f"<code>{escape(s.name)}</code>",
            f"{s.items}",
            f"{s.flips}",
            "–" if s.max_margin_change is None else f"{s.max_margin_change:.2g} nats",
            "–" if s.close is None else f"{s.close}",
        )
        for s in noise.sets
    ]
    header = ("set", "items asked twice", "scores that changed", "largest change of a lead", "items closer than that")
    return (
        '<section><h2>Noise floor</h2><p class="soft">The base against itself: asked twice by the same runtime, '
        "in another order of requests. A lead is the log-likelihood of the right choice less that of the best wrong "
        f"one.</p>{facts_list(facts)}{table(header, rows) if rows else ''}</section>"
    )


def scheme_section(c: Comparison) -> str:
    """The map of schemes and errors, and the layers that stand out; "" where nothing is known of the layers."""
    blamed = {s.layer for s in c.suspects}
    figure = charts.scheme_map(c.schemes, blamed)
    if not figure:
        return ""
    count = Counter(str(facts["scheme"]) for facts in c.schemes.values())
    kinds = sorted({charts.scheme_class(name) for name in count}, key=list(_BITS).index)
    legend = "".join(f'<span class="key {kind}"></span>{_BITS[kind]}' for kind in kinds)
    if blamed:
        legend += '<span class="key blamed"></span>stands out'
    schemes = ", ".join(f"{escape(name)} × {n}" for name, n in count.most_common())
    errors = {n: e for n, f in c.schemes.items() if (e := charts.layer_error(f)) is not None}
    first = sorted(errors, key=lambda n: (n not in blamed, -errors[n]))[:8]
    rows = [
        (
            f"<code>{escape(n)}</code>" + (' <span class="chip fail">stands out</span>' if n in blamed else ""),
            escape(str(c.schemes[n]["scheme"])),
            *(_share(c.schemes[n].get(field)) for field in ("relative_error", "distance")),
        )
        for n in first
    ]
    header = ("layer", "scheme", "error when quantized", "distance from the base")
    return (
        f'<section><h2>Scheme of every layer</h2><p class="soft">{schemes}</p><p class="legend">{legend}</p>'
        f"<figure>{figure}<figcaption>A column a block, a row a projection; the stronger the colour, the larger the "
        "distance of the stored weight from the base’s where it was measured (after a run that did not pass), else the "
        "error that was measured when the layer was quantized.</figcaption></figure>"
        + (f"<h3>Layers with the largest error</h3>{table(header, rows)}" if rows else "")
        + "</section>"
    )


def _share(value: object) -> str:
    """A relative error as text."""
    return f"{value:.4g}" if isinstance(value, int | float) else "–"


def _choices(choices: tuple[tuple[str, float], ...]) -> str:
    if not all(math.isfinite(p) for _, p in choices):
        return "not finite"
    lines = (f'<div><span class="tok">{visible(t)}</span> {100 * p:.1f} %</div>' for t, p in choices)
    return f'<div class="choices">{"".join(lines)}</div>'


def worst_section(worst: Sequence[Position]) -> str:
    """The places of the text that differ most, side by side."""
    rows = [
        (
            number(p.kl, ".3f"),
            f"{p.window} · {p.token}",
            f'<div class="text">{visible(p.before)} <mark>{visible(p.following)}</mark></div>',
            _choices(p.base),
            _choices(p.candidate),
        )
        for p in worst
    ]
    header = (
        "KL, nats", "window · token", "text, and the token that follows",
        "base expects", "candidate expects",
    )  # fmt: skip
    return f"<section><h2>The {len(rows)} places that differ most</h2>{table(header, rows, 'worst')}</section>"


def reproduce_section(c: Comparison, command: Sequence[str]) -> str:
    """Everything that is needed to run it again."""
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
        "generations": "{prompts} prompts from the text, {max_tokens} tokens each".format(**c.settings["generations"]),
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
    line = escape(shlex.join(command))
    return f"<section><h2>To repeat it</h2><pre><code>{line}</code></pre>{facts_list(facts)}</section>"
