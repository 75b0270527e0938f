"""In which order sequences are scored, so that what they have in common is computed once and found in the KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

WAVE_TOKENS = 2048  # of leaders in one wave: one step's worth, and no more than the smallest KV cache holds
WAVE_FOLLOWERS = 256  # in one wave, so that progress is seen
LEAST_SHARED = 8  # tokens; below it no block of the cache is shared
SHARE = 0.5  # of its context that a follower must find


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    most = min(len(a), len(b))
    if a[:most] == b[:most]:
        return most
    return next(i for i in range(most) if a[i] != b[i])


def sharing_waves(sequences: Sequence[list[int]], contexts: Sequence[int]) -> Iterator[list[int]]:
    """Indices of `sequences` in waves, each index once. What a wave computes, the next ones find in the cache.

    The choices of one question, and questions about one text, begin alike. In lexicographic order such sequences are
    neighbours: the first of them leads, those that share at least half of their context (its length is `contexts[i]`)
    with it follow in a later wave. Leaders of up to WAVE_TOKENS tokens go together, their followers after them.
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
