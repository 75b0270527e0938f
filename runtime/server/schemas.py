"""Requests and responses of the OpenAI API (platform.openai.com/docs/api-reference), with vLLM's sampling extensions.

Fields that would change the answer and that the engine cannot honour are refused by name; any other unknown field
is accepted and has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, field_validator, model_validator

from qtool.runtime.engine.params import MAX_TEMPERATURE, SamplingParams
from qtool.runtime.server.beams import BeamFields
from qtool.runtime.server.structured import FormFields

# Field → the values that change nothing; any other value is refused.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "echo": (False,),  # of a chat; completions have it
    "logits_processors": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}

MAX_TOKEN_ID = 2**31 - 1  # of any vocabulary; tokenizers fail on numbers beyond 32 bits

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
TokenIds = list[Annotated[StrictInt, Field(ge=0, le=MAX_TOKEN_ID)]]
Prompt = str | TokenIds


def _split_prompts(value: Any) -> list[Any]:
    """One prompt or many → the list of prompts, each a string or a list of token ids."""
    shape = "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{shape}, not empty")

    def is_ids(item: Any) -> bool:
        return isinstance(item, list) and all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in item)

    if is_ids(value):
        return [value]
    if all(isinstance(item, str) for item in value) or all(map(is_ids, value)):
        return value
    raise ValueError(shape)


class ApiModel(BaseModel):
    """A request body: unknown fields are kept aside and ignored."""

    model_config = ConfigDict(extra="allow")


class StreamOptions(ApiModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingRequest(FormFields, BeamFields, ApiModel):
    """What completions and chat completions share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=128)
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: list[Annotated[str, Field(min_length=1, max_length=1024)]] | None = Field(None, max_length=64)
    stop_token_ids: TokenIds | None = Field(None, max_length=1024)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    priority: int | None = Field(None, ge=-100, le=100)
    best_of: int | None = Field(None, ge=1, le=128)
    typical_p: float | None = Field(None, gt=0, le=1)
    dynatemp_range: float | None = Field(None, ge=0, allow_inf_nan=False)
    dynatemp_exponent: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    allowed_token_ids: TokenIds | None = Field(None, min_length=1)
    bad_words: list[Annotated[str, Field(min_length=1, max_length=1024)]] | None = Field(None, max_length=256)

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [value] if value else None
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options may be given only with stream=true")
        if self.stream and self.use_beam_search:
            raise ValueError("use_beam_search does not go with stream=true: the best are known at the end")
        if not self.use_beam_search and self.length_penalty not in (None, 1.0):
            raise ValueError("length_penalty is for use_beam_search=true alone")
        if self.stream and self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of must be n with stream=true: the best are known when all have ended")
        return self

    @property
    def num_outputs(self) -> int:
        """Outputs to generate of each prompt."""
        return self.best_of or self.n or 1

    def unsupported(self) -> str | None:
        """The name of a field that asks for what the engine cannot do, or None."""
        for name, value in (self.model_extra or {}).items():
            if name in UNSUPPORTED and value is not None and value not in UNSUPPORTED[name]:
                return name
        return None

    def sampling_params(
        self, max_tokens: int, *, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        """The engine's parameters; a field left out or null takes the API's default.

        Raises:
            QtoolError: a value or a combination out of range.
        """
        given = {
            name: getattr(self, name)
            for name in (
                "n",
                "temperature",
                "top_p",
                "min_p",
                "repetition_penalty",
                "presence_penalty",
                "frequency_penalty",
                "seed",
                "stop",
                "stop_token_ids",
                "min_tokens",
                "ignore_eos",
                "priority",
                "best_of",
                "typical_p",
                "dynatemp_range",
                "dynatemp_exponent",
                "logit_bias",
                "allowed_token_ids",
                "bad_words",
            )
            if getattr(self, name) is not None
        }
        form = self.form()
        if form is not None:
            given["structured_outputs"] = form[1]
        top_k = max(self.top_k or 0, 0)  # vLLM writes "keep all" as -1 as well
        return SamplingParams(
            max_tokens=max_tokens, top_k=top_k, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **given
        )


class CompletionRequest(SamplingRequest):
    prompt: Annotated[list[Prompt], BeforeValidator(_split_prompts), Field(max_length=2048)]
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None

    @model_validator(mode="after")
    def _no_tokens_needs_echo(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1 unless echo is true")
        return self


class TextPart(ApiModel):
    type: Literal["text"]
    text: str


class ChatMessage(ApiModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    @field_validator("content", mode="before")
    @classmethod
    def _text_alone(cls, value: Any) -> Any:
        if isinstance(value, list):
            for part in value:
                kind = part.get("type") if isinstance(part, dict) else None
                if isinstance(kind, str) and kind != "text":
                    raise ValueError(f"content parts of type {kind[:40]!r} are not supported, text alone is")
        return value

    def for_template(self) -> dict[str, str]:
        """The message as chat templates expect it: `developer` is the newer name of `system`."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(SamplingRequest):
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Tokens that speculation proposed: those that became part of the answer, and those that did not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CompletionLogprobs(BaseModel):
    """Parallel lists over the tokens; the first token of an echoed prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class Completion(BaseModel):
    """A whole completion, or one chunk of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]


class ChatText(BaseModel):
    """A message, or the part of it that one chunk adds; the role is in the first chunk alone."""

    role: Literal["assistant"] | None = None
    content: str


class ChatChoice(BaseModel):
    index: int
    message: ChatText
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatText
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None


class ChatCompletionChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["qtool"] = "qtool"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
