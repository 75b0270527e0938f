"""The built-in sets: 500 different items each, the same on every machine, with answers that can be worked out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from qtool.evalsets import builtin, code, facts
from qtool.evalsets.items import ChoiceSet, Item


@pytest.fixture(scope="module")
def sets() -> dict[str, ChoiceSet]:
    return {name: make() for name, make in builtin.BUILT_IN.items()}


@pytest.mark.parametrize("name", list(builtin.BUILT_IN))
def test_five_hundred_different_items_whose_answer_is_not_told_by_its_place(
    name: str, sets: dict[str, ChoiceSet]
) -> None:
    s = sets[name]
    assert s.name == name
    assert len(s.items) == len({i.id for i in s.items}) == 500
    assert len({(i.context, i.choices[i.answer], frozenset(i.choices)) for i in s.items}) == 500
    for item in s.items:
        assert len(set(item.choices)) == len(item.choices) >= 2, item
        assert all(item.choices)
    places = Counter(i.answer / len(i.choices) for i in s.items)
    assert max(places.values()) < 500 * (s.chance + 0.08), places


def test_another_process_makes_the_same(sets: dict[str, ChoiceSet]) -> None:
    """Hash seeds differ between processes: an order taken from a set would show."""
    text = "import json\nfrom qtool.evalsets.builtin import BUILT_IN as b\n"
    text += "print(json.dumps({n: m().fingerprint for n, m in b.items()}))"
    other = json.loads(subprocess.run([sys.executable, "-c", text], capture_output=True, check=True, text=True).stdout)
    assert other == {name: s.fingerprint for name, s in sets.items()}


def test_sums_are_right(sets: dict[str, ChoiceSet]) -> None:
    words = {"plus": "+", "minus": "-", "times": "*", "divided by": "//"}
    for item in sets["arithmetic"].items:
        a, b = map(int, re.findall(r"\d+", item.context))
        right = int(item.choices[item.answer])
        if item.kind == "story":
            assert right == (a - b if "are left" in item.context else a + b)
        else:
            sign = next(s for w, s in words.items() if f" {w} " in item.context)
            assert right == eval(f"{a} {sign} {b}")
    for item in sets["chinese"].items:
        if item.kind == "addition":
            assert int(item.choices[item.answer]) == sum(map(int, re.findall(r"\d+", item.context)))


def test_what_is_to_be_retrieved_stands_once_in_the_list_and_so_do_the_wrong_choices(
    sets: dict[str, ChoiceSet],
) -> None:
    for item in sets["retrieval"].items:
        listed, question = item.context.split("\n\n")
        thing = question.removeprefix("The number of the ").removesuffix(" is")
        (sentence,) = [s for s in listed.split(".") if f" the {thing} " in f" {s.strip().lower()} "]
        assert item.choices[item.answer] in sentence
        assert all(listed.count(choice) == 1 for choice in item.choices)
    assert len({i.context.split("\n\n")[0] for i in sets["retrieval"].items}) == 25


def test_the_right_code_does_what_it_says(sets: dict[str, ChoiceSet]) -> None:
    """Every right choice is run, where it is a whole function; every wrong one of `operation` gives another result."""
    signs = {"add": 9.0, "subtract": 5.0, "multiply": 14.0, "divide": 3.5}
    for item in sets["code"].items:
        right = item.context + item.choices[item.answer]
        if item.kind == "operation":
            results = [_call(item.context + choice, 7, 2) for choice in item.choices]
            name = re.match(r"def (\w+)", item.context)
            assert name is not None
            assert results[item.answer] == signs[name[1]]
            assert results.count(results[item.answer]) == 1
        elif item.kind == "accumulate":
            name = right.rsplit(".append", 1)[0].split()[-1]
            assert _call(f"{right}\n    return {name}", [1, 0, 2]) == [1, 2]
        elif item.kind == "returned":
            assert _call(right, [1, 2, 3]) == (3 if "def count" in right else 6)
        elif item.kind == "exception":
            assert issubclass(eval(re.search(r"except (\w+)", right)[1]), Exception)  # type: ignore[index]
            compile(right, "item", "exec")
    assert len(set(code.ERRORS.values())) == len(code.ERRORS)


def _call(source: str, *arguments: object) -> object:
    scope: dict[str, object] = {}
    exec(source, scope)
    (function,) = [f for n, f in scope.items() if n != "__builtins__"]
    return function(*arguments)  # type: ignore[operator]


def test_tables_of_facts_hold_no_name_twice(sets: dict[str, ChoiceSet]) -> None:
    rows = [pair for text in facts._COUNTRIES.values() for pair in facts._pairs(text)]
    for table, size in ((rows, 100), (facts._pairs(facts._ELEMENTS), 60), (facts._pairs(facts._OPPOSITES), 80)):
        assert len(table) == size
        for column in zip(*table):
            assert len(set(column)) == size
    known = {
        "The capital of France is": "Paris",
        "Au is the chemical symbol of": "gold",
        'The opposite of "hot" is': '"cold"',
    }
    found = {i.context: i.choices[i.answer] for i in sets["facts"].items}
    assert {context: found[context] for context in known} == known


def test_a_name_or_a_file(tmp_path: Path) -> None:
    assert builtin.item_set("facts") == facts.facts_set()
    path = tmp_path / "facts.jsonl"
    path.write_text('{"context": "a", "choices": ["b", "c"], "answer": 0}\n')
    assert builtin.item_set(path).items == (Item("line-1", "a", ("b", "c"), 0),)
