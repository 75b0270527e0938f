"""One request as the scheduler sees it: tokens, how many of them are computed, and what ends it. No torch here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple

from qtool.runtime.engine.params import RequestMetrics, SamplingParams, TokenLogprobs
from qtool.runtime.engine.structured_output import TokenMatcher


class Draft(NamedTuple):
    """Tokens that a proposer expects next, to be verified in one step (engine/speculation.py).

    Attributes:
        probs: the distribution that each was drawn from, [len(token_ids), vocab_size] in the executor's own form; None
            where they were not drawn, so that each is certain.
    """

    token_ids: tuple[int, ...] = ()
    probs: Any = None


NO_DRAFT = Draft()


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """A prompt and the tokens generated from it.

    `num_computed_tokens` catches up with `num_tokens`: a prefill chunk, a decode step and the recomputation after a
    preemption differ only in how far it is behind.

    Attributes:
        prompt_token_ids: at least one token.
        stop_token_ids: token ids that end the output: end-of-sequence (unless ignored) and the client's own.
        bad_words: token sequences that the output must not contain.
        matcher: where the output stands in the form that it must have; None: any output.
        score_from: the first prompt position (≥ 1) whose token is to be scored, or None. Position i is scored with
            the logits of position i - 1.
        score_kind: `logprobs` gives one TokenLogprobs per scored position, `logits` one float32 tensor per chunk.
        rivals: position → tokens that are scored in the place of the one there, too; for `logprobs`.
        generate: False for a request that is only scored: it ends with its prompt.
        prompt_scores: what the executor returned for the scored positions, in order, each with its rivals' after it.
        num_scored: scored positions so far (a recomputation does not score again).
        sample_seed: seed of this request's random stream; with the position it decides the draw.
        rank: the lower, the sooner it is served; set when it is queued (engine/policy.py).
        max_num_tokens: prompt and output tokens with which it ends; set when it is queued.
        last_is_spare: the last token is scored, but need not be computed.
        may_run_ahead: its next token can be computed before this one is known to the host: nothing but the token itself
            goes in.
        num_computed_tokens: with those of a step that is still on the device.
        num_in_flight: tokens that such steps sample: they count, but nobody has seen them yet.
        num_drafted, num_accepted: tokens that were proposed for it, and those of them that are part of the output.
        block_table, num_slots: its KV blocks in order while it runs, and the tokens that they hold; kept by the
            KVCacheManager.
        host_blocks, num_swapped_tokens: the blocks that are kept for it in host memory while it waits, and the tokens
            that they hold; kept by the SwapSpace.
        num_preemptions, num_swaps: times that it made room for others, and those of them whose blocks were kept.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    matcher: TokenMatcher | None = None
    score_from: int | None = None
    score_kind: Literal["logprobs", "logits"] = "logprobs"
    rivals: Mapping[int, Sequence[int]] = field(default_factory=dict)
    generate: bool = True
    sample_seed: int = 0
    rank: tuple[float, int] = (0.0, 0)
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    max_num_tokens: int = 0
    may_run_ahead: bool = field(init=False)
    last_is_spare: bool = field(init=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_scores: list[Any] = field(default_factory=list)
    num_scored: int = 0
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    block_table: list[int] = field(default_factory=list)
    num_slots: int = 0
    host_blocks: list[int] = field(default_factory=list)
    num_swapped_tokens: int = 0
    status: Status = Status.WAITING
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    arrival: float = field(default_factory=time.monotonic)
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.may_run_ahead = self.params.greedy_argmax and self.score_from is None
        self.last_is_spare = not self.generate and self.score_kind == "logprobs" and self.num_to_score > 0

    @property
    def num_tokens(self) -> int:
        """Tokens that are to be computed: prompt and output together, those in flight included.

        Of a text that is only scored the last token is left out, since its logits score nothing.
        """
        return len(self.token_ids) + self.num_in_flight - self.last_is_spare

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def max_cached_tokens(self) -> int:
        """The longest prefix that may come from the cache: the logits that are needed must still be computed."""
        if self.score_from is not None and self.num_scored < self.num_to_score:
            return self.score_from - 1 + self.num_scored
        return self.num_tokens - 1

    @property
    def num_to_score(self) -> int:
        """Positions to score in all; `logits` include those after the last prompt token."""
        if self.score_from is None:
            return 0
        return self.num_prompt_tokens - self.score_from + (self.score_kind == "logits")

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        self.status = Status.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.finished = time.monotonic()

    def metrics(self) -> RequestMetrics:
        return RequestMetrics(
            arrival=self.arrival,
            scheduled=self.scheduled,
            first_token=self.first_token,
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            num_drafted_tokens=self.num_drafted,
            num_accepted_tokens=self.num_accepted,
            num_swaps=self.num_swaps,
        )


class ScheduledRequest(NamedTuple):
    """The work of one step on one request: compute tokens `start` .. `start + num_tokens - 1`.

    Attributes:
        block_table: the request's KV blocks in order; covers the computed tokens.
        sample: the last of these tokens is the request's last, so the next one is to be sampled.
        padding: a finished row of a static batch, computed and thrown away.
        draft: what the last of these tokens are, beyond the request's own: they are verified.
    """

    request: Request
    start: int
    num_tokens: int
    block_table: list[int]
    sample: bool
    padding: bool = False
    draft: Draft = NO_DRAFT


_new = tuple.__new__


def decode(request: Request, start: int) -> ScheduledRequest:
    """The work on one token, without a draft. Every token of every request takes it, and a tuple is made four times as
    fast without its class's own constructor."""
    return _new(ScheduledRequest, (request, start, 1, request.block_table, request.generate, False, NO_DRAFT))


class StepResult(NamedTuple):
    """What the executor gives for one ScheduledRequest: the sampled token, its logprobs, scores of prompt positions.

    `error` says why the request ends without a token; logits that come with it are not all finite. `accepted` counts
    the tokens of the work's draft that come before the sampled one, `accepted_logprobs` are theirs.
    """

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_scores: tuple[Any, ...] = ()
    num_scored: int = 0
    error: str | None = None
    accepted: int = 0
    accepted_logprobs: tuple[TokenLogprobs | None, ...] = ()
