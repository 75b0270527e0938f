"""The closed loop: analyze, plan, quantize, compare; where the gate does not pass, a larger budget and again."""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qtool.evalsets.builtin import BUILT_IN, item_set
from qtool.evalsets.compare import DEFAULT_SET, Comparison, compare
from qtool.evalsets.gate import Thresholds
from qtool.evalsets.items import check_sets
from qtool.evalsets.kept import baseline_folder
from qtool.evalsets.report import write_report
from qtool.evalsets.report_cells import reasons
from qtool.evalsets.statistics import Verdict
from qtool.evalsets.windows import text_windows
from qtool.quant.artifact import check_apart, check_target, publish
from qtool.quant.calibration import CalibrationSet
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.device import resolve_device
from qtool.quant.documents import load_tokenizer
from qtool.quant.errors import QtoolError
from qtool.quant.fingerprint import model_fingerprint
from qtool.quant.job import check_seed
from qtool.quant.pipeline import quantize
from qtool.quant.progress import ProgressFn, silent
from qtool.quant.scheme import QuantPlan
from qtool.quant.textfile import check_folder, read_json
from qtool.sensitivity.allocate import Allocation, Keep, Latency, Limits, allocate, size_range
from qtool.sensitivity.candidates import DEFAULT_SCHEMES
from qtool.sensitivity.latency import group_latency
from qtool.sensitivity.probe import analyze, check_request, outline
from qtool.sensitivity.record import Sensitivity
from qtool.sensitivity.stages import alone, keep, recall, stage_path

log = logging.getLogger(__name__)

_ANALYZED = ("schemes", "metric", "rounding", "granularity")  # of a Wish: what an analysis depends on
_COMPARED = ("thresholds", "windows", "max_windows", "context", "tasks")  # of a Wish: what a verdict depends on


@dataclass(frozen=True)
class Wish:
    """What `compress` is asked for.

    Attributes:
        limits: the first budget; `max_damage` is not among them.
        keep: schemes fixed by layer name.
        thresholds: the gate.
        schemes, metric, rounding, granularity: of the analysis.
        method: of quantizing.
        batch: sequences in the decode step that a limit of time is about.
        relax: by how much the budget grows at each step, as a share.
        max_steps: budgets that are tried at most.
        windows, context, text, tasks: of the comparison, see evalsets.compare; windows double up to `max_windows` while
            the verdict is INCONCLUSIVE.
        device: auto, cpu, cuda or cuda:N.
        seed: of calibration and comparison.
    """

    limits: Limits
    keep: tuple[Keep, ...] = ()
    thresholds: Thresholds = field(default_factory=Thresholds)
    schemes: tuple[str, ...] = DEFAULT_SCHEMES
    metric: str = "fisher"
    rounding: str = "rtn"
    granularity: str = "group"
    method: str = "gptq"
    batch: int = 1
    relax: float = 0.05
    max_steps: int = 12
    windows: int = 8
    max_windows: int = 64
    context: int = 1024
    text: Path | None = None
    tasks: tuple[str, ...] = (DEFAULT_SET,)
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.001 <= self.relax <= 1:
            raise QtoolError(f"--relax {self.relax:g}: give a share between 0.1 and 100 %")
        if self.max_windows < self.windows:
            raise QtoolError(f"--max-windows {self.max_windows}: is below --windows {self.windows}")


@dataclass(frozen=True)
class Step:
    """One budget that was tried.

    Attributes:
        limits: the budget, as in Limits.
        average_bits, total_bytes, latency_ms, damage: what the plan came to, see Allocation.
        verdict: the gate's; `windows` of text that it took, `reasons` in words where it did not pass.
        artifact: fingerprint of the quantized model.
    """

    limits: dict[str, float | int | None]
    average_bits: float
    total_bytes: int
    latency_ms: float | None
    damage: float
    verdict: Verdict
    windows: int
    reasons: tuple[str, ...]
    artifact: str

    @classmethod
    def read(cls, path: Path) -> Step:
        return cls.from_dict(read_json(path))

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> Step:
        return cls(**{**facts, "verdict": Verdict(facts["verdict"]), "reasons": tuple(facts["reasons"])})

    def in_words(self) -> str:
        """`4.73 bits per weight, 93.1 MB: FAIL (perplexity ...)`."""
        time = "" if self.latency_ms is None else f", {self.latency_ms:.3f} ms in the linears"
        why = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        return f"{self.average_bits:.3f} bits per weight, {self.total_bytes / 1e6:.2f} MB{time}: {self.verdict}{why}"


@dataclass(frozen=True)
class Outcome:
    """How it ended.

    Attributes:
        verdict: of the last step.
        steps: every budget that was tried.
        out: the artifact; None where the gate did not pass.
        report: folder of the last step's comparison.
        repeated: an equal call had been here before, and nothing was left to do.
    """

    verdict: Verdict
    steps: tuple[Step, ...]
    out: Path | None
    report: Path
    repeated: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "out": None if self.out is None else str(self.out),
            "report": str(self.report),
            "steps": [asdict(step) for step in self.steps],
        }


def compress(
    folder: Path,
    out: Path,
    wish: Wish,
    *,
    analysis: CalibrationSet,
    calibration: CalibrationSet,
    name: str | None = None,
    overwrite: bool = False,
    command: Sequence[str] = ("qtool", "compress"),
    progress: ProgressFn = silent,
    say: Callable[[str], None] = log.info,
) -> Outcome:
    """The smallest step of the budget at which the quantized model passes the gate, made and proven.

    Every stage is kept by its fingerprint: an equal call takes the stages that it finds and goes on after them; where
    the artifact at `out` is that call's own, nothing is done. The candidate of a step lies beside `out` under a hidden
    name until the gate has passed, and is renamed then; the report goes beside it too (`NAME-report`).

    Args:
        folder: the 16-bit model.
        out: the artifact's folder.
        analysis, calibration: tokens for analyzing and for quantizing.
        name: what to call the model in reports.
        overwrite: replace `out` where it exists and is not the outcome of an equal call.

    Raises:
        QtoolError: an impossible wish, or another run at work on `out`, before work begins; whatever the stages refuse.
    """
    check_request(wish.schemes, wish.metric, wish.device, wish.rounding, wish.granularity)
    check_apart(out, folder)
    with Checkpoint(folder) as checkpoint:
        blank = outline(checkpoint, wish.schemes, wish.granularity)
        facts = {
            "model": blank.fingerprint,
            "analysis": analysis.fingerprint,
            "calibration": calibration.fingerprint,
            "device": resolve_device(wish.device).type,
        }
    words = tuple(command)
    run = _Run(folder, out, wish, analysis, calibration, facts, name or str(folder), overwrite, words, progress, say)
    if (done := run.finished()) is not None:
        return done
    check_target(out, overwrite=overwrite)
    check_folder(run.report)
    check_seed(wish.seed)
    check_sets([item_set(task) for task in wish.tasks])
    text_windows(load_tokenizer(folder), wish.text, windows=wish.windows, context=wish.context)  # too little is refused
    latency = run.possible(blank)
    with alone("compress", out):
        return run.loop(latency)


@dataclass(frozen=True)
class _Run:
    """One call of compress(): its arguments, and the steps as methods."""

    folder: Path
    out: Path
    wish: Wish
    analysis: CalibrationSet
    calibration: CalibrationSet
    facts: dict[str, str]
    name: str
    overwrite: bool
    command: tuple[str, ...]
    progress: ProgressFn
    say: Callable[[str], None]

    @property
    def report(self) -> Path:
        return self.out.with_name(f"{self.out.name}-report")

    def _outcome_path(self) -> Path:
        facts = {**self.facts, "wish": asdict(self.wish), "sources": self._sources(), "out": str(self.out.absolute())}
        return stage_path("compress", facts)

    def finished(self) -> Outcome | None:
        """What an equal call came to, where its artifact still lies at `out` as it left it."""

        def read(path: Path) -> Outcome | None:
            document = read_json(path)
            steps = tuple(Step.from_dict(step) for step in document["steps"])
            if self.out.is_dir() and _fingerprint(self.out) == steps[-1].artifact:
                return Outcome(steps[-1].verdict, steps, self.out, self.report, repeated=True)
            return None

        return recall(self._outcome_path(), read)

    def possible(self, blank: Sensitivity) -> Latency | None:
        """The kernels' times, where a limit is of time. Raises QtoolError for a budget that no plan keeps."""
        latency = None
        if self.wish.limits.max_latency_ms is not None:
            device = resolve_device(self.wish.device)
            latency = group_latency(blank, device, tokens=self.wish.batch, progress=self.progress)
        allocate(blank, self.wish.limits, keep=self.wish.keep, latency=latency)
        return latency

    def loop(self, latency: Latency | None) -> Outcome:
        sensitivity = self._analyze()
        steps: list[Step] = []
        for limits, plan in self._plans(sensitivity, latency):
            step = self._step(limits, plan)
            steps.append(step)
            self.say(f"step {len(steps)}: {step.in_words()}")
            if step.verdict is Verdict.PASS:
                return self._finish(self._candidate(plan.plan), steps)
            shutil.rmtree(self._candidate(plan.plan), ignore_errors=True)
        return Outcome(steps[-1].verdict, tuple(steps), None, self.report)

    def _plans(self, sensitivity: Sensitivity, latency: Latency | None) -> Iterator[tuple[Limits, Allocation]]:
        """The plan of the first budget, then those of larger ones, each another plan, down to no damage."""
        limits, before = self.wish.limits, None
        for _ in range(self.wish.max_steps):
            plan = allocate(sensitivity, limits, keep=self.wish.keep, latency=latency)
            precise = size_range(sensitivity, self.wish.keep)[1]
            while before is not None and plan.plan == before.plan and plan.linear_bytes < precise:
                limits = relaxed(limits, self.wish.relax)
                plan = allocate(sensitivity, limits, keep=self.wish.keep, latency=latency)
            if before is not None and plan.plan == before.plan:
                return  # there is none more precise
            yield limits, plan
            limits, before = relaxed(limits, self.wish.relax), plan

    def _analyze(self) -> Sensitivity:
        facts = {k: self.facts[k] for k in ("model", "analysis", "device")}
        asked = {k: v for k, v in asdict(self.wish).items() if k in _ANALYZED}
        path = stage_path("analyze", {**facts, **asked})
        found = recall(path, Sensitivity.load)
        if found is None:
            found = analyze(
                self.folder,
                name=self.name,
                schemes=self.wish.schemes,
                metric=self.wish.metric,
                rounding=self.wish.rounding,
                granularity=self.wish.granularity,
                calibration=self.analysis,
                device=self.wish.device,
                progress=self.progress,
            )
            keep(path, found.to_json())
        return found

    def _plan_facts(self, plan: QuantPlan) -> dict[str, Any]:
        return {**self.facts, "plan": plan.to_json(), "method": self.wish.method, "seed": self.wish.seed}

    def _candidate(self, plan: QuantPlan) -> Path:
        key = stage_path("candidate", self._plan_facts(plan)).stem[-12:]
        return self.out.with_name(f".{self.out.name}.candidate-{key}")

    def _step(self, limits: Limits, plan: Allocation) -> Step:
        """Quantize and compare, or what an equal run found; the candidate is there where the gate passed."""
        asked = {k: v for k, v in asdict(self.wish).items() if k in _COMPARED}
        path = stage_path("step", {**self._plan_facts(plan.plan), **asked, "sources": self._sources()})
        known = recall(path, Step.read)
        if known is not None and known.verdict is not Verdict.PASS:
            return known
        candidate = self._quantize(plan.plan)
        if known is not None and known.artifact == _fingerprint(candidate) and self.report.is_dir():
            return known
        result, windows = self._compare(candidate)
        write_report(result, self.report, self.command)
        step = Step(
            limits=asdict(limits),
            average_bits=plan.average_bits,
            total_bytes=plan.total_bytes,
            latency_ms=plan.latency_ms,
            damage=plan.damage,
            verdict=result.verdict,
            windows=windows,
            reasons=tuple(reasons(result)),
            artifact=_fingerprint(candidate),
        )
        keep(path, json.dumps(asdict(step)) + "\n")
        return step

    def _sources(self) -> dict[str, str]:
        """sha256 of every file that the comparison reads."""
        files = [self.wish.text, *(Path(task) for task in self.wish.tasks if task not in BUILT_IN)]
        return {str(f): hashlib.sha256(f.read_bytes()).hexdigest() for f in files if f is not None}

    def _quantize(self, plan: QuantPlan) -> Path:
        candidate = self._candidate(plan)
        if not candidate.is_dir():  # it appears when it is complete
            quantize(
                self.folder,
                candidate,
                plan=plan,
                method=self.wish.method,
                calibration=self.calibration,
                device=self.wish.device,
                seed=self.wish.seed,
                source=self.name,
                progress=self.progress,
            )
        return candidate

    def _compare(self, candidate: Path) -> tuple[Comparison, int]:
        """The comparison, on more windows of text for as long as it is INCONCLUSIVE and more windows can settle it."""
        windows = self.wish.windows
        result = self._compare_on(candidate, windows)
        while result.verdict is Verdict.INCONCLUSIVE and windows < self.wish.max_windows:
            asked = [m.settle for m in result.metrics if m.unit == "windows" and m.settle is not None]
            if not asked:
                break
            more = min(self.wish.max_windows, max(2 * windows, *asked))
            self.say(f"INCONCLUSIVE on {windows} windows of text: comparing on {more}")
            try:
                result, windows = self._compare_on(candidate, more), more
            except QtoolError as error:  # the text ends before
                self.say(f"more windows cannot be had: {error}")
                break
        return result, windows

    def _compare_on(self, candidate: Path, windows: int) -> Comparison:
        return compare(
            self.folder,
            candidate,
            data=self.wish.text,
            windows=windows,
            context=self.wish.context,
            tasks=self.wish.tasks,
            thresholds=self.wish.thresholds,
            device=self.wish.device,
            seed=self.wish.seed,
            progress=self.progress,
            cache=baseline_folder(),
        )

    def _finish(self, candidate: Path, steps: list[Step]) -> Outcome:
        publish(candidate, self.out, overwrite=self.overwrite)
        for other in self.out.parent.glob(f".{glob.escape(self.out.name)}.candidate-*"):
            shutil.rmtree(other, ignore_errors=True)
        outcome = Outcome(Verdict.PASS, tuple(steps), self.out, self.report)
        keep(self._outcome_path(), json.dumps(outcome.to_dict()) + "\n")
        return outcome


def relaxed(limits: Limits, share: float) -> Limits:
    """Every limit larger by `share`."""

    def grown(value: float | None) -> float | None:
        return None if value is None else value * (1 + share)

    size = limits.max_bytes
    return Limits(
        max_bytes=None if size is None else math.ceil(size * (1 + share)),
        avg_bits=grown(limits.avg_bits),
        max_latency_ms=grown(limits.max_latency_ms),
    )


def _fingerprint(folder: Path) -> str:
    with Checkpoint(folder) as checkpoint:
        return model_fingerprint(checkpoint)
