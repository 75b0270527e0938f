"""How well one generated text answers one item: right or wrong, or a share."""

from __future__ import annotations

import re

from qtool.evalsets.items import GenerationItem
from qtool.evalsets.rouge import rouge


def score_output(metric: str, item: GenerationItem, output: str) -> float:
    """Score in [0, 1] of `output` for `item`: 1.0 or 0.0 for `exact` and `regex`, the F-measure for ROUGE.

    White space at both ends does not count. Where `item.extract` matches nothing, the item scores 0.0.
    """
    text = _extracted(item.extract, output)
    if text is None:
        return 0.0
    if metric == "exact":
        return float(any(_plain(text, item) == _plain(target, item) for target in item.targets))
    if metric == "regex":
        flags = re.IGNORECASE if item.ignore_case else re.NOFLAG
        return float(any(re.search(pattern, text, flags) for pattern in item.targets))
    return rouge(metric, text, item.targets)


def _extracted(pattern: str, output: str) -> str | None:
    """The last match of `pattern` (its first group where it has one); None where there is none."""
    if not pattern:
        return output
    last = None
    for match in re.finditer(pattern, output):
        last = match
    if last is None:
        return None
    return str(last[1] or "") if last.re.groups else str(last[0])


def _plain(text: str, item: GenerationItem) -> str:
    text = text.strip()
    return text.casefold() if item.ignore_case else text
