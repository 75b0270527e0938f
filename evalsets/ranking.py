"""Several candidates of one base, best first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from qtool.evalsets.compare import Comparison
from qtool.evalsets.statistics import Verdict

_ORDER = (Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.FAIL)


@dataclass(frozen=True)
class Ranked:
    """One candidate's place: 1 is the best. `bytes` of its weights, `mean_kl` in nats per token."""

    rank: int
    candidate: str
    verdict: Verdict
    bytes: int
    mean_kl: float


def ranked(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Best first: PASS before INCONCLUSIVE before FAIL, then fewer bytes of weights, then less divergence.

    What passes is good enough, so size decides there; a KL that is not a number comes last among equals.
    """

    def key(c: Comparison) -> tuple[int, int, float]:
        kl = c.divergence.kl.mean
        return _ORDER.index(c.verdict), c.candidate.bytes, kl if math.isfinite(kl) else math.inf

    return sorted(comparisons, key=key)


def ranking(comparisons: Sequence[Comparison]) -> list[Ranked]:
    """The places of all candidates, best first."""
    return [
        Ranked(place, c.candidate.name, c.verdict, c.candidate.bytes, c.divergence.kl.mean)
        for place, c in enumerate(ranked(comparisons), 1)
    ]


def worst_verdict(comparisons: Sequence[Comparison]) -> Verdict:
    """What a run with several candidates comes to: it passes where every one of them does."""
    return max((c.verdict for c in comparisons), key=_ORDER.index)


def to_document(comparisons: Sequence[Comparison]) -> dict[str, object]:
    """compare.json: the comparison itself, or the ranking with all comparisons in its order."""
    if len(comparisons) == 1:
        return comparisons[0].to_dict()
    places = [asdict(r) for r in ranking(comparisons)]
    for place in places:
        place["mean_kl"] = place["mean_kl"] if math.isfinite(place["mean_kl"]) else None
    return {
        "qtool_compare": 1,
        "verdict": worst_verdict(comparisons),
        "ranking": places,
        "comparisons": [c.to_dict() for c in ranked(comparisons)],
    }
