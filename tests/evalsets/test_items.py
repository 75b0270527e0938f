"""Item files are checked line by line; the built-in set is pinned."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from qtool.evalsets.grammar import grammar_set
from qtool.evalsets.items import ChoiceSet, Item, check_sets
from qtool.evalsets.own_sets import read_choice_set
from qtool.quant.errors import QtoolError

GOOD = {"id": "a", "context": "One and one is", "choices": ["two", "three"], "answer": 0}


def _write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows), encoding="utf-8")
    return path


def test_a_good_file(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "mine.jsonl",
        GOOD,
        "",
        {"context": "", "choices": ["a\u2028b", "c", "d"], "answer": 2},
        {"id": 7, "context": "因为", "choices": ["它", "她"], "answer": 1, "delimiter": "", "kind": "zh"},
    )
    read = read_choice_set(path)
    assert read.name == "mine"
    assert read.items == (
        Item("a", "One and one is", ("two", "three"), 0, " "),
        Item("line-3", "", ("a\u2028b", "c", "d"), 2, ""),
        Item("7", "因为", ("它", "她"), 1, "", "zh"),
    )
    assert read.chance == pytest.approx((1 / 2 + 1 / 3 + 1 / 2) / 3)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"context": "x"', "not valid JSON"),
        ("[1, 2]", "expected a JSON object, found list"),
        ({k: v for k, v in GOOD.items() if k != "answer"}, "field 'answer' is missing"),
        ({k: v for k, v in GOOD.items() if k != "context"}, "field 'context' is missing"),
        ({**GOOD, "id": "b", "answer": 2}, r"answer 2 is outside the choices \(0 to 1\)"),
        ({**GOOD, "id": "b", "answer": -1}, "answer -1 is outside"),
        ({**GOOD, "id": "b", "answer": True}, "must be the index"),
        ({**GOOD, "id": "b", "answer": "two"}, "must be the index"),
        ({**GOOD, "id": "b", "choices": ["two"]}, "at least two"),
        ({**GOOD, "id": "b", "choices": ["two", ""]}, "non-empty"),
        ({**GOOD, "id": "b", "choices": ["two", "two"]}, "equal"),
        ({**GOOD, "id": "b", "context": 3}, "context must be a string"),
        ({**GOOD, "id": ["b"]}, "id must be"),
        ({**GOOD, "id": "b", "delimiter": 1}, "delimiter"),
        (GOOD, "id 'a' was used before, on line 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: object, message: str) -> None:
    path = _write(tmp_path / "bad.jsonl", GOOD, "", row)
    with pytest.raises(QtoolError, match=f"bad.jsonl, line 3: .*{message}"):
        read_choice_set(path)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(QtoolError, match="no such file"):
        read_choice_set(tmp_path / "none.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.write_text(" \n\n")
    with pytest.raises(QtoolError, match="the file is empty"):
        read_choice_set(empty)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(json.dumps(GOOD).encode() + b"\n" + '{"context": "é"}'.encode("latin-1"))
    with pytest.raises(QtoolError, match="line 2: not UTF-8"):
        read_choice_set(latin)


def test_two_sets_of_one_name_and_sets_of_one_item_are_refused() -> None:
    items = tuple(Item(name, "", ("b", "c"), 0) for name in "ab")
    one = ChoiceSet("x", items, "here")
    check_sets([one])
    with pytest.raises(QtoolError, match="'x'"):
        check_sets([one, one])
    with pytest.raises(QtoolError, match="here: 1 item; at least 2"):
        check_sets([ChoiceSet("y", items[:1], "here")])


def test_the_grammar_set_is_pinned() -> None:
    """500 distinct pairs, the same on every machine and Python; a change must be deliberate."""
    built = grammar_set()
    assert len(built.items) == 500
    assert len({frozenset(i.choices) for i in built.items}) == 500
    assert set(Counter(i.kind for i in built.items).values()) == {50}
    assert built.chance == 0.5
    right_first = sum(i.answer == 0 for i in built.items)
    assert 200 <= right_first <= 300
    assert built.fingerprint == "6940de013bd84f368e6a5c3f7e0d8cd7b5816dc843cef8c67b20546bd117f09f"


def test_grammar_pairs_differ_little() -> None:
    """Every pair is two sentences of nearly the same length, so that length alone does not answer."""
    for item in grammar_set().items:
        a, b = item.choices
        assert abs(len(a.split()) - len(b.split())) <= 1
        assert all(c[0].isupper() and c[-1] in ".?" for c in item.choices)


@pytest.mark.model
def test_the_default_model_is_far_above_chance(default_model: Path) -> None:
    """Fifty pairs, every tenth, through transformers: measured 0.90 on all 500."""
    import torch
    from transformers import AutoModelForCausalLM

    from qtool.quant.documents import load_tokenizer

    tokenizer = load_tokenizer(default_model)
    model = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32).eval()

    def likelihoods(texts: list[str]) -> list[float]:
        rows = [[tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)] for text in texts]
        longest = max(map(len, rows))
        ids = torch.tensor(
            [row + [row[0]] * (longest - len(row)) for row in rows]
        )  # what follows a text changes nothing
        with torch.no_grad():
            logits = model(ids).logits[:, :-1].log_softmax(-1)
        each = logits.gather(2, ids[:, 1:, None])[..., 0]
        return [float(tokens[: len(row) - 1].sum()) for tokens, row in zip(each, rows)]

    right = 0
    for at in range(0, 500, 100):
        items = grammar_set().items[at : at + 100 : 10]
        found = likelihoods([text for item in items for text in item.choices])
        right += sum((b > a) == bool(item.answer) for a, b, item in zip(found[::2], found[1::2], items))
    assert right >= 40
