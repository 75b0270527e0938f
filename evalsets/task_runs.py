"""Runs of tasks whose results can be paired item by item: our own sets, and lm-eval's tasks by name."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from lm_eval import evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from qtool.evalsets.harness import Generated, QtoolLM
from qtool.evalsets.items import ChoiceSet, ClozeSet, GenerationSet, ItemSet
from qtool.evalsets.output_scores import score_output
from qtool.quant.errors import QtoolError
from qtool.runtime.engine.params import SamplingParams

HUB_PATIENCE_S = 4.0


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
        graded: scores are shares, whatever values they happen to have.
        outputs: item id → what was generated; None where nothing was. `prompts`: item id → what was continued then.
        broken: item id → where in it, in words ("" where that is not known), of items for which the model computes NaN
            or infinity. Such an item has no margin, and the score 0.0 (NaN where less is better).
    """

    name: str
    metric: str
    chance: float | None
    scores: dict[str, float]
    normalised: dict[str, float] | None
    margins: dict[str, float] | None
    higher_is_better: bool
    texts: dict[str, str]
    graded: bool = False
    outputs: dict[str, Generated] | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)

    @property
    def binary(self) -> bool:
        return not self.graded and all(score in (0.0, 1.0) for score in self.scores.values())


def result_from(body: Mapping[str, Any]) -> TaskResult:
    """The result whose `dataclasses.asdict` went through JSON. Raises ValueError and its like for anything else."""
    outputs = body.get("outputs")
    if outputs is not None:
        outputs = {i: Generated(str(o["text"]), tuple(map(int, o["tokens"]))) for i, o in outputs.items()}
    return TaskResult(**{**body, "outputs": outputs})


def run_set(lm: QtoolLM, asked: ItemSet, *, seed: int = 0) -> TaskResult:
    """Let a model answer one of our own sets; per-item results in the set's order."""
    if isinstance(asked, ChoiceSet):
        return run_choice_sets(lm, [asked], seed=seed)[0]
    return _run_cloze(lm, asked) if isinstance(asked, ClozeSet) else _run_generation(lm, asked)


def _run_cloze(lm: QtoolLM, asked: ClozeSet) -> TaskResult:
    pairs = [(item.context, item.delimiter + item.target) for item in asked.items]
    requests = [Instance("loglikelihood", doc={}, arguments=pair, idx=i) for i, pair in enumerate(pairs)]
    found = {i.id: answer for i, answer in zip(asked.items, lm.loglikelihood(requests), strict=True)}
    broken = {i: "" for i, (total, _) in found.items() if not math.isfinite(total)}
    scores = {i: float(greedy and i not in broken) for i, (_, greedy) in found.items()}
    texts = {item.id: "".join(pair) for item, pair in zip(asked.items, pairs, strict=True)}
    return TaskResult(asked.name, "accuracy", asked.chance, scores, None, None, True, texts, broken=broken)


def _run_generation(lm: QtoolLM, asked: GenerationSet) -> TaskResult:
    params = [SamplingParams(max_tokens=i.max_tokens, temperature=0.0, stop=i.stop) for i in asked.items]
    found = lm.generate([item.context for item in asked.items], params)
    outputs = {item.id: generated for item, generated in zip(asked.items, found, strict=True)}
    broken = {i: f"after {len(output.tokens)} tokens" for i, output in outputs.items() if output.broken}
    scores = {
        item.id: 0.0 if item.id in broken else score_output(asked.metric, item, outputs[item.id].text)
        for item in asked.items
    }
    metric = asked.metric if asked.graded else "accuracy"
    texts = {item.id: f"{item.context} … {' | '.join(item.targets)}" for item in asked.items}
    prompts = {item.id: item.context for item in asked.items}
    return TaskResult(
        asked.name, metric, asked.chance, scores, None, None, True, texts, asked.graded, outputs, prompts, broken
    )


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
    broken: dict[str, str] = {}
    for sample in samples:
        item = choice_set.items[sample["doc_id"]]
        likelihoods = [float(response[0]) for response in sample["filtered_resps"]]
        if hit := [choice for choice, value in zip(item.choices, likelihoods, strict=True) if not math.isfinite(value)]:
            broken[item.id] = f"in the choice {hit[0][:60]!r}"
            scores[item.id] = normalised[item.id] = 0.0
            continue
        per_character = [value / len(choice) for value, choice in zip(likelihoods, item.choices, strict=True)]
        scores[item.id] = float(sample["acc"])
        normalised[item.id] = float(per_character.index(max(per_character)) == item.answer)
        best_wrong = max(value for i, value in enumerate(likelihoods) if i != item.answer)
        margins[item.id] = likelihoods[item.answer] - best_wrong
    texts = {i.id: f"{i.context}{i.delimiter}{i.choices[i.answer]}" for i in choice_set.items}
    return TaskResult(
        choice_set.name, "accuracy", choice_set.chance, scores, normalised, margins, True, texts, broken=broken
    )


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
    return [
        _named_result(name, samples, better.get(name, {}), {doc for task, doc in lm.broken if task == name})
        for name, samples in output["samples"].items()
    ]


def _named_result(
    name: str, samples: list[dict[str, Any]], higher_is_better: dict[str, bool], broken: Set[int | None]
) -> TaskResult:
    """`broken`: numbers of the documents for which the model computed NaN or infinity."""
    metrics = samples[0]["metrics"]
    known = ("acc", "exact_match")
    metric = next((m for m in known if m in metrics), metrics[0])
    kept = samples[0]["filter"]  # a task may log every answer once per filter: one is enough
    rows = [s for s in samples if s["filter"] == kept]
    if not all(isinstance(s[metric], int | float) for s in rows):
        raise QtoolError(f"lm-eval task {name}: metric {metric!r} has no number per item, so it cannot be paired")
    choices = [len(s["arguments"]) for s in rows]
    if metric == "acc" and min(choices) > 1:
        chance: float | None = sum(1 / n for n in choices) / len(choices)
    else:
        chance = 0.0 if metric in known else None  # what is predicted or generated freely is not to be guessed
    more_is_better = higher_is_better.get(metric, True)
    worst = 0.0 if more_is_better else math.nan
    scores = {str(s["doc_id"]): worst if s["doc_id"] in broken else float(s[metric]) for s in rows}
    texts = {str(s["doc_id"]): str(s["arguments"][0][0])[-200:] for s in rows}
    hit = {str(s["doc_id"]): "" for s in rows if s["doc_id"] in broken}
    return TaskResult(name, metric, chance, scores, None, None, more_is_better, texts, broken=hit)


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
    with quiet("lm_eval", logging.ERROR):
        loaded = manager.load(tasks)
        for task in loaded["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=seed)
        output: dict[str, Any] = evaluate(lm=lm, task_dict=loaded, limit=limit, bootstrap_iters=0, log_samples=True)
    return output


@contextmanager
def quiet(name: str, level: int) -> Iterator[None]:
    """Remarks below `level` of the logger of that name are kept out of our output."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
