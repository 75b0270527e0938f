"""An analysis for people: the most sensitive groups, the verdict on kinds of layers, and one page with a heat map."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qtool.quant.scheme import FLOAT
from qtool.sensitivity.allocate import uniform_allocations
from qtool.sensitivity.frontier import frontier, picture, table
from qtool.sensitivity.record import UNITS, GroupSensitivity, Sensitivity

TOP = 10
_ROUNDED = {"rtn": "rounded to nearest", "gptq": "by GPTQ on one half of them, and measured on the other"}
# the rule of thumb: what reads a norm's output is the most sensitive
_EXPECTED = {"qkv", "gate_up", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}


def schemes_by_size(sensitivity: Sensitivity) -> list[str]:
    """Every measured scheme, 16-bit left out, from most to fewest bytes (a fitted group counts under its own name)."""
    bits: dict[str, float] = {}
    for group in sensitivity.groups:
        weights = sum(sensitivity.shapes[m][0] * sensitivity.shapes[m][1] for m in group.members)
        for name in group.damage:
            if name != FLOAT:
                bits[name] = max(bits.get(name, 0.0), 8 * sensitivity.group_bytes(group, name) / weights)
    return sorted(bits, key=lambda name: (-bits[name], name))


def most_sensitive(sensitivity: Sensitivity) -> list[GroupSensitivity]:
    """The groups by their worst damage, greatest first."""
    return sorted(sensitivity.groups, key=lambda g: (-max(g.damage.values()), g.block, g.kind))


def top_rows(sensitivity: Sensitivity, count: int = TOP) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table of the most sensitive groups; the share is of the summed worst damage."""
    schemes = schemes_by_size(sensitivity)
    total = sum(max(g.damage.values()) for g in sensitivity.groups) or 1.0
    rows = []
    for group in most_sensitive(sensitivity)[:count]:
        damages = [f"{group.damage[s]:.3g}" if s in group.damage else "" for s in schemes]
        rows.append([group.name, *damages, f"{100 * max(group.damage.values()) / total:.1f} %"])
    return ["group", *schemes, "share"], rows


def kind_rows(sensitivity: Sensitivity) -> tuple[list[str], list[list[str]]]:
    """Header and rows: each kind's summed damage per scheme, and its worst damage per million weights."""
    schemes = schemes_by_size(sensitivity)
    rows = []
    for kind, density in _density(sensitivity).items():
        members = [g for g in sensitivity.groups if g.kind == kind]
        found = [[g.damage[s] for g in members if s in g.damage] for s in schemes]
        rows.append([kind, *(f"{sum(damages):.3g}" if damages else "" for damages in found), f"{density:.3g}"])
    return ["kind", *schemes, "per million weights"], rows


def _density(sensitivity: Sensitivity) -> dict[str, float]:
    """Kind → worst damage per million weights, greatest first."""
    density = {}
    for kind in dict.fromkeys(g.kind for g in sensitivity.groups):
        members = [g for g in sensitivity.groups if g.kind == kind]
        weights = sum(sensitivity.shapes[m][0] * sensitivity.shapes[m][1] for g in members for m in g.members)
        density[kind] = 1e6 * sum(max(g.damage.values()) for g in members) / weights
    return dict(sorted(density.items(), key=lambda item: -item[1]))


def verdict(sensitivity: Sensitivity) -> str:
    """What this model's measurement says, and whether the rule of thumb (q,k,v and gate,up first) holds on it."""
    ranked = most_sensitive(sensitivity)
    total = sum(max(g.damage.values()) for g in ranked) or 1.0
    share = sum(max(g.damage.values()) for g in ranked[:TOP]) / total
    kinds = list(_density(sensitivity))
    expected = _EXPECTED & set(kinds)
    agrees = set(kinds[: len(expected)]) == expected
    return (
        f"The {min(TOP, len(ranked))} most sensitive of {len(ranked)} groups hold {100 * share:.0f} % of the damage. "
        f"Per weight, {kinds[0]} suffers most, then {', '.join(kinds[1:])}: the rule of thumb (q,k,v and gate,up "
        f"first) {'holds' if agrees else 'does not hold'} for this model."
    )


def heat_map(sensitivity: Sensitivity) -> bytes:
    """A PNG: one panel a scheme, blocks across, kinds of groups down, damage as colour on one logarithmic scale."""
    schemes = schemes_by_size(sensitivity)
    kinds = list(dict.fromkeys(g.kind for g in sensitivity.groups))
    blocks = 1 + max(g.block for g in sensitivity.groups)
    panels = np.full((len(schemes), len(kinds), blocks), np.nan)
    for group in sensitivity.groups:
        for i, scheme in enumerate(schemes):
            if group.damage.get(scheme, 0.0) > 0:
                panels[i, kinds.index(group.kind), group.block] = group.damage[scheme]
    seen = panels[np.isfinite(panels)]
    low, high = (seen.min(), seen.max()) if seen.size else (1e-9, 1.0)
    figure = Figure(figsize=(max(7.0, 1.5 + 0.28 * blocks), 1.0 + 1.35 * len(schemes)), layout="constrained")
    axes = figure.subplots(len(schemes), 1, squeeze=False)[:, 0]
    for axis, scheme, panel in zip(axes, schemes, panels):
        image = axis.imshow(panel, norm=LogNorm(low, high if high > low else low * 10), cmap="inferno", aspect="auto")
        axis.set_facecolor("lightgrey")
        axis.set_title(scheme, fontsize=9, loc="left")
        axis.set_yticks(range(len(kinds)), kinds, fontsize=8)
        axis.tick_params(axis="x", labelsize=8)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[-1].set_xlabel("decoder block", fontsize=9)
    figure.colorbar(image, ax=list(axes)).set_label(UNITS[sensitivity.metric], fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_page(sensitivity: Sensitivity) -> str:
    """The whole analysis as one page that needs no other file."""
    calibration = sensitivity.calibration
    heat = base64.b64encode(heat_map(sensitivity)).decode()
    uniform = uniform_allocations(sensitivity)
    curve = frontier(sensitivity, points=15)
    trade_off = base64.b64encode(picture(curve, uniform, None, UNITS[sensitivity.metric], timed=False)).decode()
    named = [("mixed", plan) for plan in curve]
    named += [(f"uniform {n}", a) for n, a in sorted(uniform.items(), key=lambda item: -item[1].average_bits)]
    title = f"Sensitivity of {sensitivity.model}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
table {{ border-collapse: collapse; margin: 1rem 0; }}
th, td {{ padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child {{ text-align: left; }}
img {{ max-width: 100%; }}
</style></head><body>
<h1>{html.escape(title)}</h1>
<p>Metric <b>{sensitivity.metric}</b>: {UNITS[sensitivity.metric]}. Measured on {calibration["num_sequences"]} sequences
of {calibration["seq_len"]} tokens ({html.escape(str(calibration["source"]))}); each group quantized alone,
{_ROUNDED[sensitivity.rounding]}. Model fingerprint {sensitivity.fingerprint[:16]}.</p>
<p>{html.escape(verdict(sensitivity))}</p>
<img alt="damage by block, kind of group and scheme" src="data:image/png;base64,{heat}">
<h2>The most sensitive groups</h2>
{_table(*top_rows(sensitivity))}
<h2>By kind</h2>
{_table(*kind_rows(sensitivity))}
<h2>Size against damage</h2>
<p>Exact plans at 15 budgets, and one scheme for every layer. The damage of a plan is the sum over its groups.</p>
<img alt="predicted damage against size: mixed plans and uniform ones" src="data:image/png;base64,{trade_off}">
{_table(*table(named, timed=False))}
<h2>All groups</h2>
{_table(*top_rows(sensitivity, len(sensitivity.groups)))}
</body></html>
"""
