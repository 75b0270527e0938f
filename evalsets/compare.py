"""Is the candidate still as good as the base? Both are served by the runtime, asked the same questions, and judged."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qtool.evalsets import statistics as st
from qtool.evalsets.divergence import LogitSpool, WindowComparison, compare_windows, repeat_kl, spool_base
from qtool.evalsets.fingerprint import environment, tokenizer_fingerprint
from qtool.evalsets.gate import (
    GatedMetric,
    Thresholds,
    divergence_metric,
    judge_all,
    perplexity_metric,
    task_metric,
)
from qtool.evalsets.grammar import grammar_set
from qtool.evalsets.harness import QtoolLM, Served, TaskResult, named_tasks, run_choice_sets, run_named_tasks
from qtool.evalsets.items import ChoiceSet, only_distinct, read_choice_set
from qtool.evalsets.metrics import Distribution, describe
from qtool.evalsets.statistics import Interval, Verdict
from qtool.evalsets.windows import TextWindows, text_windows
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.documents import load_tokenizer
from qtool.quant.errors import QtoolError
from qtool.quant.fingerprint import model_fingerprint
from qtool.quant.hub import resolve_model
from qtool.quant.progress import ProgressFn, silent

BUILT_IN = "grammar"  # the name under which --tasks knows the built-in set
NOISE_WINDOWS = 1
NOISE_EVERY = 20  # one item in so many is asked twice

Serve = Callable[[Path], Served]


@dataclass(frozen=True)
class ModelFacts:
    """One side of the comparison: what it is, and how fast it went through the evaluation.

    `text_tokens_per_s` is prompt processing over the text windows; `seconds` is everything, loading included.
    """

    name: str
    fingerprint: str
    bytes: int
    format: str
    load_seconds: float
    text_tokens_per_s: float
    seconds: float


@dataclass(frozen=True)
class NoiseFloor:
    """The base against itself, computed twice through the same runtime in another order of requests.

    Attributes:
        mean_kl, max_kl: nats, over `tokens` tokens.
        flips: answers that changed, of `items` asked twice; None where there is no set.
        max_margin_change: of the right choice's lead over the best wrong one, in nats; None likewise.
    """

    mean_kl: float
    max_kl: float
    tokens: int
    items: int = 0
    flips: int | None = None
    max_margin_change: float | None = None


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
    schemes: dict[str, dict[str, Any]]  # layer → {"scheme", "relative_error", ...}; empty where there is no record
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
            "tasks": [_task_dict(base, candidate) for base, candidate in self.tasks],
            "schemes": self.schemes,
            "settings": self.settings,
            "environment": self.environment,
            "started": self.started,
            "notes": list(self.notes),
        }
        plain: dict[str, Any] = _finite(document)
        return plain


def compare(
    base: str | Path,
    candidate: str | Path,
    *,
    data: Path | None = None,
    windows: int = 8,
    context: int = 1024,
    tasks: Sequence[str | Path] = (BUILT_IN,),
    lm_eval_tasks: Sequence[str] = (),
    lm_eval_limit: int | None = None,
    thresholds: Thresholds | None = None,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    device: str = "auto",
    seed: int = 0,
    progress: ProgressFn = silent,
    serve: Serve | None = None,
) -> Comparison:
    """Measure both models as they are served, one after the other, and judge the candidate.

    Args:
        base, candidate: folder, hub id or built-in name.
        data: text for perplexity and divergence (.txt, or .jsonl with "text"); None: the standard library's.
        windows, context: how many windows of how many tokens of it.
        tasks: multiple-choice files, or "grammar" for the built-in set; may be empty.
        lm_eval_tasks: lm-eval's own tasks by name; `lm_eval_limit` items of each (None: all).
        thresholds: the gate's; None: the defaults.
        dtype, device: for the runtime; logits are compared in float32 whatever they are.
        kv_cache_dtype: auto, int8 or float for the candidate's KV cache; the base's is as its checkpoint says.
        seed: of the bootstrap and of lm-eval.
        serve: how a folder becomes a served model; None: `qtool.runtime.llm.LLM`.

    Raises:
        QtoolError: before any model is loaded: bad input, damaged checkpoints, or tokenizers that differ.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    limits = thresholds or Thresholds()
    sets = [grammar_set() if str(t) == BUILT_IN else read_choice_set(Path(t)) for t in tasks]
    only_distinct(sets)
    folders = (resolve_model(base, progress=progress), resolve_model(candidate, progress=progress))
    described = [_describe(folder) for folder in folders]
    tokenizer, tokenizer_hash = _shared_tokenizer(*folders)
    text = text_windows(tokenizer, data, windows=windows, context=context)
    manager = named_tasks(lm_eval_tasks)
    serve_base = serve or _runtime(dtype, device, seed)
    serve_candidate = serve or _runtime(dtype, device, seed, kv_cache_dtype)
    run = _Run(text, sets, manager, tuple(lm_eval_tasks), lm_eval_limit, tokenizer, seed, progress)

    with LogitSpool() as spool:
        base_tasks, noise, base_speed = run.measure_base(serve_base, folders[0], spool)
        compared, candidate_tasks, candidate_speed = run.measure_candidate(serve_candidate, folders[1], spool)

    metrics = [
        divergence_metric(compared.window_means("kl"), limits, seed=seed),
        perplexity_metric(compared.window_means("base_nll"), compared.window_means("candidate_nll"), limits, seed=seed),
        *(task_metric(b, c, limits, seed=seed) for b, c in zip(base_tasks, candidate_tasks, strict=True)),
    ]
    judged = judge_all(metrics)
    return Comparison(
        verdict=st.overall([m.verdict for m in judged]),
        metrics=tuple(judged),
        divergence=_divergence(compared, seed),
        noise=noise,
        base=ModelFacts(str(base), *described[0], *base_speed),
        candidate=ModelFacts(str(candidate), *described[1], *candidate_speed),
        tasks=tuple(zip(base_tasks, candidate_tasks, strict=True)),
        windows=compared,
        schemes=layer_schemes(folders[1]),
        settings={
            "text": {"source": text.source, "windows": windows, "context": context, "fingerprint": text.fingerprint},
            "tasks": [
                {
                    "name": s.name,
                    "source": s.source,
                    "items": len(s.items),
                    "chance": s.chance,
                    "fingerprint": s.fingerprint,
                }
                for s in sets
            ],
            "lm_eval_tasks": list(lm_eval_tasks),
            "lm_eval_limit": lm_eval_limit,
            "tokenizer": tokenizer_hash,
            "thresholds": asdict(limits),
            "alpha": st.ALPHA,
            "resamples": st.RESAMPLES,
            "dtype": dtype,
            "kv_cache_dtype": kv_cache_dtype,
            "device": device,
            "seed": seed,
        },
        environment=environment(),
        started=started,
        notes=tuple(_notes(judged)),
    )


def _runtime(dtype: str, device: str, seed: int, kv_cache_dtype: str = "auto") -> Serve:
    def serve(folder: Path) -> Served:
        from qtool.runtime.llm import LLM

        llm: Served = LLM(folder, dtype=dtype, device=device, kv_cache_dtype=kv_cache_dtype, seed=seed)
        return llm

    return serve


def _describe(folder: Path) -> tuple[str, int, str]:
    """Fingerprint, bytes of the weights, and how they are stored. Raises QtoolError for a damaged checkpoint."""
    with Checkpoint(folder) as checkpoint:
        quantization = checkpoint.config.get("quantization_config")
        dtype = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "16-bit")
        method = quantization.get("quant_method", "quantized") if isinstance(quantization, dict) else dtype
        return model_fingerprint(checkpoint), checkpoint.num_bytes(), str(method)


def _shared_tokenizer(base: Path, candidate: Path) -> tuple[Any, str]:
    """The tokenizer of both models and its fingerprint. Raises QtoolError where they differ."""
    tokenizer = load_tokenizer(base)
    fingerprints = [tokenizer_fingerprint(t) for t in (tokenizer, load_tokenizer(candidate))]
    if fingerprints[0] != fingerprints[1]:
        raise QtoolError(
            f"{base} and {candidate} have different tokenizers or chat templates, so their results cannot be compared; "
            "compare a model with a quantization of itself"
        )
    return tokenizer, fingerprints[0]


@dataclass(frozen=True)
class _Run:
    """What both models are asked."""

    text: TextWindows
    sets: list[ChoiceSet]
    manager: Any
    lm_eval_tasks: tuple[str, ...]
    lm_eval_limit: int | None
    tokenizer: Any
    seed: int
    progress: ProgressFn

    def measure_base(
        self, serve: Serve, folder: Path, spool: LogitSpool
    ) -> tuple[list[TaskResult], NoiseFloor, tuple[float, float, float]]:
        """The base's logits into the spool; its answers, its noise floor, and (load s, tokens/s, all s)."""
        start = time.monotonic()
        served = serve(folder)
        loaded = time.monotonic()
        self._check_fits(served, folder)
        spool_base(served, self.text.tokens, spool, progress=self.progress)
        read = time.monotonic()
        results = self._answers(served, "base")
        noise = self._noise(served, spool, results)
        speed = (loaded - start, self.text.tokens.numel() / (read - loaded), time.monotonic() - start)
        del served
        _release()
        return results, noise, speed

    def measure_candidate(
        self, serve: Serve, folder: Path, spool: LogitSpool
    ) -> tuple[WindowComparison, list[TaskResult], tuple[float, float, float]]:
        """The candidate's token scores against the spool, its answers, and (load s, tokens/s, all s)."""
        start = time.monotonic()
        served = serve(folder)
        loaded = time.monotonic()
        self._check_fits(served, folder)
        compared = compare_windows(served, self.text.tokens, spool, self.tokenizer, progress=self.progress)
        read = time.monotonic()
        results = self._answers(served, "candidate")
        speed = (loaded - start, self.text.tokens.numel() / (read - loaded), time.monotonic() - start)
        del served
        _release()
        return compared, results, speed

    def _check_fits(self, served: Served, folder: Path) -> None:
        context = self.text.tokens.shape[1]
        if context > served.max_model_len:
            raise QtoolError(f"--context {context}: {folder} takes {served.max_model_len} tokens at most")

    def _lm(self, served: Served, who: str) -> QtoolLM:
        def progress(what: str, done: int, total: int) -> None:
            self.progress(f"{who}: {what}", done, total)

        return QtoolLM(served=served, tokenizer=self.tokenizer, progress=progress)

    def _answers(self, served: Served, who: str) -> list[TaskResult]:
        lm = self._lm(served, who)
        own = run_choice_sets(lm, self.sets, seed=self.seed)
        return own + run_named_tasks(lm, self.lm_eval_tasks, self.manager, limit=self.lm_eval_limit, seed=self.seed)

    def _noise(self, served: Served, spool: LogitSpool, first: list[TaskResult]) -> NoiseFloor:
        kl = repeat_kl(served, self.text.tokens, spool, count=NOISE_WINDOWS)
        floor = (kl.double().mean().item(), kl.max().item(), len(kl))
        if not self.sets:
            return NoiseFloor(*floor)
        some = self.sets[0].items[::NOISE_EVERY][::-1]
        again = run_choice_sets(
            self._lm(served, "base again"), [ChoiceSet(self.sets[0].name, some, self.sets[0].source)], seed=self.seed
        )[0]
        before = first[0]
        flips = sum(again.scores[i] != before.scores[i] for i in again.scores)
        margins = [abs(again.margins[i] - before.margins[i]) for i in again.scores if again.margins and before.margins]
        return NoiseFloor(*floor, items=len(some), flips=flips, max_margin_change=max(margins, default=None))


def _release() -> None:
    """Give back what the model that was just dropped held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _divergence(compared: WindowComparison, seed: int) -> Divergence:
    delta = compared.window_means("candidate_nll") - compared.window_means("base_nll")
    return Divergence(
        kl=describe(compared.joined("kl")),
        same_top1=compared.joined("same_top1").double().mean().item(),
        top5_overlap=compared.joined("top5_overlap").double().mean().item(),
        delta_nll=float(delta.mean()),
        delta_nll_interval=st.bootstrap_interval(delta, seed=seed),
    )


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
