"""Beam search over token sequences: which to score next, and which are the best. Knows no engine and no torch.

The rules are those of transformers' `generate(num_beams=W)` (its `_beam_search`). Of all continuations of the W beams
the (1 + E)·W likeliest are looked at, E being the number of end-of-sequence tokens. Those of the first W that end are
candidates for the answer, by their log-probability over length ** length_penalty; the best W that do not end are the
next beams. The search ends at `max_tokens`, or when W candidates are there and no beam, by its present score, is better
than the worst of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qtool.quant.errors import QtoolError
from qtool.runtime.detokenizer import Detokenizer
from qtool.runtime.engine.params import (
    MAX_LOGPROBS,
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)


@dataclass(frozen=True)
class BeamSearchParams:
    """How one prompt is searched. Names follow vLLM and transformers.

    Attributes:
        beam_width: beams, and outputs, in [1, 128].
        max_tokens: most tokens to generate, ≥ 1.
        length_penalty: the score is log-probability / length ** length_penalty; above 0 favours long outputs.
        early_stopping: end as soon as `beam_width` outputs are complete.
        ignore_eos: no output ends before `max_tokens`.
        logprobs: as in SamplingParams.

    Raises:
        QtoolError: a value out of range, named.
    """

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, what: str) -> None:
            if not ok:
                raise QtoolError(f"{name} must be {what}, got {getattr(self, name)!r}")

        def whole(value: object) -> bool:
            return isinstance(value, int) and not isinstance(value, bool)

        need(whole(self.beam_width) and 1 <= self.beam_width <= 128, "beam_width", "between 1 and 128")
        need(whole(self.max_tokens) and self.max_tokens >= 1, "max_tokens", "an integer of at least 1")
        penalty = self.length_penalty
        number = isinstance(penalty, int | float) and not isinstance(penalty, bool)
        need(number and -10 <= penalty <= 10, "length_penalty", "between -10 and 10")
        need(
            self.logprobs is None or (whole(self.logprobs) and 0 <= self.logprobs <= 20), "logprobs", "0 to 20 or None"
        )


@dataclass(frozen=True)
class _Beam:
    """A continuation of the prompt. `total`: sum of its tokens' log-probabilities."""

    token_ids: tuple[int, ...] = ()
    total: float = 0.0
    logprobs: tuple[TokenLogprobs, ...] = ()
    ended: bool = False  # by an end-of-sequence token


@dataclass
class BeamSearch:
    """The search for one prompt. Score what `sequences` gives, tell `advance`, until `done`.

    Attributes:
        eos_token_ids: the tokens that end an output.
    """

    prompt: Sequence[int]
    params: BeamSearchParams
    eos_token_ids: Collection[int]
    done: bool = False
    _beams: list[_Beam] = field(default_factory=lambda: [_Beam()])
    _complete: list[tuple[float, _Beam]] = field(default_factory=list)  # the best so far, best first

    def __post_init__(self) -> None:
        if self.params.ignore_eos:
            self.eos_token_ids = ()
        if self.num_candidates > MAX_LOGPROBS:
            raise QtoolError(
                f"beam_width {self.params.beam_width} with {len(self.eos_token_ids)} end-of-sequence tokens needs "
                f"{self.num_candidates} candidates a beam, at most {MAX_LOGPROBS} are possible"
            )

    @property
    def num_candidates(self) -> int:
        """How many of the likeliest next tokens of a sequence have to be known."""
        return max(2, 1 + len(self.eos_token_ids)) * self.params.beam_width

    @property
    def sequences(self) -> list[list[int]]:
        """Prompt and output so far of each beam."""
        return [[*self.prompt, *beam.token_ids] for beam in self._beams]

    def sampling_params(self) -> SamplingParams:
        """With which an engine scores `sequences`: one token each, of which the likeliest alternatives are wanted."""
        return SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=self.num_candidates)

    def advance(self, scores: Sequence[TokenLogprobs]) -> None:
        """Enter the next tokens of the sequences: `scores[i].top` are the `num_candidates` likeliest after the i-th."""
        width, length = self.params.beam_width, len(self._beams[0].token_ids) + 1
        found = [
            (beam.total + logprob, beam, token, score)
            for beam, score in zip(self._beams, scores, strict=True)
            for token, logprob in score.top.items()
        ]
        found.sort(key=lambda item: -item[0])
        last = length == self.params.max_tokens
        beams: list[_Beam] = []
        for place, (total, beam, token, score) in enumerate(found[: self.num_candidates]):
            ended = token in self.eos_token_ids
            if (last or ended) and place < width:
                grown = self._grow(beam, token, total, score, ended)
                self._complete.append((total / length**self.params.length_penalty, grown))
            elif not (last or ended) and len(beams) < width:
                beams.append(self._grow(beam, token, total, score, False))
        self._complete.sort(key=lambda item: -item[0])
        del self._complete[width:]
        self._beams = beams
        self.done = last or self._nothing_better(length)

    def _nothing_better(self, length: int) -> bool:
        if len(self._complete) < self.params.beam_width:
            return not self._beams
        if self.params.early_stopping or not self._beams:
            return True
        return bool(self._beams[0].total / length**self.params.length_penalty <= self._complete[-1][0])

    def _grow(self, beam: _Beam, token: int, total: float, score: TokenLogprobs, ended: bool) -> _Beam:
        logprobs = beam.logprobs
        if self.params.logprobs is not None:
            ranked = list(score.top)
            top = {t: score.top[t] for t in ranked[: self.params.logprobs]}
            logprobs = (*logprobs, TokenLogprobs(token, score.top[token], ranked.index(token) + 1, top))
        return _Beam((*beam.token_ids, token), total, logprobs, ended)

    def output(self, request_id: str, tokenizer: Any, metrics: RequestMetrics) -> RequestOutput:
        """The `beam_width` best outputs, best first, once the search is done."""
        outputs = []
        for index, (_, beam) in enumerate(self._complete):
            text = Detokenizer(tokenizer, self.prompt)
            for token in beam.token_ids[: len(beam.token_ids) - beam.ended]:
                text.append(token)
            outputs.append(
                CompletionOutput(
                    index=index,
                    text=text.finish(),
                    token_ids=beam.token_ids,
                    logprobs=beam.logprobs if self.params.logprobs is not None else None,
                    finish_reason="stop" if beam.ended else "length",
                    stop_reason=beam.token_ids[-1] if beam.ended else None,
                    cumulative_logprob=beam.total,
                )
            )
        return RequestOutput(request_id, tuple(self.prompt), tuple(outputs), True, metrics)


def joined(first: RequestMetrics, last: RequestMetrics) -> RequestMetrics:
    """Moments of a search whose steps began with `first` and ended with `last`."""
    return replace(first, finished=last.finished)
