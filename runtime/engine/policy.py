"""In which order requests are served. A policy ranks a request once, when it arrives: the lowest rank goes first.

Ageing is part of the rank: what counts against a request is set against the moment it arrived, so of two that wait, the
order never changes, and a request is passed only by those that arrive within a bounded time after it. Under any traffic
every request therefore becomes the first in line, and nothing starves. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from qtool.runtime.engine.request import Request

SECONDS_PER_LEVEL = 10.0
"""Waiting this long is worth one level of priority."""
SECONDS_PER_TOKEN = 0.01
"""Waiting this long is worth one token less in the prompt: one of 2,000 tokens is passed for 20 seconds at most."""


def fcfs(request: Request) -> float:
    """First come, first served."""
    return request.arrival


def priority(request: Request) -> float:
    """The lower `params.priority`, the sooner; first come, first served within a level."""
    return request.arrival + SECONDS_PER_LEVEL * request.params.priority


def shortest(request: Request) -> float:
    """The shortest prompt first. How long an answer gets is not known beforehand: `max_tokens` only bounds it."""
    return request.arrival + SECONDS_PER_TOKEN * request.num_prompt_tokens


POLICIES: Mapping[str, Callable[[Request], float]] = {"fcfs": fcfs, "priority": priority, "shortest": shortest}
