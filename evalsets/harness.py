"""lm-eval over our own runtime: its model class, and runs whose results can be paired item by item.

Importing this module registers the class as `qtool` in lm-eval's registry.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from lm_eval import evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from qtool.evalsets.items import ChoiceSet
from qtool.quant.documents import load_tokenizer
from qtool.quant.errors import QtoolError
from qtool.quant.hub import resolve_model
from qtool.quant.progress import ProgressFn, silent
from qtool.runtime.engine.params import RequestOutput, SamplingParams

MAX_GEN_TOKENS = 256  # lm-eval's own default
HUB_PATIENCE_S = 4.0


class Scored(Protocol):
    """Log-probabilities of one continuation, and whether greedy decoding would have given it."""

    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def greedy(self) -> bool: ...


class Served(Protocol):
    """What evaluation asks of a model that is served: `qtool.runtime.llm.LLM`, or anything that answers alike."""

    @property
    def max_model_len(self) -> int: ...
    def loglikelihood(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Sequence[Scored]: ...
    def prompt_logits(self, sequences: Sequence[Sequence[int]]) -> Iterator[Tensor]: ...
    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> Sequence[RequestOutput]: ...


@register_model("qtool")
class QtoolLM(TemplateLM):  # type: ignore[misc]  # lm-eval carries no types
    """lm-eval's model interface over our runtime, with lm-eval's conventions for tokens.

    Strings are encoded as lm-eval's Hugging Face class encodes them: context and continuation together, split at the
    context's length; an empty context becomes the BOS token (EOS where there is none). The engine batches by itself.

    Args:
        pretrained: MODEL (folder, hub id or built-in name), loaded by the runtime; or
        served: a model that already runs, with `tokenizer`.
        add_bos_token: put the BOS token before every string; None leaves it to the tokenizer.
        batch_size, max_batch_size: accepted because lm-eval passes them; the engine needs none.
        engine_args: passed to the runtime.

    Raises:
        QtoolError: neither or both of `pretrained` and `served`; a model that does not load.
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
        progress: ProgressFn = silent,
        **engine_args: Any,
    ) -> None:
        super().__init__()
        if (pretrained is None) == (served is None):
            raise QtoolError("lm-eval model qtool: pass pretrained=MODEL (or a served model, from Python)")
        if served is None:
            from qtool.runtime.llm import LLM

            folder = resolve_model(str(pretrained))
            served, tokenizer = LLM(folder, **engine_args), load_tokenizer(folder)
        self.served: Served = served
        self.tokenizer = tokenizer
        self.add_bos_token = add_bos_token
        self.progress = progress

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
        return scores

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        for (_, text), _, continuation in requests:
            if not continuation:
                raise QtoolError(f"the choice {text!r} adds no token to its context, so it has no likelihood")
            if len(continuation) >= self.max_length:
                size = f"{len(continuation)} tokens, but the model takes {self.max_length}"
                raise QtoolError(f"the choice {text[:60]!r} is too long: {size}")
        results = self._score(pairs)
        for (strings, _, _), result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", strings, result)
        return results

    def _score(self, pairs: list[tuple[list[int], list[int]]], at_once: int = 256) -> list[tuple[float, bool]]:
        """Summed log-likelihood and greediness per pair; contexts too long for the model lose their beginning."""
        fitted = [(context[max(0, len(context) + len(cont) - self.max_length) :], cont) for context, cont in pairs]
        # longest first, so that a batch holds lines of one length and want of memory shows at once
        order = sorted(range(len(fitted)), key=lambda i: -sum(map(len, fitted[i])))
        results: list[tuple[float, bool]] = [(math.nan, False)] * len(fitted)
        for start in range(0, len(order), at_once):
            part = order[start : start + at_once]
            for i, scored in zip(part, self.served.loglikelihood([fitted[i] for i in part]), strict=True):
                results[i] = (math.fsum(scored.logprobs), scored.greedy)
            self.progress("likelihoods", start + len(part), len(order))
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole strings in windows of the full context, every token predicted once."""
        pairs: list[tuple[list[int], list[int]]] = []
        counts: list[int] = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,  # the runtime counts the prefix token and the last target alike
                context_len=1,
            )
            own = [make_disjoint_window(window) for window in windows]
            pairs += own
            counts.append(len(own))
        scores = iter(self._score(pairs))
        totals = [math.fsum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context until a stop string, the end-of-sequence token or `max_gen_toks`; greedy by default."""
        prompts: list[list[int]] = []
        params: list[SamplingParams] = []
        for request in requests:
            context, options = request.args
            sampling = _sampling(options)
            room = self.max_length - sampling.max_tokens
            if room < 1:
                raise QtoolError(f"max_gen_toks {sampling.max_tokens} leaves no room for a prompt in {self.max_length}")
            prompts.append(self.tok_encode(context)[-room:])
            params.append(sampling)
        texts = [output.outputs[0].text for output in self.served.generate(prompts, params)]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts


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


@dataclass(frozen=True)
class TaskResult:
    """One model's answers to one task, item by item.

    Attributes:
        name: the task; `metric`: what `scores` are.
        chance: accuracy of guessing; None where guessing means nothing (generation).
        scores: item id → score, 1.0 and 0.0 for right and wrong.
        normalised: item id → right or wrong by likelihood per character; None where there are no choices.
        margins: item id → log-likelihood of the right choice minus that of the best wrong one, in nats; likewise.
        higher_is_better: direction of `metric`.
        texts: item id → the question, for people.
    """

    name: str
    metric: str
    chance: float | None
    scores: dict[str, float]
    normalised: dict[str, float] | None
    margins: dict[str, float] | None
    higher_is_better: bool
    texts: dict[str, str]

    @property
    def binary(self) -> bool:
        return all(score in (0.0, 1.0) for score in self.scores.values())


def run_choice_sets(lm: QtoolLM, sets: Sequence[ChoiceSet], *, seed: int = 0) -> list[TaskResult]:
    """Let lm-eval run our own multiple-choice sets; per-item results in the sets' order."""
    if not sets:
        return []
    samples = _evaluate(lm, [_task_config(s) for s in sets], TaskManager(include_defaults=False), seed)["samples"]
    return [_choice_result(s, samples[s.name]) for s in sets]


def _task_config(choice_set: ChoiceSet) -> dict[str, Any]:
    rows = [
        {"context": i.context, "choices": [i.delimiter + c for c in i.choices], "answer": i.answer}
        for i in choice_set.items
    ]

    def dataset(**_: Any) -> Any:
        from datasets import Dataset

        return {"test": Dataset.from_list(rows)}

    return {
        "task": choice_set.name,
        "custom_dataset": dataset,
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",  # each item brings its own, in front of its choices
        "metric_list": [{"metric": "acc"}],
    }


def _choice_result(choice_set: ChoiceSet, samples: list[dict[str, Any]]) -> TaskResult:
    scores: dict[str, float] = {}
    normalised: dict[str, float] = {}
    margins: dict[str, float] = {}
    for sample in samples:
        item = choice_set.items[sample["doc_id"]]
        likelihoods = [float(response[0]) for response in sample["filtered_resps"]]
        if any(math.isnan(value) for value in likelihoods):
            continue  # an item without an answer: missing, which the comparison never passes
        per_character = [value / len(choice) for value, choice in zip(likelihoods, item.choices, strict=True)]
        scores[item.id] = float(sample["acc"])
        normalised[item.id] = float(per_character.index(max(per_character)) == item.answer)
        best_wrong = max(value for i, value in enumerate(likelihoods) if i != item.answer)
        margins[item.id] = likelihoods[item.answer] - best_wrong
    texts = {i.id: f"{i.context}{i.delimiter}{i.choices[i.answer]}" for i in choice_set.items}
    return TaskResult(choice_set.name, "accuracy", choice_set.chance, scores, normalised, margins, True, texts)


def named_tasks(names: Sequence[str]) -> TaskManager | None:
    """The index of lm-eval's own tasks (it takes long to read), with `names` checked; None where there are none.

    Raises:
        QtoolError: an unknown task, or a hub out of reach, from which the data come.
    """
    if not names:
        return None
    _check_hub(names)
    manager = TaskManager()
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise QtoolError(f"--lm-eval-tasks: lm-eval knows no task {unknown[0]!r}; see `lm_eval ls tasks`")
    return manager


def run_named_tasks(
    lm: QtoolLM, names: Sequence[str], manager: TaskManager | None, *, limit: int | None = None, seed: int = 0
) -> list[TaskResult]:
    """Run lm-eval's own tasks by name, on the first `limit` items of each (None: all).

    Raises:
        QtoolError: the data cannot be had.
    """
    if manager is None:
        return []
    try:
        output = _evaluate(lm, list(names), manager, seed, limit)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise QtoolError(f"--lm-eval-tasks {','.join(names)}: cannot be run ({reason})") from None
    better = output.get("higher_is_better", {})
    return [_named_result(name, samples, better.get(name, {})) for name, samples in output["samples"].items()]


def _named_result(name: str, samples: list[dict[str, Any]], higher_is_better: dict[str, bool]) -> TaskResult:
    metrics = samples[0]["metrics"]
    known = ("acc", "exact_match")
    metric = next((m for m in known if m in metrics), metrics[0])
    kept = samples[0]["filter"]  # a task may log every answer once per filter: one is enough
    rows = [s for s in samples if s["filter"] == kept]
    if not all(isinstance(s[metric], int | float) for s in rows):
        raise QtoolError(f"lm-eval task {name}: metric {metric!r} has no number per item, so it cannot be paired")
    # acc of several choices has a chance level; exact match and generation have none
    choices = [len(s["arguments"]) for s in rows]
    chance = sum(1 / n for n in choices) / len(choices) if metric == "acc" and min(choices) > 1 else None
    scores = {str(s["doc_id"]): float(s[metric]) for s in rows}
    texts = {str(s["doc_id"]): str(s["arguments"][0][0])[-200:] for s in rows}
    return TaskResult(name, metric, chance, scores, None, None, higher_is_better.get(metric, True), texts)


def _check_hub(names: Sequence[str]) -> None:
    """Refuse within seconds where the hub is out of reach: the data sets library would retry for minutes."""
    if os.environ.get("HF_HUB_OFFLINE") or os.environ.get("HF_DATASETS_OFFLINE"):
        return  # the user says that the data are cached
    address = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    reached = threading.Event()

    def connect() -> None:
        try:
            host, port = str(address.hostname), address.port or (80 if address.scheme == "http" else 443)
            with socket.create_connection((host, port), timeout=HUB_PATIENCE_S):
                reached.set()
        except OSError:
            return

    # in a thread of its own, since a name look-up that hangs cannot be timed out
    probe = threading.Thread(target=connect, daemon=True)
    probe.start()
    probe.join(HUB_PATIENCE_S)
    if not reached.is_set():
        raise QtoolError(
            f"--lm-eval-tasks {','.join(names)}: the data lie on the hub ({address.hostname}), which does not answer; "
            "set HF_HUB_OFFLINE=1 if they are cached here, or bring a set of your own with --tasks FILE"
        )


def _evaluate(
    lm: QtoolLM, tasks: list[Any], manager: TaskManager, seed: int, limit: int | None = None
) -> dict[str, Any]:
    """lm-eval's own evaluation. Not through simple_evaluate, which also asks git, pip and the system who they are."""
    with _quiet_lm_eval():
        loaded = manager.load(tasks)
        for task in loaded["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=seed)
        output: dict[str, Any] = evaluate(lm=lm, task_dict=loaded, limit=limit, bootstrap_iters=0, log_samples=True)
    return output


@contextmanager
def _quiet_lm_eval() -> Iterator[None]:
    """lm-eval's remarks are kept out of our output while it runs; its errors are not."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
