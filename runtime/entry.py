"""A client's request inside the engine: the core's requests that it becomes, and how much of them has been told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from qtool.runtime.engine.params import RequestMetrics, SamplingParams
from qtool.runtime.engine.request import Request, Status
from qtool.runtime.engine.updates import OutputUpdate, RequestUpdate


@dataclass
class Entry:
    """A client's request: its outputs (n of them), each a request of the core, and how much of each has been told."""

    request_id: str
    params: SamplingParams
    parts: list[Request]
    told: list[int] = field(default_factory=list)  # output tokens of each part
    told_scores: int = 0
    told_state: tuple[bool, int, int] | None = None

    def output_update(self, index: int) -> OutputUpdate:
        part, begin = self.parts[index], self.told[index]
        self.told[index] = part.num_output_tokens
        return OutputUpdate(
            index,
            part.token_ids[part.num_prompt_tokens + begin :],
            None if part.params.logprobs is None else part.logprobs[begin:],
            part.finish_reason,
            part.stop_reason,
        )

    def update(self, outputs: list[OutputUpdate]) -> RequestUpdate:
        first = self.parts[0]
        scores = None
        if self.params.prompt_logprobs is not None and first.score_kind == "logprobs":
            scores = first.prompt_scores[self.told_scores :]
            self.told_scores += len(scores)
        drafted, preempted = (
            sum(part.num_drafted for part in self.parts),
            sum(part.num_preemptions for part in self.parts),
        )
        state = (self.finished, drafted, preempted)
        changed, self.told_state = state != self.told_state, state
        return RequestUpdate(self.request_id, outputs, scores, request_metrics(self.parts) if changed else None)

    @property
    def finished(self) -> bool:
        return all(part.status is Status.FINISHED for part in self.parts)


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
