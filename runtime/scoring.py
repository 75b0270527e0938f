"""In which order likelihoods of continuations are computed, so that what they have in common is computed once.

Continuations of one context (the choices of one question) are a tree. One of them leads: its tokens are computed after
the context, and where others branch off, their next tokens are scored with the same row of logits (its rivals). What
follows a branch comes in a later wave, which finds all before it in the KV cache. Contexts that begin alike (few-shot
prompts, questions about one text) follow the first of them as far as the prefix cache reaches.
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
        context: tokens that are not scored.
        tokens: those that are, and `users`: for each, the pairs whose continuation it belongs to.
        rivals: for each, the tokens that are scored in its place too, and their pairs.
    """

    context: list[int]
    tokens: list[int]
    users: list[list[int]]
    rivals: list[dict[int, list[int]]]

    @property
    def pairs(self) -> set[int]:
        """All that it scores tokens of."""
        return {i for users, others in zip(self.users, self.rivals) for own in (users, *others.values()) for i in own}


def whole_piece(pair: int, context: Sequence[int], continuation: Sequence[int]) -> Piece:
    """A pair by itself, sharing nothing with others."""
    return Piece(list(context), list(continuation), [[pair]] * len(continuation), [{}] * len(continuation))


@dataclass(frozen=True)
class _Branch:
    """Pairs whose continuations have their first `depth` tokens in common."""

    depth: int
    pairs: list[int]


def scoring_waves(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[list[Piece]]:
    """Pieces in waves. What a wave computes, the next ones find in the cache.

    A pair's tokens are scored in their order, each once.

    Args:
        pairs: contexts and continuations of one token or more each.
    """
    by_context: dict[tuple[int, ...], list[int]] = {}
    for i, (context, _) in enumerate(pairs):
        by_context.setdefault(tuple(context), []).append(i)
    roots = [_Branch(0, own) for own in by_context.values()]
    first = [[*pairs[root.pairs[0]][0], *pairs[root.pairs[0]][1]] for root in roots]
    for wave in _sharing_waves(first, [len(pairs[root.pairs[0]][0]) for root in roots]):
        branches = [roots[i] for i in wave]
        while branches:
            later: list[_Branch] = []
            for at in range(0, len(branches), WAVE_FOLLOWERS):
                found = [_lead(pairs, branch) for branch in branches[at : at + WAVE_FOLLOWERS]]
                yield [piece for piece, _ in found]
                later += [branch for _, more in found for branch in more]
            branches = later


def _lead(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], branch: _Branch) -> tuple[Piece, list[_Branch]]:
    """The piece of a branch's first pair, and what is left of its other pairs."""
    context, path = pairs[branch.pairs[0]]
    users: list[list[int]] = []
    rivals: list[dict[int, list[int]]] = []
    rest: list[_Branch] = []
    going = branch.pairs
    for depth in range(branch.depth, len(path)):
        by_token: dict[int, list[int]] = {}
        for i in going:
            if len(pairs[i][1]) > depth:
                by_token.setdefault(pairs[i][1][depth], []).append(i)
        going = by_token.pop(path[depth])
        users.append(going)
        rivals.append(by_token)
        rest += [_Branch(depth + 1, own) for own in by_token.values()]
    rest.append(_Branch(len(path), going))
    left = [_Branch(b.depth, [i for i in b.pairs if len(pairs[i][1]) > b.depth]) for b in rest]
    piece = Piece([*context, *path[: branch.depth]], list(path[branch.depth :]), users, rivals)
    return piece, [b for b in left if b.pairs]


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
