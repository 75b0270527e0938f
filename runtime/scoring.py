"""In which order likelihoods of continuations are computed, so that what they have in common is computed once.

Continuations of one context (the choices of one question) share its KV cache, and their first tokens share one row of
logits: the first of them leads, and has the first tokens of the others scored beside its own. Of the others only what
follows their first token is left. Contexts that begin alike (few-shot prompts, questions about one text) follow the
first of them as far as the prefix cache reaches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WAVE_TOKENS = 2048  # of leaders in one wave: one step's worth, and no more than the smallest KV cache holds
WAVE_FOLLOWERS = 256  # in one wave, so that progress is seen
LEAST_SHARED = 8  # tokens; below it no block of the cache is shared
SHARE = 0.5  # of its context that a follower must find


@dataclass(frozen=True)
class Piece:
    """One text to score.

    Attributes:
        pair: index of the (context, continuation) that it belongs to.
        context: tokens that are not scored.
        tokens: those that are.
        rivals: other pairs of the same context; the first token of each is scored in the place of `tokens[0]`.
    """

    pair: int
    context: list[int]
    tokens: list[int]
    rivals: tuple[int, ...] = ()


def scoring_waves(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[list[Piece]]:
    """Pieces in waves. What a wave computes, the next ones find in the cache.

    A pair is one piece, or one of another pair's `rivals` and, where its continuation has more tokens than one, a later
    piece of what is left.

    Args:
        pairs: contexts and continuations of one token or more each.
    """
    by_context: dict[tuple[int, ...], list[int]] = {}
    for i, (context, _) in enumerate(pairs):
        by_context.setdefault(tuple(context), []).append(i)
    groups = list(by_context.values())
    contexts = [list(pairs[own[0]][0]) for own in groups]
    first = [[*context, *pairs[own[0]][1]] for context, own in zip(contexts, groups)]
    for wave in _sharing_waves(first, [len(c) for c in contexts]):
        yield [Piece(groups[g][0], contexts[g], list(pairs[groups[g][0]][1]), tuple(groups[g][1:])) for g in wave]
        rest = [
            Piece(i, [*contexts[g], pairs[i][1][0]], list(pairs[i][1][1:]))
            for g in wave
            for i in groups[g][1:]
            if len(pairs[i][1]) > 1
        ]
        for at in range(0, len(rest), WAVE_FOLLOWERS):
            yield rest[at : at + WAVE_FOLLOWERS]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    most = min(len(a), len(b))
    if a[:most] == b[:most]:
        return most
    return next(i for i in range(most) if a[i] != b[i])


def _sharing_waves(sequences: Sequence[list[int]], contexts: Sequence[int]) -> Iterator[list[int]]:
    """Indices of `sequences` in waves, each index once.

    In lexicographic order sequences that begin alike are neighbours: the first of them leads, those that share at least
    half of their context (its length is `contexts[i]`) with it follow in a later wave. Leaders of up to WAVE_TOKENS
    tokens go together, their followers after them.
    """
    leaders: list[int] = []
    followers: list[int] = []
    tokens = 0
    for i in sorted(range(len(sequences)), key=lambda i: sequences[i]):
        least = max(LEAST_SHARED, SHARE * contexts[i])
        if leaders and common_prefix(sequences[leaders[-1]], sequences[i]) >= least:
            followers.append(i)
            continue
        if leaders and tokens + len(sequences[i]) > WAVE_TOKENS:
            yield from _parted(leaders, followers)
            leaders, followers, tokens = [], [], 0
        leaders.append(i)
        tokens += len(sequences[i])
    yield from _parted(leaders, followers)


def _parted(leaders: list[int], followers: list[int]) -> Iterator[list[int]]:
    if leaders:
        yield leaders
    for at in range(0, len(followers), WAVE_FOLLOWERS):
        yield followers[at : at + WAVE_FOLLOWERS]
