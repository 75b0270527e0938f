"""One model under evaluation: loaded when it is asked something that no earlier run has answered."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from qtool.evalsets.divergence import (
    BROKEN_BASE,
    LogitSpool,
    Position,
    WindowComparison,
    compare_windows,
    repeat_kl,
    spool_base,
)
from qtool.evalsets.harness import Generated, QtoolLM, Served
from qtool.evalsets.items import ItemSet
from qtool.evalsets.kept import Kept
from qtool.evalsets.metrics import TokenScores
from qtool.evalsets.noise import NOISE_ITEMS, NOISE_WINDOWS, NoiseFloor, noise_floor, set_noise, some_of
from qtool.evalsets.not_finite import NotFinite, in_items, in_outputs, in_text
from qtool.evalsets.parting import Prompts, from_json, generate_greedy, to_json
from qtool.evalsets.task_runs import TaskResult, result_from, run_named_tasks, run_set
from qtool.evalsets.windows import TextWindows
from qtool.quant.errors import QtoolError
from qtool.quant.progress import ProgressFn

Serve = Callable[[Path], Served]


@dataclass(frozen=True)
class Questions:
    """What every model is asked. `manager` is lm-eval's index of tasks, None where none is asked for."""

    text: TextWindows
    prompts: Prompts
    sets: tuple[ItemSet, ...]
    manager: Any
    lm_eval_tasks: tuple[str, ...]
    lm_eval_limit: int | None
    tokenizer: Any
    seed: int

    @property
    def text_facts(self) -> dict[str, Any]:
        return {"text": self.text.fingerprint, "shape": list(self.text.tokens.shape)}


class Subject:
    """A model folder and what it answers: kept answers where there are some, else its own.

    Answers in which the model computes NaN or infinity are not kept; `not_finite` tells of them, or they are a
    QtoolError where a model `must_be_finite`.
    """

    def __init__(
        self,
        who: str,
        folder: Path,
        serve: Serve,
        questions: Questions,
        kept: Kept,
        progress: ProgressFn,
        *,
        must_be_finite: bool = False,
    ) -> None:
        self.folder, self.kept = folder, kept
        self.load_seconds = 0.0
        self.text_tokens_per_s = 0.0
        self.recalled: list[str] = []  # parts that an earlier run answered
        self.not_finite: list[NotFinite] = []
        self._who, self._serve, self._asked, self._progress = who, serve, questions, progress
        self._must_be_finite = must_be_finite
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

    def _is_finite(self, *parts: NotFinite | None) -> bool:
        """Take down what is not. Raises QtoolError where nothing may be."""
        found = [part for part in parts if part is not None]
        if found and self._must_be_finite:
            raise QtoolError(f"{found[0]}: {BROKEN_BASE}")
        self.not_finite += found
        return not found

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
        if self._is_finite(in_text(compared, self._asked.text.tokens, self._asked.tokenizer)):
            self.kept.keep("text", facts, {**_comparison_dict(compared), "tokens_per_s": self.text_tokens_per_s})
        return compared

    def outputs(self) -> list[Generated]:
        """Greedy outputs to the prompts from the text, in their order."""
        return self._outputs("outputs", self._asked.prompts)

    def _outputs(self, part: str, prompts: Prompts) -> list[Generated]:
        if not prompts.tokens:
            return []
        facts = {"prompts": prompts.fingerprint}
        found = self.kept.recall(part, facts, from_json)
        if found is not None:
            if part == "outputs":
                self._recalled("generations", len(found))
            return found
        self._progress(f"{self._who}: generations", 0, len(prompts.tokens))
        outputs = generate_greedy(self._model(), prompts)
        if self._is_finite(in_outputs(outputs)):
            self.kept.keep(part, facts, to_json(outputs))
        return outputs

    def answers(self) -> list[TaskResult]:
        """Results of every set, then of lm-eval's tasks, in the order in which they were asked for."""
        results: list[TaskResult] = []
        for asked in self._asked.sets:

            def own(lm: QtoolLM, one: ItemSet = asked) -> list[TaskResult]:
                return [run_set(lm, one, seed=self._asked.seed)]

            results += self._ask("set", asked.name, {"items": asked.fingerprint}, own)
        for name in self._asked.lm_eval_tasks:
            results += self._named("lm-eval", name, self._asked.lm_eval_limit)
        return results

    def _named(self, part: str, name: str, limit: int | None) -> list[TaskResult]:
        """Results of one of lm-eval's tasks (several, where it is a group), on its first `limit` items."""
        seed = self._asked.seed

        def run(lm: QtoolLM) -> list[TaskResult]:
            return run_named_tasks(lm, [name], self._asked.manager, limit=limit, seed=seed)

        return self._ask(part, name, {"limit": limit, "seed": seed}, run)

    def _ask(
        self, part: str, name: str, facts: Mapping[str, Any], run: Callable[[QtoolLM], list[TaskResult]]
    ) -> list[TaskResult]:
        facts = {"name": name, **facts}
        found = self.kept.recall(part, facts, lambda body: [result_from(result) for result in body])
        again = part.endswith("noise")
        if found is not None:
            if not again:
                self._recalled(name, sum(len(r.scores) for r in found))
            return found
        results = run(self._lm(f"{self._who} again" if again else self._who))
        if self._is_finite(*map(in_items, results)):
            self.kept.keep(part, facts, [asdict(result) for result in results])
        return results

    def noise(self, spool: LogitSpool, first: Sequence[TaskResult], outputs: Sequence[Generated]) -> NoiseFloor:
        """The model against itself, asked again in reverse order: one window of text, some items of every set and of
        every task (see `noise.some_of`), and the prompts for generation.
        """
        before = {result.name: result for result in first}
        sets = [set_noise(before[s.name], self._again(s)) for s in self._asked.sets]
        for name in self._asked.lm_eval_tasks:
            limit = min(self._asked.lm_eval_limit or NOISE_ITEMS, NOISE_ITEMS)
            again = self._named("lm-eval-noise", name, limit)
            sets += [set_noise(before[r.name], r) for r in again if r.name in before]
        prompts = self._asked.prompts
        reverse = Prompts(prompts.tokens[::-1], prompts.max_tokens)
        return noise_floor(self._text_noise(spool), sets, outputs, self._outputs("outputs-noise", reverse)[::-1])

    def _again(self, asked: ItemSet) -> TaskResult:
        def run(lm: QtoolLM) -> list[TaskResult]:
            return [run_set(lm, some_of(asked), seed=self._asked.seed)]

        return self._ask("set-noise", asked.name, {"items": asked.fingerprint}, run)[0]

    def _text_noise(self, spool: LogitSpool) -> dict[str, Any]:
        facts = self._asked.text_facts
        found = self.kept.recall("noise", facts, lambda body: {k: body[k] for k in ("mean_kl", "max_kl", "tokens")})
        if found is None:
            kl = repeat_kl(self._model(), self._asked.text.tokens, spool, count=NOISE_WINDOWS)
            if not kl.isfinite().all():
                raise QtoolError(f"NaN or infinity where the text was computed again: {BROKEN_BASE}")
            found = {"mean_kl": kl.double().mean().item(), "max_kl": kl.max().item(), "tokens": len(kl)}
            self.kept.keep("noise", facts, found)
        return found

    def _lm(self, who: str) -> QtoolLM:
        def progress(what: str, done: int, total: int) -> None:
            self._progress(f"{who}: {what}", done, total)

        return QtoolLM(served=self._model(), tokenizer=self._asked.tokenizer, keep_broken=True, progress=progress)

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
