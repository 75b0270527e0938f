"""Drafts copied from the text itself: what followed the last few tokens where they occurred before. No torch here.

Prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding): it costs next to nothing, and pays
where the output repeats its prompt (summaries, edits, answers from documents) or itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from qtool.runtime.engine.request import Draft, Request

LONGEST = 4  # tokens that must have occurred before, at most and at least
SHORTEST = 2

_TOKEN = array("i").itemsize


def find_repeat(packed: bytes | bytearray, longest: int = LONGEST, shortest: int = SHORTEST) -> int | None:
    """Where the text goes on after the latest earlier occurrence of its end: an index, < its number of tokens.

    The longest end of `longest` to `shortest` tokens that occurred before decides.

    Args:
        packed: the tokens as `array("i")` stores them.
    """
    count = len(packed) // _TOKEN
    for size in range(min(longest, count - 1), shortest - 1, -1):
        end = packed[-size * _TOKEN :]
        limit = len(packed) - 1  # it may overlap the end itself, but not be it
        while (at := packed.rfind(end, 0, limit)) >= 0:
            if at % _TOKEN == 0:
                return at // _TOKEN + size
            limit = at + len(end) - 1
    return None


class PromptLookup:
    """The proposer: keeps each request's tokens in a form that can be searched."""

    setup_seconds = 0.0

    def __init__(self) -> None:
        self._packed: dict[Request, bytearray] = {}

    def num_known(self, request: Request) -> int:
        return request.num_tokens

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, Draft]:
        """At most so many tokens for each request; nothing for one whose end is new."""
        found = {}
        for request, count in wanted.items():
            packed = self._packed.setdefault(request, bytearray())
            packed += array("i", request.token_ids[len(packed) // _TOKEN :]).tobytes()
            start = find_repeat(packed)
            if start is not None:
                found[request] = Draft(copy_from(request.token_ids, start, count))
        return found

    def forget(self, request: Request) -> None:
        self._packed.pop(request, None)


def copy_from(token_ids: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on; past the end, the copy itself goes on (a text that repeats a short piece)."""
    period = len(token_ids) - start
    return tuple(token_ids[start + i % period] for i in range(count))
