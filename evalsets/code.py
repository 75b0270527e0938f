"""The built-in set `code`: how does this Python function go on? Four choices, chance 0.25."""

from __future__ import annotations

import random

from qtool.evalsets.generated import Question, generated_set, others
from qtool.evalsets.items import ChoiceSet

PLURALS = {
    "value": "values", "price": "prices", "word": "words", "name": "names", "score": "scores", "point": "points",
    "row": "rows", "user": "users", "line": "lines", "token": "tokens", "number": "numbers", "weight": "weights",
    "file": "files", "node": "nodes", "item": "items", "order": "orders", "record": "records", "size": "sizes",
}  # fmt: skip
RESULTS = ("result", "output", "found", "kept", "collected", "answer")
ARGUMENTS = ("width", "height", "length", "depth", "start", "stop", "left", "right", "first", "second", "low", "high")
OPERATIONS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}
ERRORS = {
    "int(text)": "ValueError", "table[key]": "KeyError", "open(path)": "FileNotFoundError",
    "1 / count": "ZeroDivisionError", "next(source)": "StopIteration", "values[index]": "IndexError",
    "import_module(name)": "ImportError",
}  # fmt: skip


def accumulate(rng: random.Random) -> Question:
    one, result = rng.choice(sorted(PLURALS)), rng.choice(RESULTS)
    many = PLURALS[one]
    head = f"def collect_{many}({many}):\n    {result} = []\n    for {one} in {many}:\n        if {one}:\n            "
    right = f"{result}.append({one})"
    wrong = (f"{many}.append({result})", f"{one}.append({result})", f"{result}.append({many})")
    return Question(head + ("# keep it\n            " if rng.random() < 0.5 else ""), right, wrong)


def returned(rng: random.Random) -> Question:
    one, result = rng.choice(sorted(PLURALS)), rng.choice(RESULTS)
    many = PLURALS[one]
    name = rng.choice(("sum", "total", "count"))
    step = "1" if name == "count" else one
    head = f"def {name}_{many}({many}):\n    {result} = 0\n    for {one} in {many}:\n        {result} += {step}\n    "
    return Question(head, f"return {result}", (f"return {one}", f"return {many}", f"return {name}"))


def operation(rng: random.Random) -> Question:
    name, (a, b) = rng.choice(sorted(OPERATIONS)), rng.sample(ARGUMENTS, 2)
    sign = OPERATIONS[name]
    wrong = [f"{a} {other} {b}" for other in others(rng, sign, list(OPERATIONS.values()))]
    return Question(f"def {name}({a}, {b}):\n    return ", f"{a} {sign} {b}", tuple(wrong))


def exception(rng: random.Random) -> Question:
    call, result = rng.choice(sorted(ERRORS)), rng.choice(RESULTS)
    fallback = rng.choice(("None", "default", "0", "False"))
    head = f"try:\n    {result} = {call}\nexcept "
    tail = f":\n    {result} = {fallback}"
    right = ERRORS[call]
    return Question(head, right + tail, tuple(w + tail for w in others(rng, right, list(ERRORS.values()))))


def attribute(rng: random.Random) -> Question:
    a, b = rng.sample(ARGUMENTS, 2)
    kind = rng.choice(("Box", "Range", "Frame", "Window", "Shape"))
    head = f"class {kind}:\n    def __init__(self, {a}, {b}):\n        self.{a} = {a}\n        "
    return Question(head, f"self.{b} = {b}", (f"self.{a} = {b}", f"{b} = self.{b}", f"self.{b} = {a}"))


def code_set() -> ChoiceSet:
    """The 500 functions, the same on every machine."""
    return generated_set("code", (accumulate, returned, operation, exception, attribute), delimiter="")
