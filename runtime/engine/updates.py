"""What one step of the engine brought, in token ids: the increments that text is made of. No torch here."""

from __future__ import annotations

from typing import NamedTuple

from qtool.runtime.engine.params import RequestMetrics, TokenLogprobs


class OutputUpdate(NamedTuple):
    """What is new of one output of a request.

    Attributes:
        output_index: which of the request's outputs; of `best_of` before the best are chosen.
        token_ids: the tokens since its last update.
        logprobs: theirs, where log-probabilities are computed; None where not.
        finish_reason, stop_reason: as in CompletionOutput; None while it runs.
    """

    output_index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class RequestUpdate(NamedTuple):
    """What is new of a request.

    Attributes:
        prompt_logprobs: of the prompt positions scored since the last update, from position 1 on; None: not asked for.
        metrics: its moments and counts; None: as in the update before.
    """

    request_id: str
    outputs: list[OutputUpdate]
    prompt_logprobs: list[TokenLogprobs] | None = None
    metrics: RequestMetrics | None = None


class StopFound(NamedTuple):
    """A stop string ended an output that the engine may still be running: it is to be told."""

    request_id: str
    output_index: int
    stop_reason: str
