"""Sequences that begin alike are scored one after another; nothing is lost or asked twice."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from qtool.evalsets.sharing import WAVE_FOLLOWERS, WAVE_TOKENS, common_prefix, sharing_waves


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=40))
def test_every_index_once(sequences: list[list[int]]) -> None:
    waves = list(sharing_waves(sequences, [len(s) - 1 for s in sequences]))
    assert sorted(i for wave in waves for i in wave) == list(range(len(sequences)))
    assert all(waves)


def test_choices_follow_the_first_of_their_question() -> None:
    rng = random.Random(3)
    contexts = [[rng.randrange(1000) for _ in range(20)] for _ in range(5)]
    sequences = [[*context, choice] for choice in (7, 8, 9) for context in contexts]
    leaders, followers = sharing_waves(sequences, [20] * 15)
    assert len(leaders) == 5
    assert {tuple(sequences[i][:20]) for i in leaders} == set(map(tuple, contexts))
    assert len(followers) == 10


def test_waves_are_bounded() -> None:
    long = [[i] * 1000 for i in range(7)]
    assert [len(wave) for wave in sharing_waves(long, [900] * 7)] == [2, 2, 2, 1]
    alike = [[*range(100), i] for i in range(WAVE_FOLLOWERS + 11)]
    assert [len(wave) for wave in sharing_waves(alike, [100] * len(alike))] == [1, WAVE_FOLLOWERS, 10]
    too_long = [list(range(WAVE_TOKENS + 5))]
    assert list(sharing_waves(too_long, [3])) == [[0]]


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([], [1]) == 0
