"""ROUGE-1 and ROUGE-L of one output, by the rouge-score package; words of any script count."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_ALONE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # kana and Chinese characters: each a word of its own
_WORD = re.compile(f"[{_ALONE}]|[^\\W_{_ALONE}]+")  # else a run of letters and digits


def rouge_words(text: str) -> list[str]:
    """Lower-case words of a text. ASCII text is parted as rouge-score's own tokenizer does without stemming."""
    return _WORD.findall(text.lower())


class _Words:
    """rouge-score's tokenizer interface."""

    def tokenize(self, text: str) -> list[str]:
        return rouge_words(text)


@cache
def _scorer(metric: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([metric], tokenizer=_Words())


def rouge(metric: str, output: str, targets: tuple[str, ...]) -> float:
    """F-measure in [0, 1] of `rouge1` or `rougeL` (whole texts) against the target that fits best.

    Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries"; computed by google-research's rouge-score.
    """
    return max(float(_scorer(metric).score(target, output)[metric].fmeasure) for target in targets)
