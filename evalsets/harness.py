"""lm-eval's model class over our own runtime.

Importing this module registers the class as `qtool` in lm-eval's registry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from qtool.quant.device import resolve_device
from qtool.quant.documents import load_tokenizer
from qtool.quant.errors import QtoolError
from qtool.quant.hub import resolve_model
from qtool.quant.progress import ProgressFn, silent
from qtool.runtime.engine.params import RequestOutput, SamplingParams

MAX_GEN_TOKENS = 256  # lm-eval's own default
CPU_BLOCK = 1  # token: contexts are shared in whole blocks, and most of the work are short questions
GENERATED_AT_ONCE = 128  # prompts, so that progress is seen


class Scored(Protocol):
    """Log-probabilities of one continuation, and whether greedy decoding would have given it."""

    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def greedy(self) -> bool: ...


@dataclass(frozen=True)
class Generated:
    """One output: its text, and its token ids (the end-of-sequence token included where it came).

    `broken`: it ends where the model computed NaN or infinity.
    """

    text: str
    tokens: tuple[int, ...]
    broken: bool = False

    @classmethod
    def of(cls, output: RequestOutput) -> Generated:
        """The only output of a request of which broken ones are kept."""
        (one,) = output.outputs
        return cls(one.text, tuple(one.token_ids), one.finish_reason == "error")


class Served(Protocol):
    """What evaluation asks of a model that is served: `qtool.runtime.llm.LLM`, or anything that answers alike."""

    @property
    def max_model_len(self) -> int: ...
    def loglikelihood(
        self,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        keep_broken: bool = False,
        progress: ProgressFn = silent,
    ) -> Sequence[Scored]: ...
    def prompt_logits(self, sequences: Sequence[Sequence[int]], *, keep_broken: bool = False) -> Iterator[Tensor]: ...
    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, keep_broken: bool = False
    ) -> Sequence[RequestOutput]: ...


def serve(folder: Path, *, device: str = "auto", **engine_args: Any) -> Served:
    """The runtime over a model folder, with KV blocks that are small on a CPU. Raises QtoolError as LLMEngine."""
    from qtool.runtime.llm import LLM

    if resolve_device(device).type == "cpu":
        engine_args.setdefault("block_size", CPU_BLOCK)
    llm: Served = LLM(folder, device=device, **engine_args)
    return llm


@register_model("qtool")
class QtoolLM(TemplateLM):  # type: ignore[misc]  # lm-eval carries no types
    """lm-eval's model interface over our runtime, with lm-eval's conventions for tokens.

    Strings are encoded as lm-eval's Hugging Face class encodes them: context and continuation together, split at the
    context's length; an empty context becomes the BOS token (EOS where there is none), and so does one of spaces alone,
    which move over to the continuation. The engine batches by itself.

    Args:
        pretrained: MODEL (folder, hub id or built-in name), loaded by the runtime; or
        served: a model that already runs, with `tokenizer`.
        add_bos_token: put the BOS token before every string; None leaves it to the tokenizer.
        batch_size, max_batch_size: accepted because lm-eval passes them; the engine needs none.
        keep_broken: go on where the model computes NaN or infinity; `broken` then tells what was hit.
        engine_args: passed to the runtime.

    Raises:
        QtoolError: neither or both of `pretrained` and `served`; a model that does not load.

    Attributes:
        broken: (task, number of the document) of requests of lm-eval whose answers are no finite numbers: likelihoods
            are NaN, outputs end there.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        served: Served | None = None,
        tokenizer: Any = None,
        add_bos_token: bool | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        keep_broken: bool = False,
        progress: ProgressFn = silent,
        **engine_args: Any,
    ) -> None:
        super().__init__()
        if (pretrained is None) == (served is None):
            raise QtoolError("lm-eval model qtool: pass pretrained=MODEL (or a served model, from Python)")
        if served is None:
            folder = resolve_model(str(pretrained))
            served, tokenizer = serve(folder, **engine_args), load_tokenizer(folder)
        self.served: Served = served
        self.tokenizer = tokenizer
        self.add_bos_token = add_bos_token
        self.progress = progress
        self.keep_broken = keep_broken
        self.broken: set[tuple[str | None, int | None]] = set()

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        return self.served.max_model_len

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            special = False  # the text brings its own BOS
        flags = {} if special is None else {"add_special_tokens": special}
        ids: list[int] = self.tokenizer.encode(string, **flags)
        return ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(text)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Summed log-likelihood of each continuation and whether it is greedy; our progress instead of lm-eval's."""
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        self._remember(requests, [not math.isfinite(total) for total, _ in scores])
        return scores

    def _remember(self, requests: Sequence[Instance], broken: Sequence[bool]) -> None:
        self.broken |= {(r.task_name, r.doc_id) for r, hit in zip(requests, broken, strict=True) if hit}

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        for (before, text), _, continuation in requests:
            where = f"the choice {text[:60]!r} after {before[-60:]!r}"
            if not continuation:
                raise QtoolError(f"{where} adds no token to its context, so it has no likelihood")
            if len(continuation) > self.max_length:
                size = f"{len(continuation)} tokens, but the model takes {self.max_length}"
                raise QtoolError(f"{where} is too long: {size}")
        results = self._score(pairs)
        for (strings, _, _), result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", strings, result)
        return results

    def _score(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Summed log-likelihood and greediness per pair; contexts too long for the model lose their beginning, and one
        whose spaces went to the continuation, so that none is left, begins as an empty text does.

        As in lm-eval's Hugging Face class the last token, which is scored but no input, does not count for the length.
        """
        most = self.max_length + 1
        started = [(context or [self.prefix_token_id], cont) for context, cont in pairs]
        fitted = [(context[max(0, len(context) + len(cont) - most) :], cont) for context, cont in started]

        def relay(_: str, done: int, total: int) -> None:
            self.progress("likelihoods", done, total)

        scores = self.served.loglikelihood(fitted, keep_broken=self.keep_broken, progress=relay)
        return [(math.fsum(s.logprobs), s.greedy) for s in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole strings in windows of the full context, every token predicted once."""
        pairs: list[tuple[list[int], list[int]]] = []
        counts: list[int] = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [make_disjoint_window(window) for window in windows]
            pairs += own
            counts.append(len(own))
        scores = iter(self._score(pairs))
        totals = [math.fsum(next(scores)[0] for _ in range(count)) for count in counts]
        self._remember(requests, [not math.isfinite(total) for total in totals])
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context until a stop string, the end-of-sequence token or `max_gen_toks`; greedy by default."""
        contexts: list[str] = []
        params: list[SamplingParams] = []
        for request in requests:
            context, options = request.args
            sampling = _sampling(options)
            contexts.append(context)
            params.append(sampling)
        outputs = self.generate(contexts, params)
        self._remember(requests, [output.broken for output in outputs])
        texts = [output.text for output in outputs]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def generate(self, contexts: Sequence[str], params: Sequence[SamplingParams]) -> list[Generated]:
        """Continue each context; one that leaves no room for `max_tokens` loses its beginning.

        Raises:
            QtoolError: before anything is generated: `max_tokens` takes the model's whole context.
        """
        for own in params:
            if own.max_tokens >= self.max_length:
                raise QtoolError(
                    f"{own.max_tokens} tokens of output leave no room for a prompt in the model's {self.max_length}; "
                    "ask for fewer (max_tokens, or lm-eval's max_gen_toks)"
                )
        started = [self.tok_encode(c) or [self.prefix_token_id] for c in contexts]
        prompts = [ids[own.max_tokens - self.max_length :] for ids, own in zip(started, params)]
        found: list[Generated] = []
        for at in range(0, len(prompts), GENERATED_AT_ONCE):
            part = slice(at, at + GENERATED_AT_ONCE)
            outputs = self.served.generate(prompts[part], params[part], keep_broken=self.keep_broken)
            found += map(Generated.of, outputs)
            self.progress("generating", len(found), len(prompts))
        return found


def _sampling(options: dict[str, Any]) -> SamplingParams:
    """lm-eval's generation options as ours; greedy unless `do_sample` or a temperature asks otherwise."""
    until = options.get("until") or []
    stop = [until] if isinstance(until, str) else list(until)
    limits = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    max_tokens = next((int(options[name]) for name in limits if options.get(name) is not None), MAX_GEN_TOKENS)
    temperature = float(options.get("temperature") or 0.0)
    if options.get("do_sample") is False:
        temperature = 0.0
    elif options.get("do_sample") and not options.get("temperature"):
        temperature = 1.0
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=float(options.get("top_p") or 1.0),
        top_k=int(options.get("top_k") or 0),
        stop=tuple(s for s in stop if s),
    )
