"""Where a model computes NaN or infinity: damage, not a loss of quality that some limit could allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qtool.evalsets.divergence import SHOWN_TOKENS, WindowComparison
from qtool.evalsets.harness import Generated
from qtool.evalsets.task_runs import TaskResult


@dataclass(frozen=True)
class NotFinite:
    """One part of the evaluation in which a model computes NaN or infinity.

    Attributes:
        part: "text", "generations", or the name of a set.
        count, total: of how many; `unit` says of what ("tokens", "outputs" or "items").
        first: the first of them, for people.
    """

    part: str
    count: int
    total: int
    unit: str
    first: str

    def __str__(self) -> str:
        return f"{self.part}: NaN or infinity in {self.count:,} of {self.total:,} {self.unit}, first {self.first}"


def in_text(compared: WindowComparison, tokens: Tensor, tokenizer: Any) -> NotFinite | None:
    """Of the predictions for `tokens` [windows, context]; None where all are finite."""
    broken = [~(s.kl.isfinite() & s.candidate_nll.isfinite()) for s in compared.scores]
    for window, own in enumerate(broken):
        if own.any():
            token = int(own.nonzero()[0, 0]) + 1  # the one that was to be predicted
            before = tokenizer.decode(tokens[window, max(0, token - SHOWN_TOKENS) : token].tolist())
            first = f"for token {token} of window {window}, after {before!r}"
            return NotFinite("text", sum(int(b.sum()) for b in broken), sum(map(len, broken)), "tokens", first)
    return None


def in_outputs(outputs: Sequence[Generated]) -> NotFinite | None:
    """Of outputs to the prompts from the text; None where none broke off."""
    broken = [i for i, output in enumerate(outputs) if output.broken]
    if not broken:
        return None
    first = f"in that of prompt {broken[0]}, after {len(outputs[broken[0]].tokens)} tokens"
    return NotFinite("generations", len(broken), len(outputs), "outputs", first)


def in_items(result: TaskResult) -> NotFinite | None:
    """Of a set's items; None where all are finite."""
    if not result.broken:
        return None
    item, where = next(iter(result.broken.items()))
    first = f"in {item!r}" + (f", {where}" if where else "")
    return NotFinite(result.name, len(result.broken), len(result.texts), "items", first)
