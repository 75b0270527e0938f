"""Outputs scored by hand, and ROUGE against the rouge-score package's own tokenizer."""

from __future__ import annotations

import pytest
from rouge_score.rouge_scorer import RougeScorer

from qtool.evalsets.items import GenerationItem
from qtool.evalsets.output_scores import score_output
from qtool.evalsets.rouge import rouge, rouge_words


def _item(*targets: str, **fields: object) -> GenerationItem:
    return GenerationItem("a", "context", targets, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("metric", "item", "output", "score"),
    [
        ("exact", _item("four", "4"), " 4\n", 1.0),
        ("exact", _item("four"), "Four", 0.0),
        ("exact", _item("four", ignore_case=True), "Four", 1.0),
        ("exact", _item("42", extract=r"-?\d+"), "first 7, then 42.", 1.0),
        ("exact", _item("42", extract=r"is (\d+)"), "It is 41. No, it is 42 of 50", 1.0),
        ("exact", _item("42", extract=r"(\d+)"), "none", 0.0),
        ("regex", _item(r"\bcat\b", r"dog$"), "a hot dog", 1.0),
        ("regex", _item(r"\bcat\b"), "concatenate", 0.0),
        ("regex", _item("CAT", ignore_case=True), "a cat", 1.0),
        # words: reference 4, output 3, in common 2 (unigrams), longest common subsequence 2
        ("rouge1", _item("the cat sat down"), "cat the dog", 2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4)),
        ("rougeL", _item("the cat sat down"), "cat the dog", 2 * (1 / 3) * (1 / 4) / (1 / 3 + 1 / 4)),
        ("rougeL", _item("no", "a b c"), "a b c", 1.0),
        ("rouge1", _item("今天天气很好"), "天气很好", 2 * 1.0 * (4 / 6) / (1 + 4 / 6)),
        ("rouge1", _item("a"), "", 0.0),
    ],
)
def test_scores(metric: str, item: GenerationItem, output: str, score: float) -> None:
    assert score_output(metric, item, output) == pytest.approx(score)


def test_ascii_texts_score_as_by_rouge_score_itself() -> None:
    theirs = RougeScorer(["rouge1", "rougeL"])
    pairs = [
        ("The cat's on_the mat, 3.5 times!", "the Cat is on the mat"),
        ("one two three two one", "three two one two three"),
        ("A-b c/d", "a b\nc D e"),
    ]
    for target, output in pairs:
        for metric, score in theirs.score(target, output).items():
            assert rouge(metric, output, (target,)) == pytest.approx(score.fmeasure)


def test_words_of_other_scripts() -> None:
    assert rouge_words("Straße 12, 北京 и Москва カ") == ["straße", "12", "北", "京", "и", "москва", "カ"]
