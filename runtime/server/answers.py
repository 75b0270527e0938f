"""From the engine's cumulative outputs to OpenAI's answers: the whole of it, or the chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from qtool.runtime.engine.params import CompletionOutput, RequestOutput, TokenLogprobs
from qtool.runtime.server.schemas import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatText,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from qtool.runtime.server.token_text import TokenText, chat_logprobs, completion_logprobs


class Answer(Protocol):
    """How one kind of request is answered; keeps what a stream has sent so far."""

    id: str

    def whole(self, outputs: Sequence[RequestOutput]) -> Completion | ChatCompletion:
        """The answer from the finished outputs, one per prompt."""

    def chunks(self, position: int, output: RequestOutput) -> Iterator[Completion | ChatCompletionChunk]:
        """What the newest output of the prompt at `position` adds to the stream."""

    def usage_chunk(self, usage: Usage) -> Completion | ChatCompletionChunk:
        """The last chunk of a stream, without choices."""


def usage_of(outputs: Iterable[RequestOutput]) -> Usage:
    """The tokens of all prompts of one body; a prompt counts once, however many outputs it has."""
    prompt = output_tokens = cached = drafted = accepted = 0
    for output in outputs:
        prompt += len(output.prompt_token_ids)
        cached += output.metrics.num_cached_tokens
        drafted += output.metrics.num_drafted_tokens
        accepted += output.metrics.num_accepted_tokens
        output_tokens += sum(len(choice.token_ids) for choice in output.outputs)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=output_tokens,
        total_tokens=prompt + output_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=accepted, rejected_prediction_tokens=drafted - accepted
        ),
    )


@dataclass
class Progress:
    """What a stream has sent of one choice."""

    chars: int = 0
    tokens: int = 0
    started: bool = False
    done: bool = False

    def advance(self, text: str, num_tokens: int, finished: bool) -> tuple[str, int] | None:
        """The text to send and the first token to show with it, or None where there is nothing to send yet.

        Log-probabilities wait for their text: tokens whose text is held back (half a character, the beginning of a
        stop string) are shown with the next piece.
        """
        if self.done or (len(text) == self.chars and not finished):
            return None
        piece, first = text[self.chars :], self.tokens
        self.chars, self.tokens, self.started, self.done = len(text), num_tokens, True, finished
        return piece, first


@dataclass
class CompletionAnswer:
    """Answers of /v1/completions. Choices are numbered prompt by prompt: index = prompt · n + output.

    Args:
        logprobs: how many likeliest tokens to show; None: no log-probabilities.
        echoes: the text in front of the output of each prompt, empty without echo.
        echo: the prompt is part of the answer.
    """

    id: str
    created: int
    model: str
    token_text: TokenText
    logprobs: int | None
    echoes: tuple[str, ...]
    echo: bool
    outputs_per_prompt: int
    _progress: dict[int, Progress] = field(default_factory=dict)

    def whole(self, outputs: Sequence[RequestOutput]) -> Completion:
        choices = [
            self._choice(position, output, choice, self.echoes[position] + choice.text, 0)
            for position, output in enumerate(outputs)
            for choice in output.outputs
        ]
        return self._completion(choices, usage_of(outputs))

    def chunks(self, position: int, output: RequestOutput) -> Iterator[Completion]:
        for choice in output.outputs:
            progress = self._progress.setdefault(position * self.outputs_per_prompt + choice.index, Progress())
            num_tokens = len(choice.token_ids) + (len(output.prompt_token_ids) if self.echo else 0)
            text = self.echoes[position] + choice.text
            if (step := progress.advance(text, num_tokens, choice.finish_reason is not None)) is not None:
                piece, first = step
                yield self._completion([self._choice(position, output, choice, piece, first)])

    def usage_chunk(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        body = Completion(id=self.id, object="text_completion", created=self.created, model=self.model, choices=choices)
        if usage is not None:
            body.usage = usage
        return body

    def _choice(
        self, position: int, output: RequestOutput, choice: CompletionOutput, text: str, first: int
    ) -> CompletionChoice:
        shown: CompletionLogprobs | None = None
        if self.logprobs is not None:
            ids, entries = choice.token_ids, tuple[TokenLogprobs | None, ...](choice.logprobs or ())
            if self.echo:
                ids, entries = output.prompt_token_ids + ids, (output.prompt_logprobs or ()) + entries
            shown = completion_logprobs(self.token_text, ids, entries, self.logprobs, first)
        return CompletionChoice(
            index=position * self.outputs_per_prompt + choice.index,
            text=text,
            logprobs=shown,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )


@dataclass
class ChatAnswer:
    """Answers of /v1/chat/completions: one prompt, choices numbered by output.

    Args:
        top_logprobs: how many likeliest tokens to show beside the chosen one; None: no log-probabilities.
    """

    id: str
    created: int
    model: str
    token_text: TokenText
    top_logprobs: int | None
    _progress: dict[int, Progress] = field(default_factory=dict)

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=choice.index,
                message=ChatText(role="assistant", content=choice.text),
                logprobs=self._logprobs(choice, 0),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
            for choice in outputs[0].outputs
        ]
        return ChatCompletion(
            id=self.id,
            object="chat.completion",
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage_of(outputs),
        )

    def chunks(self, position: int, output: RequestOutput) -> Iterator[ChatCompletionChunk]:
        for choice in output.outputs:
            progress = self._progress.setdefault(choice.index, Progress())
            opening = not progress.started
            step = progress.advance(choice.text, len(choice.token_ids), choice.finish_reason is not None)
            if step is None:
                continue
            piece, first = step
            yield self._chunk(
                [
                    ChatChunkChoice(
                        index=choice.index,
                        delta=ChatText(role="assistant", content=piece) if opening else ChatText(content=piece),
                        logprobs=self._logprobs(choice, first),
                        finish_reason=choice.finish_reason,
                        stop_reason=choice.stop_reason,
                    )
                ]
            )

    def usage_chunk(self, usage: Usage) -> ChatCompletionChunk:
        chunk = self._chunk([])
        chunk.usage = usage
        return chunk

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.id, object="chat.completion.chunk", created=self.created, model=self.model, choices=choices
        )

    def _logprobs(self, choice: CompletionOutput, first: int) -> ChatLogprobs | None:
        if self.top_logprobs is None:
            return None
        return chat_logprobs(self.token_text, (choice.logprobs or ())[first:], self.top_logprobs)
