"""Is the candidate still as good as the base? Both are served by the runtime, asked the same questions, and judged."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qtool.evalsets import statistics as st
from qtool.evalsets.builtin import item_set
from qtool.evalsets.divergence import WindowComparison
from qtool.evalsets.fingerprint import answer_facts, environment, tokenizer_fingerprint
from qtool.evalsets.gate import (
    GatedMetric,
    Thresholds,
    divergence_metric,
    judge_all,
    perplexity_metric,
    task_metric,
    verdict_of,
)
from qtool.evalsets.harness import Generated
from qtool.evalsets.harness import serve as serve_model
from qtool.evalsets.items import check_sets
from qtool.evalsets.kept import Kept
from qtool.evalsets.metrics import Distribution, describe
from qtool.evalsets.noise import NoiseFloor
from qtool.evalsets.not_finite import NotFinite
from qtool.evalsets.parting import TEXT_SET, Parting, Prompts, parting, text_prompts
from qtool.evalsets.statistics import Interval, Verdict
from qtool.evalsets.subject import Questions, Serve, Subject
from qtool.evalsets.task_runs import TaskResult, named_tasks, quiet
from qtool.evalsets.weight_distance import Suspect, layer_distances, suspect_notes, suspects, with_distances
from qtool.evalsets.windows import text_windows
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.device import resolve_device
from qtool.quant.documents import load_tokenizer
from qtool.quant.errors import QtoolError
from qtool.quant.fingerprint import model_fingerprint
from qtool.quant.hub import resolve_model
from qtool.quant.job import check_seed
from qtool.quant.progress import ProgressFn, silent

DEFAULT_SET = "grammar"  # the built-in set that is asked where none is named
GENERATIONS = 32  # prompts from the text that are continued greedily


@dataclass(frozen=True)
class ModelFacts:
    """One side of the comparison: what it is, and how fast it went through the evaluation.

    `text_tokens_per_s` is prompt processing over the text windows, when they were read; `seconds` is everything,
    loading included. `recalled` names what an earlier run had answered: the text, and sets by name.
    """

    name: str
    fingerprint: str
    bytes: int
    format: str
    load_seconds: float
    text_tokens_per_s: float
    seconds: float
    recalled: tuple[str, ...] = ()


@dataclass(frozen=True)
class Divergence:
    """The finer signal beside the gate, over all tokens of the text.

    Attributes:
        kl: nats per token; `same_top1`, `top5_overlap`: shares in [0, 1].
        delta_nll: mean of candidate − base, nats per token, with its interval over windows.
    """

    kl: Distribution
    same_top1: float
    top5_overlap: float
    delta_nll: float
    delta_nll_interval: Interval


@dataclass(frozen=True)
class Comparison:
    """All that was measured, the verdict first. `to_dict` gives compare.json."""

    verdict: Verdict
    metrics: tuple[GatedMetric, ...]
    divergence: Divergence
    noise: NoiseFloor
    base: ModelFacts
    candidate: ModelFacts
    tasks: tuple[tuple[TaskResult, TaskResult], ...]
    windows: WindowComparison
    partings: tuple[Parting, ...]  # of prompts from the text first, then of every set that is generated
    not_finite: tuple[NotFinite, ...]  # parts in which the candidate computes NaN or infinity; any fails it
    schemes: dict[str, dict[str, Any]]  # layer → {"scheme", "relative_error", "distance", ...}; {} where none is known
    suspects: tuple[Suspect, ...]  # layers that stand out; looked for where the candidate does not pass
    settings: dict[str, Any]
    environment: dict[str, Any]
    started: str
    notes: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings; values that are not finite become null."""
        document = {
            "qtool_compare": 1,
            "verdict": self.verdict,
            "metrics": [asdict(m) for m in self.metrics],
            "divergence": asdict(self.divergence),
            "noise_floor": asdict(self.noise),
            "base": asdict(self.base),
            "candidate": asdict(self.candidate),
            "windows": {
                "base_nll": self.windows.window_means("base_nll").tolist(),
                "candidate_nll": self.windows.window_means("candidate_nll").tolist(),
                "kl": self.windows.window_means("kl").tolist(),
            },
            "worst": [asdict(p) for p in self.windows.worst],
            "generation": [asdict(p) for p in self.partings],
            "not_finite": [asdict(n) for n in self.not_finite],
            "tasks": [_task_dict(base, candidate) for base, candidate in self.tasks],
            "schemes": self.schemes,
            "suspects": [asdict(s) for s in self.suspects],
            "settings": self.settings,
            "environment": self.environment,
            "started": self.started,
            "notes": list(self.notes),
        }
        plain: dict[str, Any] = _finite(document)
        return plain


def compare(base: str | Path, candidate: str | Path, **options: Any) -> Comparison:
    """Measure both models as they are served, one after the other, and judge the candidate; see `compare_all`."""
    return compare_all(base, [candidate], **options)[0]


def compare_all(
    base: str | Path,
    candidates: Sequence[str | Path],
    *,
    data: Path | None = None,
    windows: int = 8,
    context: int = 1024,
    generations: int = GENERATIONS,
    tasks: Sequence[str | Path] = (DEFAULT_SET,),
    lm_eval_tasks: Sequence[str] = (),
    lm_eval_limit: int | None = None,
    thresholds: Thresholds | None = None,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    device: str = "auto",
    seed: int = 0,
    progress: ProgressFn = silent,
    serve: Serve | None = None,
    cache: Path | None = None,
) -> list[Comparison]:
    """Measure the base and every candidate as they are served, one after the other, and judge each candidate.

    Args:
        base, candidates: folder, hub id or built-in name.
        data: text for perplexity and divergence (.txt, or .jsonl with "text"); None: the standard library's.
        windows, context: how many windows of how many tokens of it.
        generations: how many prompts from that text are continued at most, to see where greedy outputs part; 0: none.
        tasks: files of items (see `own_sets`), or names of built-in sets (see `builtin`); may be empty.
        lm_eval_tasks: lm-eval's own tasks by name; `lm_eval_limit` items of each (None: all).
        thresholds: the gate's; None: the defaults.
        dtype, device: for the runtime; logits are compared in float32 whatever they are.
        kv_cache_dtype: auto, int8 or float for the candidates' KV cache; the base's is as its checkpoint says.
        seed: of the bootstrap and of lm-eval.
        serve: how a folder becomes a served model; None: `qtool.runtime.llm.LLM`.
        cache: where answers are kept and recalled (`kept.baseline_folder()`); None: every model is asked everything.

    Returns:
        One comparison a candidate, in their order.

    Raises:
        QtoolError: before any model is loaded: bad input, damaged checkpoints, or tokenizers that differ; later: a base
            that computes NaN or infinity.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    limits = thresholds or Thresholds()
    if not candidates:
        raise QtoolError("nothing to compare with the base: name at least one candidate")
    if generations < 0:
        raise QtoolError(f"--generations {generations}: a number of prompts, 0 for none")
    check_seed(seed)
    sets = tuple(item_set(task) for task in tasks)
    check_sets(sets)
    folders = [resolve_model(model, progress=progress) for model in (base, *candidates)]
    described = [_describe(folder) for folder in folders]
    tokenizer, tokenizer_hash = _shared_tokenizer(folders[0], folders[1:])
    text = text_windows(tokenizer, data, windows=windows, context=context)
    manager = named_tasks(lm_eval_tasks)
    limits.check_tasks([*(s.name for s in sets), *(manager.all_tasks if manager else ())])
    prompts = text_prompts(text.tokens, generations)
    asked = Questions(text, prompts, sets, manager, tuple(lm_eval_tasks), lm_eval_limit, tokenizer, seed)

    def subject(index: int, kv: str) -> Subject:
        role = "candidate" if index else "base"
        with Checkpoint(folders[index]) as checkpoint:
            facts = answer_facts(
                checkpoint, tokenizer_hash, dtype=dtype, kv_cache_dtype=kv, device=resolve_device(device)
            )
        who = role if len(candidates) == 1 or not index else f"candidate {index}"
        how = serve or _runtime(dtype, device, seed, kv)
        kept = Kept(cache, {"role": role, **facts})
        return Subject(who, folders[index], how, asked, kept, progress, must_be_finite=not index)

    settings = {
        "text": {"source": text.source, "windows": windows, "context": context, "fingerprint": text.fingerprint},
        "tasks": [
            {
                "name": s.name,
                "source": s.source,
                "items": len(s.items),
                "metric": s.metric,
                "chance": s.chance,
                "fingerprint": s.fingerprint,
            }
            for s in sets
        ],
        "generations": {"prompts": len(prompts.tokens), "max_tokens": prompts.max_tokens},
        "lm_eval_tasks": list(lm_eval_tasks),
        "lm_eval_limit": lm_eval_limit,
        "tokenizer": tokenizer_hash,
        "thresholds": asdict(limits),
        "alpha": limits.alpha,
        "resamples": st.RESAMPLES,
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "device": device,
        "seed": seed,
    }
    first = subject(0, "auto")
    comparisons = []
    with _said_of(base):
        spool = first.logits()
    with spool:
        with _said_of(base):
            base_tasks = first.answers()
            base_outputs = first.outputs()
            noise = first.noise(spool, base_tasks, base_outputs)
        base_facts = _model_facts(str(base), described[0], first)
        first.release()
        for index, candidate in enumerate(candidates, 1):
            other = subject(index, kv_cache_dtype)
            with _said_of(candidate):
                compared, other_tasks = other.compare_text(spool, first.kept.key), other.answers()
                other_outputs = other.outputs()
            other_facts = _model_facts(str(candidate), described[index], other)
            other.release()
            judged = judge_all(
                [
                    divergence_metric(compared.window_means("kl"), limits, seed=seed),
                    perplexity_metric(
                        compared.window_means("base_nll"), compared.window_means("candidate_nll"), limits, seed=seed
                    ),
                    *(task_metric(b, c, limits, seed=seed) for b, c in zip(base_tasks, other_tasks, strict=True)),
                ],
                limits.alpha,
            )
            verdict = Verdict.FAIL if other.not_finite else verdict_of(judged)
            schemes = layer_schemes(folders[index])
            blamed: tuple[Suspect, ...] = ()
            if verdict is not Verdict.PASS:
                distances = layer_distances(folders[0], folders[index], progress=progress)
                schemes, blamed = with_distances(schemes, distances), suspects(distances)
            comparisons.append(
                Comparison(
                    verdict=verdict,
                    metrics=tuple(judged),
                    divergence=_divergence(compared, seed, limits.alpha),
                    noise=noise,
                    base=base_facts,
                    candidate=other_facts,
                    tasks=tuple(zip(base_tasks, other_tasks, strict=True)),
                    windows=compared,
                    partings=_partings(prompts, base_outputs, other_outputs, base_tasks, other_tasks, tokenizer),
                    not_finite=tuple(other.not_finite),
                    schemes=schemes,
                    suspects=blamed,
                    settings=settings,
                    environment=environment(),
                    started=started,
                    notes=(*_notes(judged), *suspect_notes(blamed)),
                )
            )
    return comparisons


@contextmanager
def _said_of(model: str | Path) -> Iterator[None]:
    """Errors of one model among several name it; requests that break are told of together, not logged one by one."""
    try:
        with quiet("qtool.runtime.engine.scheduler", logging.CRITICAL):
            yield
    except QtoolError as error:
        raise QtoolError(f"{model}: {error}") from None


def _model_facts(name: str, described: tuple[str, int, str], subject: Subject) -> ModelFacts:
    return ModelFacts(
        name, *described, subject.load_seconds, subject.text_tokens_per_s, subject.seconds, tuple(subject.recalled)
    )


def _runtime(dtype: str, device: str, seed: int, kv_cache_dtype: str = "auto") -> Serve:
    return partial(serve_model, dtype=dtype, device=device, kv_cache_dtype=kv_cache_dtype, seed=seed)


def _describe(folder: Path) -> tuple[str, int, str]:
    """Fingerprint, bytes of the weights, and how they are stored. Raises QtoolError for a damaged checkpoint."""
    with Checkpoint(folder) as checkpoint:
        quantization = checkpoint.config.get("quantization_config")
        dtype = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "16-bit")
        method = quantization.get("quant_method", "quantized") if isinstance(quantization, dict) else dtype
        return model_fingerprint(checkpoint), checkpoint.num_bytes(), str(method)


def _shared_tokenizer(base: Path, candidates: Sequence[Path]) -> tuple[Any, str]:
    """The tokenizer of all models and its fingerprint. Raises QtoolError where one differs."""
    tokenizer = load_tokenizer(base)
    fingerprint = tokenizer_fingerprint(tokenizer)
    for candidate in candidates:
        if tokenizer_fingerprint(load_tokenizer(candidate)) != fingerprint:
            raise QtoolError(
                f"{base} and {candidate} have different tokenizers or chat templates, so their results cannot be "
                "compared; compare a model with a quantization of itself"
            )
    return tokenizer, fingerprint


def _divergence(compared: WindowComparison, seed: int, alpha: float) -> Divergence:
    delta = compared.window_means("candidate_nll") - compared.window_means("base_nll")
    return Divergence(
        kl=describe(compared.joined("kl")),
        same_top1=compared.joined("same_top1").double().mean().item(),
        top5_overlap=compared.joined("top5_overlap").double().mean().item(),
        delta_nll=float(delta.mean()),
        delta_nll_interval=st.bootstrap_interval(delta, seed=seed, alpha=alpha),
    )


def _partings(
    prompts: Prompts,
    base: Sequence[Generated],
    candidate: Sequence[Generated],
    base_tasks: Sequence[TaskResult],
    candidate_tasks: Sequence[TaskResult],
    tokenizer: Any,
) -> tuple[Parting, ...]:
    """Where outputs part: to the prompts from the text, and to those of every set that is generated."""
    found = []
    if prompts.tokens:
        texts = [tokenizer.decode(list(p)) for p in prompts.tokens]
        found.append(parting(TEXT_SET, prompts.max_tokens, base, candidate, texts, tokenizer))
    for before, after in zip(base_tasks, candidate_tasks, strict=True):
        if before.outputs and after.outputs:
            ids = [i for i in before.outputs if i in after.outputs]
            ours, theirs = ([r.outputs[i] for i in ids] for r in (before, after) if r.outputs)
            longest = max(len(o.tokens) for o in (*ours, *theirs))
            found.append(parting(before.name, longest, ours, theirs, [before.prompts[i] for i in ids], tokenizer))
    return tuple(found)


def layer_schemes(folder: Path) -> dict[str, dict[str, Any]]:
    """Layer → scheme name and measured error, from the artifact's qtool.json; empty where there is none to read."""
    try:
        layers = json.loads((folder / "qtool.json").read_text(encoding="utf-8"))["layers"]
        return {str(name): dict(facts) for name, facts in layers.items() if "scheme" in facts}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # a decoration of the report: another tool's artifact, or a damaged record, must not end the run


def _notes(metrics: Sequence[GatedMetric]) -> list[str]:
    """What a reader must know to trust the verdict."""
    notes = []
    for m in metrics:
        if m.verdict is Verdict.UNINFORMATIVE:
            notes.append(f"{m.name}: {m.note}, so it says nothing about the candidate and does not count as a pass")
        if not m.counts:
            notes.append(f"{m.name} does not count, as the gate says: {m.verdict}")
        if m.missing:
            notes.append(f"{m.name}: {m.note}; a metric with items missing never passes")
    return notes


def _task_dict(base: TaskResult, candidate: TaskResult) -> dict[str, Any]:
    ids = [i for i in base.scores if i in candidate.scores]
    document: dict[str, Any] = {
        "name": base.name,
        "metric": base.metric,
        "chance": base.chance,
        "items": [{"id": i, "base": base.scores[i], "candidate": candidate.scores[i]} for i in ids],
    }
    if base.outputs and candidate.outputs:
        pairs = [(i, base.outputs[i].text, candidate.outputs[i].text) for i in ids]
        document["outputs"] = [{"id": i, "base": b, "candidate": c} for i, b, c in pairs]
    if base.normalised and candidate.normalised:
        document["accuracy_per_character"] = {
            "base": float(np.mean([base.normalised[i] for i in ids])),
            "candidate": float(np.mean([candidate.normalised[i] for i in ids])),
        }
    return document


def _finite(value: Any) -> Any:
    """The same document with every float that is not finite replaced by None, so that it is valid JSON."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
