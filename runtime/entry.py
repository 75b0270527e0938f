"""A client's request and its outputs, each of which is a request of the core."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from qtool.runtime.detokenizer import Detokenizer
from qtool.runtime.engine.params import RequestMetrics, SamplingParams
from qtool.runtime.engine.request import Request


@dataclass
class Entry:
    """A client's request: its outputs (n of them), each a request of the core with its own detokenizer."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    parts: list[Request]
    texts: list[Detokenizer | None]
    fed: list[int] = field(default_factory=list)  # output tokens given to each detokenizer


def best(entry: Entry) -> list[tuple[Request, Detokenizer | None]]:
    """The outputs to give: all of them, or the `n` of `best_of` with the highest mean log-probability, best first."""
    found = list(zip(entry.parts, entry.texts))
    if len(found) == entry.params.n:
        return found

    def mean_logprob(item: tuple[Request, Detokenizer | None]) -> float:
        scores = item[0].logprobs
        failed = item[0].finish_reason == "error" or not scores
        return -math.inf if failed else sum(s.logprob for s in scores) / len(scores)

    return sorted(found, key=mean_logprob, reverse=True)[: entry.params.n]


def request_metrics(parts: Sequence[Request]) -> RequestMetrics:
    """Moments of a client's request: from the first of its outputs to begin to the last to end."""
    ends = [p.finished for p in parts]
    return RequestMetrics(
        arrival=parts[0].arrival,
        scheduled=min((p.scheduled for p in parts if p.scheduled is not None), default=None),
        first_token=min((p.first_token for p in parts if p.first_token is not None), default=None),
        finished=None if None in ends else max(end for end in ends if end is not None),
        num_cached_tokens=parts[0].num_cached_tokens,
        num_preemptions=sum(p.num_preemptions for p in parts),
        num_drafted_tokens=sum(p.num_drafted for p in parts),
        num_accepted_tokens=sum(p.num_accepted for p in parts),
        num_swaps=sum(p.num_swaps for p in parts),
    )
