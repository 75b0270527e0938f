"""From the engine's token ids to a client's outputs: text, stop strings, the best of several. Knows no engine.

The engine's loop deals in token ids alone; this is the rest, and runs where it does not hold up the loop: inside
LLMEngine.step when the engine is used directly, in the server's process when the engine has one of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from qtool.runtime.detokenizer import Detokenizer, Tokenizer
from qtool.runtime.engine.params import (
    FAILURES,
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from qtool.runtime.engine.updates import OutputUpdate, RequestUpdate, StopFound


@dataclass
class _Output:
    """One output so far; `text` is None for a request that is scored, not continued."""

    text: Detokenizer | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def advance(self, update: OutputUpdate, min_tokens: int) -> str | None:
        """Take the news; the stop string where one is complete and the engine goes on for all it knows."""
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason
        ended_by = update.stop_reason if isinstance(update.stop_reason, int) else None
        logprobs = update.logprobs or []
        for i, token in enumerate(update.token_ids):
            self.token_ids.append(token)
            self.logprobs += logprobs[i : i + 1]
            if token == ended_by and i == len(update.token_ids) - 1:
                break  # the token that ends the output is no text
            check = len(self.token_ids) > min_tokens
            if self.text is not None and self.text.append(token, check_stop=check):
                break  # a step may have brought more than the stop string needed
        text = self.text
        if text is None:
            return None
        if update.finish_reason not in (None, *FAILURES):
            text.finish(check_stop=len(self.token_ids) > min_tokens)
        if text.stop_reason is None:
            return None
        self.finish_reason, self.stop_reason = "stop", text.stop_reason
        return text.stop_reason if update.finish_reason is None else None

    @property
    def mean_logprob(self) -> float:
        if self.finish_reason in FAILURES or not self.logprobs:
            return -math.inf
        return sum(entry.logprob for entry in self.logprobs) / len(self.logprobs)


@dataclass
class _Entry:
    """A client's request: its outputs, `n` or `best_of` of them."""

    prompt: tuple[int, ...]
    params: SamplingParams
    outputs: list[_Output]
    prompt_logprobs: tuple[TokenLogprobs | None, ...]
    metrics: RequestMetrics | None = None

    def advance(self, update: RequestUpdate) -> list[StopFound]:
        if update.metrics is not None:
            self.metrics = update.metrics
        self.prompt_logprobs += tuple(update.prompt_logprobs or ())
        found = []
        for news in update.outputs:
            output = self.outputs[news.output_index]
            if output.finish_reason is None:  # else a stop string ended it, and the engine heard of it too late
                stop = output.advance(news, self.params.min_tokens)
                if stop is not None:
                    found.append(StopFound(update.request_id, news.output_index, stop))
        if self.finished and self.metrics is not None and self.metrics.finished is None:
            self.metrics = replace(self.metrics, finished=time.monotonic())
        return found

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)

    @property
    def to_show(self) -> bool:
        """Which of several are the best is known at the end."""
        return self.finished or len(self.outputs) == self.params.n

    def result(self, request_id: str) -> RequestOutput:
        assert self.metrics is not None, "a request's first update has metrics"
        shown = self.outputs
        if len(shown) != self.params.n:
            shown = sorted(shown, key=lambda output: output.mean_logprob, reverse=True)[: self.params.n]
        return RequestOutput(
            request_id=request_id,
            prompt_token_ids=self.prompt,
            outputs=tuple(
                CompletionOutput(
                    index=i,
                    text=output.text.text if output.text is not None else "",
                    token_ids=tuple(output.token_ids),
                    logprobs=None if self.params.logprobs is None else tuple(output.logprobs),
                    finish_reason=output.finish_reason,
                    stop_reason=output.stop_reason,
                )
                for i, output in enumerate(shown)
            ),
            finished=self.finished,
            metrics=self.metrics,
            prompt_logprobs=None if self.params.prompt_logprobs is None else self.prompt_logprobs,
        )


class OutputProcessor:
    """The requests that run, and their outputs so far. Not to be used from two threads at once.

    Args:
        tokenizer: anything with `decode(ids, skip_special_tokens)`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._entries: dict[str, _Entry] = {}

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams, *, generate: bool = True) -> None:
        """Expect updates of a request; `generate=False`: it is only scored."""
        outputs = [
            _Output(Detokenizer(self._tokenizer, prompt, params.stop) if generate else None)
            for _ in range(params.best_of or params.n)
        ]
        self._entries[request_id] = _Entry(tuple(prompt), params, outputs, (None,))

    def drop(self, request_id: str) -> None:
        """Forget a request; what still comes of it is passed over."""
        self._entries.pop(request_id, None)

    def process(self, updates: Iterable[RequestUpdate]) -> tuple[list[RequestOutput], list[StopFound]]:
        """An output for every request with something to show, and what the engine is to end. Updates of requests that
        were never added, or have ended, are passed over."""
        outputs, stops = [], []
        for update in updates:
            entry = self._entries.get(update.request_id)
            if entry is None:
                continue
            stops += entry.advance(update)
            if entry.to_show:
                outputs.append(entry.result(update.request_id))
            if entry.finished:
                del self._entries[update.request_id]
        return outputs, stops
