"""One model under evaluation: loaded when it is asked something that no earlier run has answered."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from qtool.evalsets.divergence import LogitSpool, Position, WindowComparison, compare_windows, repeat_kl, spool_base
from qtool.evalsets.harness import QtoolLM, Served, TaskResult, run_choice_sets, run_named_tasks
from qtool.evalsets.items import ChoiceSet
from qtool.evalsets.kept import Kept
from qtool.evalsets.metrics import TokenScores
from qtool.evalsets.windows import TextWindows
from qtool.quant.errors import QtoolError
from qtool.quant.progress import ProgressFn

NOISE_WINDOWS = 1
NOISE_EVERY = 20  # one item in so many is asked twice

Serve = Callable[[Path], Served]


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
class Questions:
    """What every model is asked. `manager` is lm-eval's index of tasks, None where none is asked for."""

    text: TextWindows
    sets: tuple[ChoiceSet, ...]
    manager: Any
    lm_eval_tasks: tuple[str, ...]
    lm_eval_limit: int | None
    tokenizer: Any
    seed: int

    @property
    def text_facts(self) -> dict[str, Any]:
        return {"text": self.text.fingerprint, "shape": list(self.text.tokens.shape)}


class Subject:
    """A model folder and what it answers: kept answers where there are some, else its own. Use it as a context."""

    def __init__(
        self, who: str, folder: Path, serve: Serve, questions: Questions, kept: Kept, progress: ProgressFn
    ) -> None:
        self.folder, self.kept = folder, kept
        self.load_seconds = 0.0
        self.text_tokens_per_s = 0.0
        self.recalled: list[str] = []  # parts that an earlier run answered
        self._who, self._serve, self._asked, self._progress = who, serve, questions, progress
        self._served: Served | None = None
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since this model's turn began."""
        return time.monotonic() - self._began

    def _model(self) -> Served:
        if self._served is None:
            start = time.monotonic()
            self._served = self._serve(self.folder)
            self.load_seconds = time.monotonic() - start
            context, most = self._asked.text.tokens.shape[1], self._served.max_model_len
            if context > most:
                raise QtoolError(f"--context {context}: {self.folder} takes {most} tokens at most")
        return self._served

    def release(self) -> None:
        """Let the model go, and give back the memory that it held."""
        self._served = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def logits(self) -> LogitSpool:
        """Logits of the text, [windows, context − 1, vocab], for `compare_text` of others; close it after use."""
        facts, windows = self._asked.text_facts, len(self._asked.text.tokens)
        path = self.kept.path("logits", facts, "bin")

        def read(body: Any) -> LogitSpool:
            assert path is not None
            self.text_tokens_per_s = float(body["tokens_per_s"])
            return LogitSpool.open(path, (body["positions"], body["vocab"]), body["checksums"])

        found = self.kept.recall("logits", facts, read)
        if found is not None:
            self._recalled("text", windows)
            return found
        served, start = self._model(), time.monotonic()
        spool = spool_base(served, self._asked.text.tokens, path, self.kept.room, progress=self._progress)
        self.text_tokens_per_s = self._asked.text.tokens.numel() / (time.monotonic() - start)
        if spool.kept:
            body = {"positions": spool.positions, "vocab": spool.vocab, "checksums": spool.checksums}
            self.kept.keep("logits", facts, {**body, "tokens_per_s": self.text_tokens_per_s})
        return spool

    def compare_text(self, spool: LogitSpool, base: str) -> WindowComparison:
        """Token scores against the logits of the model whose key is `base`."""
        facts = {**self._asked.text_facts, "base": base}

        def read(body: Any) -> WindowComparison:
            self.text_tokens_per_s = float(body["tokens_per_s"])
            return _comparison_from(body)

        found = self.kept.recall("text", facts, read)
        if found is not None:
            self._recalled("text", len(self._asked.text.tokens))
            return found
        served, start = self._model(), time.monotonic()
        compared = compare_windows(
            served, self._asked.text.tokens, spool, self._asked.tokenizer, who=self._who, progress=self._progress
        )
        self.text_tokens_per_s = self._asked.text.tokens.numel() / (time.monotonic() - start)
        self.kept.keep("text", facts, {**_comparison_dict(compared), "tokens_per_s": self.text_tokens_per_s})
        return compared

    def answers(self) -> list[TaskResult]:
        """Results of every set, then of lm-eval's tasks, in the order in which they were asked for."""
        results: list[TaskResult] = []
        for choice_set in self._asked.sets:

            def own(lm: QtoolLM, one: ChoiceSet = choice_set) -> list[TaskResult]:
                return run_choice_sets(lm, [one], seed=self._asked.seed)

            results += self._ask("set", choice_set.name, {"items": choice_set.fingerprint}, own)
        seed, limit = self._asked.seed, self._asked.lm_eval_limit
        for name in self._asked.lm_eval_tasks:

            def named(lm: QtoolLM, one: str = name) -> list[TaskResult]:
                return run_named_tasks(lm, [one], self._asked.manager, limit=limit, seed=seed)

            results += self._ask("lm-eval", name, {"limit": limit, "seed": seed}, named)
        return results

    def _ask(
        self, part: str, name: str, facts: Mapping[str, Any], run: Callable[[QtoolLM], list[TaskResult]]
    ) -> list[TaskResult]:
        facts = {"name": name, **facts}
        found = self.kept.recall(part, facts, lambda body: [TaskResult(**result) for result in body])
        if found is not None:
            self._recalled(name, sum(len(r.scores) for r in found))
            return found
        results = run(self._lm(self._who))
        self.kept.keep(part, facts, [asdict(result) for result in results])
        return results

    def noise(self, spool: LogitSpool, first: list[TaskResult]) -> NoiseFloor:
        """The model against itself: one window of text, and every twentieth item of the first set, asked once more."""
        sets = self._asked.sets
        facts = {**self._asked.text_facts, "items": sets[0].fingerprint if sets else None}
        found = self.kept.recall("noise", facts, lambda body: NoiseFloor(**body))
        if found is None:
            found = self._noise(spool, first)
            self.kept.keep("noise", facts, asdict(found))
        return found

    def _noise(self, spool: LogitSpool, first: list[TaskResult]) -> NoiseFloor:
        kl = repeat_kl(self._model(), self._asked.text.tokens, spool, count=NOISE_WINDOWS)
        floor = (kl.double().mean().item(), kl.max().item(), len(kl))
        if not self._asked.sets:
            return NoiseFloor(*floor)
        asked, before = self._asked.sets[0], first[0]
        some = asked.items[::NOISE_EVERY][::-1]
        lm = self._lm(f"{self._who} again")
        again = run_choice_sets(lm, [ChoiceSet(asked.name, some, asked.source)], seed=self._asked.seed)[0]
        flips = sum(again.scores[i] != before.scores[i] for i in again.scores)
        margins = [abs(again.margins[i] - before.margins[i]) for i in again.scores if again.margins and before.margins]
        return NoiseFloor(*floor, items=len(some), flips=flips, max_margin_change=max(margins, default=None))

    def _lm(self, who: str) -> QtoolLM:
        def progress(what: str, done: int, total: int) -> None:
            self._progress(f"{who}: {what}", done, total)

        return QtoolLM(served=self._model(), tokenizer=self._asked.tokenizer, progress=progress)

    def _recalled(self, what: str, count: int) -> None:
        self.recalled.append(what)
        self._progress(f"{self._who}: {what}, kept from an earlier run", count, count)


def _comparison_dict(compared: WindowComparison) -> dict[str, Any]:
    scores = [{name: values.tolist() for name, values in vars(s).items()} for s in compared.scores]
    return {"scores": scores, "worst": [asdict(p) for p in compared.worst]}


def _comparison_from(body: Mapping[str, Any]) -> WindowComparison:
    scores = tuple(
        TokenScores(
            **{k: torch.tensor(v, dtype=torch.bool if k == "same_top1" else torch.float32) for k, v in window.items()}
        )
        for window in body["scores"]
    )
    worst = [
        Position(**{**p, **{side: tuple((t, float(v)) for t, v in p[side]) for side in ("base", "candidate")}})
        for p in body["worst"]
    ]
    return WindowComparison(scores, tuple(worst))
