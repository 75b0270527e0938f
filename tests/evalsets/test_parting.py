"""Where outputs part: positions and medians by hand; prompts; the whole over a stand-in runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qtool.evalsets.harness import Generated
from qtool.evalsets.parting import (
    Prompts,
    from_json,
    generate_greedy,
    median_position,
    parting,
    parting_position,
    share_in_common,
    text_prompts,
    to_json,
)
from qtool.quant.documents import load_tokenizer


@pytest.mark.parametrize(
    ("a", "b", "position"),
    [
        ((1, 2, 3), (1, 2, 3), None),
        ((1, 2, 3), (1, 5, 3), 1),
        ((1, 2), (1, 2, 3), 2),  # one ended, the other went on
        ((4,), (5,), 0),
        ((), (), None),
    ],
)
def test_positions(a: tuple[int, ...], b: tuple[int, ...], position: int | None) -> None:
    assert parting_position(a, b) == parting_position(b, a) == position


@pytest.mark.parametrize(
    ("positions", "median"),
    [([3, None, 1], 3), ([3, None, None], None), ([0, 5, None, None], 5), ([7], 7), ([None], None), ([], None)],
)
def test_the_median_counts_what_never_parts_as_longer(positions: list[int | None], median: int | None) -> None:
    assert median_position(positions) == median


def test_share_in_common_falls_where_a_token_differs() -> None:
    assert share_in_common([0, 2, None, 2], 3) == [0.75, 0.75, 0.25]


def test_prompts_are_spread_over_the_windows() -> None:
    windows = torch.arange(400).view(4, 100)
    prompts = text_prompts(windows, 6)  # two a window at most, 25 tokens each
    assert [p[0] for p in prompts.tokens] == [0, 100, 200, 300, 50, 150]
    assert all(p == tuple(range(p[0], p[0] + 25)) for p in prompts.tokens)
    assert len(text_prompts(windows, 1000).tokens) == 16  # no room for more
    assert text_prompts(windows, 0).tokens == ()
    assert prompts.fingerprint != text_prompts(windows, 5).fingerprint


def test_two_models_part_where_their_likeliest_tokens_differ(tiny: Path, tiny_noisy: Path, fake_served: Any) -> None:
    prompts = Prompts(((5, 6, 7, 8), (40, 41, 42)), 6)
    base, other = (generate_greedy(fake_served(folder), prompts) for folder in (tiny, tiny_noisy))
    assert from_json(to_json(base)) == base
    tokenizer = load_tokenizer(tiny)
    same = parting("text", 6, base, base, ["x", "y"], tokenizer)
    assert (same.same, same.median, same.examples) == (2, None, ())
    found = parting("text", 6, base, other, ["x", "y"], tokenizer)
    for position, prompt, mine, theirs in zip(found.positions, prompts.tokens, base, other, strict=True):
        assert position is not None
        assert mine.tokens[:position] == theirs.tokens[:position]
        for served, tokens in ((fake_served(tiny), mine.tokens), (fake_served(tiny_noisy), theirs.tokens)):
            (logits,) = served.prompt_logits([[*prompt, *tokens[:position]]])
            assert int(logits[-1].argmax()) == tokens[position]
    assert found.mean_common == sum(p for p in found.positions if p is not None) / 2


def test_examples_begin_with_what_both_say() -> None:
    class Letters:
        def decode(self, ids: list[int]) -> str:
            return "".join(map(chr, ids))

    def text(value: str) -> Generated:
        return Generated(value, tuple(map(ord, value)))

    found = parting("mine", 5, [text("abcde"), text("same")], [text("abxy"), text("same")], ["P:", "Q:"], Letters())
    (example,) = found.examples
    assert (example.position, example.before, example.base, example.candidate) == (2, "P:ab", "cde", "xy")
