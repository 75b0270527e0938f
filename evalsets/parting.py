"""Where greedy generations of two models part: prompts, positions, and what is told of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qtool.evalsets.harness import Generated, Served
from qtool.runtime.engine.params import SamplingParams

PROMPT_TOKENS = 32
OUTPUT_TOKENS = 64
SHOWN = 5  # examples
TEXT_SET = "text"  # name of the prompts that are taken from the text


@dataclass(frozen=True)
class Prompts:
    """Token sequences to be continued by `max_tokens` tokens."""

    tokens: tuple[tuple[int, ...], ...]
    max_tokens: int

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of the prompts and the length of the outputs."""
        return hashlib.sha256(json.dumps([self.tokens, self.max_tokens]).encode()).hexdigest()


@dataclass(frozen=True)
class Example:
    """One prompt whose outputs part: the end of the prompt with what both have in common, and how each goes on."""

    position: int
    before: str
    base: str
    candidate: str


@dataclass(frozen=True)
class Parting:
    """Where the outputs of base and candidate part, over the prompts of one set.

    Attributes:
        name: the set, or TEXT_SET.
        max_tokens: the longest output.
        positions: for each prompt, how many tokens both outputs have in common before they differ (0: the first token
            differs; the end of one output counts as a token); None where they are the same to their end.
        median: the least number of tokens after which half of the outputs have parted; None where fewer part.
        same: how many never part.
        mean_common: mean length of the common beginning, in tokens.
        examples: those that part first.
    """

    name: str
    max_tokens: int
    positions: tuple[int | None, ...]
    median: int | None
    same: int
    mean_common: float
    examples: tuple[Example, ...]


def text_prompts(windows: Tensor, count: int) -> Prompts:
    """`count` prompts from `windows` [windows, context]: equally many a window, equally spaced, none overlapping; fewer
    where the windows hold no more. A prompt has PROMPT_TOKENS tokens, or a quarter of the context where that is less.
    """
    size = min(PROMPT_TOKENS, max(1, windows.shape[1] // 4))
    each = min(-(-count // len(windows)), windows.shape[1] // size)
    step = windows.shape[1] // max(1, each)
    starts = [(w, i * step) for i in range(each) for w in range(len(windows))][:count]
    tokens = tuple(tuple(windows[w, at : at + size].tolist()) for w, at in starts)
    return Prompts(tokens, OUTPUT_TOKENS)


def generate_greedy(served: Served, prompts: Prompts) -> list[Generated]:
    """Greedy outputs in the prompts' order, broken ones as well."""
    params = SamplingParams(max_tokens=prompts.max_tokens, temperature=0.0)
    outputs = served.generate(prompts.tokens, [params] * len(prompts.tokens), keep_broken=True)
    return list(map(Generated.of, outputs))


def parting_position(a: Sequence[int], b: Sequence[int]) -> int | None:
    """How many tokens two outputs have in common before they differ; None where they are equal."""
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def median_position(positions: Sequence[int | None]) -> int | None:
    """The least k such that at least half of the outputs part at or before k; None where fewer part at all.

    The median of Kaplan and Meier's estimator (1958): outputs that never part are longer than was looked.
    """
    parted = sorted(p for p in positions if p is not None)
    need = -(-len(positions) // 2)
    return parted[need - 1] if 0 < need <= len(parted) else None


def parting(
    name: str,
    max_tokens: int,
    base: Sequence[Generated],
    candidate: Sequence[Generated],
    prompts: Sequence[str],
    tokenizer: Any,
) -> Parting:
    """Compare outputs to the same `prompts` (texts, for the examples), in one order."""
    pairs = list(zip(base, candidate, strict=True))
    positions = tuple(parting_position(b.tokens, c.tokens) for b, c in pairs)
    common = [len(b.tokens) if p is None else p for p, (b, _) in zip(positions, pairs)]
    first = sorted((p, i) for i, p in enumerate(positions) if p is not None)[:SHOWN]
    return Parting(
        name=name,
        max_tokens=max_tokens,
        positions=positions,
        median=median_position(positions),
        same=sum(p is None for p in positions),
        mean_common=sum(common) / len(common),
        examples=tuple(_example(at, prompts[i], *pairs[i], tokenizer) for at, i in first),
    )


def _example(at: int, prompt: str, base: Generated, candidate: Generated, tokenizer: Any) -> Example:
    common = tokenizer.decode(list(base.tokens[:at]))
    ends = (tokenizer.decode(list(g.tokens[at:])) for g in (base, candidate))
    return Example(at, prompt[-120:] + common, *ends)


def share_in_common(positions: Sequence[int | None], max_tokens: int) -> list[float]:
    """Share of outputs that still agree after 1, 2, … `max_tokens` tokens."""
    return [
        sum(p is None or p >= k for p in positions) / len(positions) if positions else 0.0
        for k in range(1, max_tokens + 1)
    ]


def to_json(outputs: Sequence[Generated]) -> list[dict[str, Any]]:
    """Whole outputs as plain JSON; `from_json` is the way back."""
    return [{"text": o.text, "tokens": list(o.tokens)} for o in outputs]


def from_json(body: Sequence[Mapping[str, Any]]) -> list[Generated]:
    """Raises ValueError, KeyError or TypeError where `body` is not what `to_json` gave."""
    return [Generated(str(o["text"]), tuple(map(int, o["tokens"]))) for o in body]
