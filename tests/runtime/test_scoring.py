"""Sequences that begin alike are scored one after another; nothing is lost or asked twice."""

from __future__ import annotations

import random
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from qtool.runtime.scoring import WAVE_FOLLOWERS, WAVE_TOKENS, common_prefix, scoring_waves

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=4), TOKENS), max_size=40))
def test_every_token_once_after_its_own_context(pairs: list[tuple[list[int], list[int]]]) -> None:
    scored: dict[int, list[tuple[tuple[int, ...], int]]] = defaultdict(list)  # (text before, token) by pair
    computed: set[tuple[tuple[int, ...], ...]] = set()  # context, and text whose last token an earlier wave computed
    for wave in scoring_waves(pairs):
        assert wave
        texts: list[tuple[tuple[int, ...], ...]] = []
        for piece in wave:
            assert not texts or len(wave) <= WAVE_FOLLOWERS
            for i, token in enumerate(piece.tokens):
                before = (*piece.context, *piece.tokens[:i])
                texts.append((tuple(pairs[piece.users[i][0]][0]), (*before, token)))
                for pair in piece.users[i]:
                    scored[pair].append((before, token))
                for rival, users in piece.rivals[i].items():
                    for pair in users:
                        scored[pair].append((before, rival))
        assert len(set(texts)) == len(texts), "a token of a text is in two pieces at once"
        assert not computed & set(texts), "a token is computed again"
        computed |= set(texts)
    for i, (context, continuation) in enumerate(pairs):
        assert scored[i] == [((*context, *continuation[:j]), token) for j, token in enumerate(continuation)]


def test_choices_follow_the_first_of_their_question() -> None:
    rng = random.Random(3)
    contexts = [[rng.randrange(1000) for _ in range(20)] for _ in range(5)]
    pairs = [(context, [choice, 1]) for choice in (7, 8, 9) for context in contexts]
    first, rest = scoring_waves(pairs)
    assert {tuple(piece.context) for piece in first} == set(map(tuple, contexts))
    assert [list(map(len, piece.rivals)) for piece in first] == [[2, 0]] * 5
    assert [piece.tokens for piece in rest] == [[1]] * 10
    # two of them go on alike before they part
    first, second = scoring_waves([(contexts[0], tokens) for tokens in ([7, 1, 2], [7, 1, 3, 4], [7, 5], [8, 9])])
    assert [(p.tokens, p.rivals) for p in first] == [([7, 1, 2], [{8: [3]}, {5: [2]}, {3: [1]}])]
    assert [(p.context[20:], p.tokens) for p in second] == [([8], [9]), ([7, 1, 3], [4])]
    # choices of one token need nothing but their question
    (only,) = scoring_waves([(context, [choice]) for choice in (7, 8, 9) for context in contexts])
    assert len(only) == 5


def test_waves_are_bounded() -> None:
    long = [([i] * 900, [i] * 100) for i in range(7)]
    assert [len(wave) for wave in scoring_waves(long)] == [2, 2, 2, 1]
    alike = [([*range(100), i], [1]) for i in range(WAVE_FOLLOWERS + 11)]
    assert [len(wave) for wave in scoring_waves(alike)] == [1, WAVE_FOLLOWERS, 10]
    choices = [([1], [i, 1]) for i in range(WAVE_FOLLOWERS + 11)]
    assert [len(wave) for wave in scoring_waves(choices)] == [1, WAVE_FOLLOWERS, 10]
    (too_long,) = scoring_waves([([1] * WAVE_TOKENS, [5])])
    assert [piece.users for piece in too_long] == [[[0]]]


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([], [1]) == 0
