"""What a client asks for (SamplingParams) and what it gets (RequestOutput). No torch here."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from qtool.quant.errors import QtoolError
from qtool.runtime.engine.structured_output import StructuredOutputsParams as StructuredOutputsParams

MAX_LOGPROBS = 1024
"""Most likeliest tokens that a request may ask for at each position; the server allows fewer."""

MAX_TEMPERATURE = 1e6
"""All tokens are about as likely there; logits over numbers beyond float32's range would be none."""

FAILURES = frozenset({"error", "refused"})
"""The finish_reasons of outputs that are no answer."""


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _is_ids(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str) and all(map(_is_int, value))


def _is_strings(value: object) -> bool:
    if isinstance(value, str) or not isinstance(value, Collection):
        return False
    return all(isinstance(text, str) and text for text in value)


_NUMBERS = (
    "temperature", "top_p", "min_p", "typical_p", "dynatemp_range", "dynatemp_exponent", "repetition_penalty",
    "presence_penalty", "frequency_penalty",
)  # fmt: skip


@dataclass(frozen=True)
class SamplingParams:
    """How the next tokens of one request are chosen. Names and meanings follow vLLM and the OpenAI API.

    Attributes:
        max_tokens: most tokens to generate, ≥ 1.
        temperature: in [0, 10⁶]; 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set with this much probability, in (0, 1].
        min_p: drop tokens below this share of the likeliest one's probability, in [0, 1].
        typical_p: keep the tokens whose surprise is nearest to the entropy, with this much probability, in (0, 1]
            (locally typical sampling, Meister et al. 2022, arXiv 2202.00666).
        dynatemp_range, dynatemp_exponent: draw at a temperature between `temperature` ± this range: the exponent-th
            power of the share of the greatest possible entropy says where (as in llama.cpp). 0: the same one always.
        repetition_penalty: in [0.01, 100]; 1 is none (prompt and output tokens).
        presence_penalty, frequency_penalty: in [-2, 2]; over output tokens.
        logit_bias: token id → what is added to its logit, in [-100, 100].
        allowed_token_ids: no token but these; None: all.
        bad_words: texts that the output must not contain, each as the tokenizer writes it, alone and after a space.
        seed: the request's own random stream, or None.
        stop: strings that end the output and are not part of it.
        stop_token_ids: token ids that end the output.
        min_tokens: no end before this many tokens.
        ignore_eos: go on past the end-of-sequence token.
        logprobs: log-probabilities of this many likeliest tokens beside the chosen one (0: the chosen one alone); raw
            distribution, before temperature and penalties. None: none.
        prompt_logprobs: likewise for the prompt's tokens.
        n: independent outputs of one prompt.
        best_of: outputs to generate, of which those `n` with the highest mean log-probability of a token are given.
            None: `n` of them.
        priority: in [-100, 100]; the lower, the sooner, where the engine schedules by priority.
        structured_outputs: the form that the whole output has; it ends as soon as nothing can follow. It goes before
            `min_tokens` and `ignore_eos`. None: any text.

    Bans (`bad_words`, and ends before `min_tokens`) do not count where they would leave no token.

    Raises:
        QtoolError: a value out of range, named.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    priority: int = 0
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, what: str) -> None:
            if not ok:
                raise QtoolError(f"{name} must be {what}, got {getattr(self, name)!r}")

        for name in ("max_tokens", "top_k", "min_tokens", "n", "priority"):
            need(_is_int(getattr(self, name)), name, "an integer")
        for name in ("seed", "logprobs", "prompt_logprobs", "best_of"):
            need(getattr(self, name) is None or _is_int(getattr(self, name)), name, "an integer or None")
        for name in _NUMBERS:
            need(_is_finite(getattr(self, name)), name, "a finite number")
        need(self.max_tokens >= 1, "max_tokens", "at least 1")
        need(0 <= self.temperature <= MAX_TEMPERATURE, "temperature", f"in [0, {MAX_TEMPERATURE:.0f}]")
        need(self.top_k >= 0, "top_k", "at least 0 (0 keeps all tokens)")
        need(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        need(0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        need(0 < self.typical_p <= 1, "typical_p", "in (0, 1]")
        need(0 <= self.dynatemp_range <= self.temperature, "dynatemp_range", "between 0 and the temperature")
        need(0 < self.dynatemp_exponent <= 100, "dynatemp_exponent", "in (0, 100]")
        need(0.01 <= self.repetition_penalty <= 100, "repetition_penalty", "in [0.01, 100]")
        need(-2 <= self.presence_penalty <= 2, "presence_penalty", "in [-2, 2]")
        need(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]")
        need(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "between 0 and max_tokens")
        most = f"between 0 and {MAX_LOGPROBS}"
        need(self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", most)
        need(self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS, "prompt_logprobs", most)
        need(1 <= self.n <= 128, "n", "between 1 and 128")
        need(self.best_of is None or self.n <= self.best_of <= 128, "best_of", f"between n, which is {self.n}, and 128")
        need(-100 <= self.priority <= 100, "priority", "between -100 and 100")
        for name in ("stop", "bad_words"):
            need(_is_strings(getattr(self, name)), name, "a sequence of non-empty strings")
        need(_is_ids(self.stop_token_ids), "stop_token_ids", "a sequence of token ids")
        allowed = self.allowed_token_ids
        need(allowed is None or (_is_ids(allowed) and bool(allowed)), "allowed_token_ids", "a sequence of token ids")
        form = self.structured_outputs
        need(form is None or isinstance(form, StructuredOutputsParams), "structured_outputs", "StructuredOutputsParams")
        if form is not None and allowed is not None:
            raise QtoolError("structured_outputs and allowed_token_ids do not go together: they may leave no token")
        bias = self.logit_bias
        biases = isinstance(bias, Mapping) and _is_ids(bias.keys())
        biases = biases and all(_is_finite(value) and -100 <= value <= 100 for value in bias.values())
        need(biases, "logit_bias", "a mapping from token ids to numbers between -100 and 100")

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def greedy_argmax(self) -> bool:
        """The next token is the likeliest one of the raw logits, and nothing but its id is wanted."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        steered = self.logit_bias or self.bad_words or self.allowed_token_ids is not None or self.min_tokens > 0
        steered = steered or self.structured_outputs is not None
        return self.greedy and not penalties and not steered and self.logprobs is None


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position: the chosen token's, its rank (1 is likeliest), and the likeliest tokens'."""

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RequestMetrics:
    """Moments of a request's life, in seconds of `time.monotonic()`; None: not reached.

    num_drafted_tokens, num_accepted_tokens: proposed by speculation, and those of them that became output.
    num_preemptions, num_swaps: times that it made room for others, and those of them in which its KV blocks were kept
    in host memory, not computed again.
    """

    arrival: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_swaps: int = 0


NOT_FINITE = "the model computed NaN or infinity: its weights are damaged, or too large for its dtype"
"""How the stop_reason begins of an output that ends with that error."""


@dataclass(frozen=True)
class CompletionOutput:
    """One output of a request so far.

    finish_reason: None while it runs, else `stop`, `length`, `abort`, `error` (what went wrong is the stop_reason), or
    `refused` (what the client must ask for instead is the stop_reason).
    cumulative_logprob: sum of its tokens' log-probabilities, of a beam search.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """All there is of a request so far (cumulative, not a delta)."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
