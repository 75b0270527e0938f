"""The comparison for other programs: JUnit XML for a CI server, Markdown for a pull request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from qtool.evalsets.compare import Comparison
from qtool.evalsets.gate import GatedMetric
from qtool.evalsets.ranking import ranked, worst_verdict
from qtool.evalsets.report_cells import HEADER, change, median_text, megabytes, metric_row, number, reasons
from qtool.evalsets.statistics import Verdict

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SIGNS = {Verdict.PASS: "✅", Verdict.FAIL: "❌", Verdict.INCONCLUSIVE: "❔", Verdict.UNINFORMATIVE: "➖"}
_SHOWN = ("metric", "base", "candidate", "Δ", "Δ %", "interval", "p (Holm)", "limit")


def junit(comparisons: Sequence[Comparison]) -> str:
    """JUnit XML: a suite a candidate, a test a metric, and one that all numbers are finite.

    FAIL is a failure, INCONCLUSIVE an error (it was not shown that the candidate is good); what does not count, and
    what says nothing, is skipped.
    """
    root = ElementTree.Element("testsuites", name="qtool compare")
    for c in comparisons:
        outcomes = [_outcome(m) for m in c.metrics]
        broken = "; ".join(map(str, c.not_finite))
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=_xml(f"{c.candidate.name} against {c.base.name}"),
            tests=str(len(outcomes) + 1),
            failures=str(outcomes.count("failure") + bool(broken)),
            errors=str(outcomes.count("error")),
            skipped=str(outcomes.count("skipped")),
            time=f"{c.base.seconds + c.candidate.seconds:.3f}",
            timestamp=c.started,
        )
        for m, outcome in zip(c.metrics, outcomes, strict=True):
            case = ElementTree.SubElement(suite, "testcase", classname=_xml(c.candidate.name), name=_xml(m.name))
            cells = dict(zip(HEADER, metric_row(m)))
            if outcome:
                what = f"{m.verdict}: {change(m)}, limit {cells['limit']}" + (f"; {m.note}" if m.note else "")
                ElementTree.SubElement(case, outcome, message=_xml(what), type=m.verdict.value)
            detail = ElementTree.SubElement(case, "system-out")
            detail.text = _xml("\n".join(f"{name}: {cell}" for name, cell in cells.items()))
        case = ElementTree.SubElement(suite, "testcase", classname=_xml(c.candidate.name), name="finite numbers")
        if broken:
            ElementTree.SubElement(case, "failure", message=_xml(broken), type=Verdict.FAIL.value)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _outcome(m: GatedMetric) -> str:
    if not m.counts or m.verdict is Verdict.UNINFORMATIVE:
        return "skipped"
    return {Verdict.FAIL: "failure", Verdict.INCONCLUSIVE: "error"}.get(m.verdict, "")


def _xml(text: str) -> str:
    """Text without the control characters that XML cannot hold."""
    return _NOT_XML.sub("�", text)


def markdown(comparisons: Sequence[Comparison]) -> str:
    """GitHub's Markdown: the verdict, a table of the metrics, and the reasons; a ranking before several candidates."""
    if len(comparisons) == 1:
        return "\n".join(_one(comparisons[0], "##")) + "\n"
    worst = worst_verdict(comparisons)
    lines = [f"## {_SIGNS[worst]} {worst}: {len(comparisons)} candidates against {_md(comparisons[0].base.name)}", ""]
    lines += ["| rank | candidate | weights | mean KL | verdict |", "|---:|---|---:|---:|---|"]
    best_first = ranked(comparisons)
    for place, c in enumerate(best_first, 1):
        cells = (str(place), c.candidate.name, megabytes(c.candidate.bytes), number(c.divergence.kl.mean, ".4f"))
        lines.append("| " + " | ".join(map(_md, cells)) + f" | {_SIGNS[c.verdict]} {c.verdict} |")
    for c in best_first:
        lines += ["", *_one(c, "###")]
    return "\n".join(lines) + "\n"


def _one(c: Comparison, level: str) -> list[str]:
    lines = [
        f"{level} {_SIGNS[c.verdict]} {c.verdict}: {_md(c.candidate.name)} against {_md(c.base.name)}",
        "",
        f"Weights: {megabytes(c.base.bytes)} → {megabytes(c.candidate.bytes)}. "
        f"Same likeliest token: {100 * c.divergence.same_top1:.2f} %.",
        *(
            f"Greedy generations ({_md(p.name)}): half part within {_md(median_text(p))} tokens, "
            f"{p.same} of {len(p.positions)} are the same to the end."
            for p in c.partings
        ),
        "",
        "| " + " | ".join(_SHOWN) + " | verdict |",
        "|---|" + "---:|" * (len(_SHOWN) - 1) + "---|",
    ]
    for m in c.metrics:
        cells = dict(zip(HEADER, metric_row(m)))
        verdict = f"{_SIGNS[m.verdict]} {m.verdict}" + ("" if m.counts else " (does not count)")
        lines.append("| " + " | ".join(_md(cells[name]) for name in _SHOWN) + f" | {verdict} |")
    return [*lines, "", *(f"- {_md(line)}" for line in (*reasons(c), *c.notes))]


def _md(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", " ".join(text.split()))
