"""Files of cloze and generation items: what is read, and which line is refused for what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qtool.evalsets.items import ClozeItem, ClozeSet, GenerationItem, GenerationSet
from qtool.evalsets.own_sets import read_choice_set, read_set
from qtool.quant.errors import QtoolError

CLOZE = {"id": "a", "context": "The sun rises in the", "target": "east", "metric": "cloze"}
EXACT = {"id": "a", "context": "Q: 2+2?\nA:", "target": ["4", "four"], "metric": "exact"}


def _write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows), encoding="utf-8")
    return path


def test_cloze_items(tmp_path: Path) -> None:
    path = _write(tmp_path / "c.jsonl", CLOZE, {**CLOZE, "id": 2, "context": "天是", "target": "蓝", "delimiter": ""})
    assert read_set(path) == ClozeSet(
        "c",
        (ClozeItem("a", "The sun rises in the", "east"), ClozeItem("2", "天是", "蓝", "")),
        str(path),
    )


@pytest.mark.parametrize(
    ("row", "item"),
    [
        (EXACT, GenerationItem("a", "Q: 2+2?\nA:", ("4", "four"), ("\n",), 32)),
        (
            {**EXACT, "metric": "regex", "target": r"\b4\b", "stop": ["\n\n", "Q:"], "max_tokens": 5},
            GenerationItem("a", "Q: 2+2?\nA:", (r"\b4\b",), ("\n\n", "Q:"), 5),
        ),
        (
            {**EXACT, "metric": "rougeL", "target": "the cat", "kind": "k"},
            GenerationItem("a", "Q: 2+2?\nA:", ("the cat",), (), 128, kind="k"),
        ),
        (
            {**EXACT, "extract": r"(\d+)", "ignore_case": True, "stop": "#"},
            GenerationItem("a", "Q: 2+2?\nA:", ("4", "four"), ("#",), 32, r"(\d+)", True),
        ),
    ],
)
def test_generation_items(tmp_path: Path, row: dict[str, object], item: GenerationItem) -> None:
    path = _write(tmp_path / "g.jsonl", row)
    assert read_set(path) == GenerationSet("g", (item,), str(path), str(row["metric"]))


def test_the_metric_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    one, other = (
        read_set(_write(tmp_path / f"{m}.jsonl", {**EXACT, "metric": m, "stop": "#", "max_tokens": 9}))
        for m in ("exact", "rouge1")
    )
    assert one.fingerprint != other.fingerprint
    assert (one.chance, other.chance) == (0.0, None)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**CLOZE, "id": "b", "metric": "exact"}, "a file holds one kind"),
        ({"context": "x", "choices": ["a", "b"], "answer": 0}, "'choice', but line 1 is 'cloze'"),
        ({**CLOZE, "choices": ["a", "b"]}, "both choices and target"),
        ({"context": "x", "target": "y"}, "a target needs a metric: cloze, exact"),
        ({**CLOZE, "metric": "bleu"}, "metric 'bleu' is not known"),
        ({"context": "x", "metric": "cloze"}, "field 'target' is missing"),
        ({**CLOZE, "id": "b", "target": " "}, "not blank"),
        ({**CLOZE, "id": True}, "id must be"),
        (CLOZE, "id 'a' was used before, on line 1"),
        ('{"context": "x", "target": NaN, "metric": "cloze"}', "NaN is no JSON number"),
        ('{"context": "x", "target": "a", "target": "b", "metric": "cloze"}', "'target' stands there twice"),
        ('{"context": "\\ud800", "target": "a", "metric": "cloze"}', "half a surrogate pair"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: object, message: str) -> None:
    path = _write(tmp_path / "bad.jsonl", CLOZE, "", row)
    with pytest.raises(QtoolError, match=f"bad.jsonl, line 3: .*{message}"):
        read_set(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": ""}, "nothing to continue"),
        ({"target": []}, "at least one"),
        ({"target": [1]}, "a string or a list of strings"),
        ({"target": ""}, "a target is blank"),
        ({"metric": "regex", "target": "(4"}, "no regular expression"),
        ({"extract": "[0-9"}, "extract '.0-9' is no regular expression"),
        ({"extract": 3}, "extract must be a string"),
        ({"metric": "rouge1", "target": "!?"}, "no word or number"),
        ({"stop": [""]}, "a stop string is empty"),
        ({"max_tokens": 0}, "max_tokens must be a whole number from 1 to 4096, found 0"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number"),
        ({"ignore_case": "yes"}, "ignore_case must be true or false"),
    ],
)
def test_a_bad_generation_item_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = _write(tmp_path / "bad.jsonl", {**EXACT, **change})
    with pytest.raises(QtoolError, match=f"bad.jsonl, line 1: .*{message}"):
        read_set(path)


def test_encodings(tmp_path: Path) -> None:
    line = json.dumps({**CLOZE, "target": "éa"}, ensure_ascii=False)
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(line.encode() + b"\n" + line.replace('"a"', '"b"').encode("latin-1"))
    with pytest.raises(QtoolError, match="line 2: not UTF-8"):
        read_set(path)
    path.write_bytes(line.encode("utf-16"))
    with pytest.raises(QtoolError, match="line 1: not UTF-8"):
        read_set(path)
    path.write_bytes(b"\xef\xbb\xbf" + line.encode())
    assert len(read_set(path).items) == 1
    with pytest.raises(QtoolError, match="a set of multiple choice is needed"):
        read_choice_set(path)
