"""What a method is: stages joined by +, each with its place in the order in which they are applied."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from qtool.quant.errors import QtoolError

Scaling = Literal["awq", "smoothquant"]

# one line for each place in the order; a method takes at most one stage of each
PLACES = (("rotation",), ("awq", "smoothquant"), ("rtn", "gptq", "rounding"))
GRAMMAR = "join by +, in this order, at most one of each: " + "; ".join(" or ".join(place) for place in PLACES)


@dataclass(frozen=True)
class Stages:
    """What a method does, in this order.

    Attributes:
        rotate: the whole model's residual stream and values are rotated before any block is quantized.
        scale: whose channel scales each block gets; None: none.
        compensate: GPTQ in place of rounding to the nearest code.
        search: the rounding search over each block, out from GPTQ's codes.
    """

    rotate: bool = False
    scale: Scaling | None = None
    compensate: bool = False
    search: bool = False

    @property
    def calibrated(self) -> bool:
        """Whether some stage looks at activations."""
        return self.scale is not None or self.compensate


def parse_method(name: str) -> Stages:
    """The stages of a method: `gptq`, `awq+rounding`, `rotation+rtn`. Without one that rounds, codes are the nearest.

    Raises:
        QtoolError: an unknown stage, two that exclude each other, or another order than theirs.
    """
    parts = name.split("+")
    places = {stage: i for i, place in enumerate(PLACES) for stage in place}
    if any(part not in places for part in parts):
        raise QtoolError(f"unknown method {name!r}: {GRAMMAR}")
    for before, after in pairwise(parts):
        if places[before] == places[after]:
            raise QtoolError(f"method {name!r}: {before} and {after} do not combine, take one of them; {GRAMMAR}")
        if places[before] > places[after]:
            raise QtoolError(f"method {name!r}: {after} comes before {before}; {GRAMMAR}")
    return Stages(
        rotate="rotation" in parts,
        scale="awq" if "awq" in parts else "smoothquant" if "smoothquant" in parts else None,
        compensate="gptq" in parts or "rounding" in parts,
        search="rounding" in parts,
    )
