"""The schemes that are tried on each group, and the error that each makes in a weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from qtool.quant.algorithms.rtn import rtn
from qtool.quant.errors import QtoolError
from qtool.quant.numerics import check_finite
from qtool.quant.scheme import QuantScheme, fit_group, parse_scheme
from qtool.quant.structure import ModelStructure

DEFAULT_SCHEMES = ("fp16", "w8", "w4g128", "w4g64", "w4g32")

GRANULARITIES = ("group", "layer")

Damage = dict[str, dict[str, float]]
"""Group name → scheme name → damage."""


@dataclass(frozen=True)
class Group:
    """Linears of one block that share a scheme, and the schemes to try on them.

    Attributes:
        name, block, kind, members: as in record.GroupSensitivity.
        schemes: distinct candidates, group sizes fitted to the input; 16-bit is not among them.
        keeps_float: whether 16-bit is a candidate.
    """

    name: str
    block: int
    kind: str
    members: tuple[str, ...]
    schemes: tuple[QuantScheme, ...]
    keeps_float: bool


def parse_candidates(names: Sequence[str]) -> list[QuantScheme | None]:
    """Scheme names → schemes, duplicates removed. Raises QtoolError for an unknown one, or fewer than two."""
    schemes = list(dict.fromkeys(parse_scheme(name) for name in names))
    for scheme in schemes:
        if scheme is not None and scheme.act_bits:
            raise QtoolError(f"scheme {scheme.name}: only weights are measured; name schemes such as w8, w4g64")
    if len(schemes) < 2 or schemes == [None]:
        raise QtoolError(f"--schemes {','.join(names)}: name at least two to choose from, such as fp16,w8,w4g64")
    return schemes


def check_granularity(granularity: str) -> None:
    """Raise QtoolError for one that is not known."""
    if granularity not in GRANULARITIES:
        raise QtoolError(f"--granularity {granularity}: use one of {', '.join(GRANULARITIES)}")


def candidate_groups(
    structure: ModelStructure,
    shapes: Mapping[str, tuple[int, int]],
    schemes: Sequence[QuantScheme | None],
    granularity: str = "group",
) -> list[Group]:
    """What shares a scheme, in model order: what servers fuse (q,k,v; gate,up), or by `layer` each projection.

    Raises:
        QtoolError: nothing divides a group's input, or an unknown granularity.
    """
    check_granularity(granularity)
    parts = [(g.kind, g.members) for g in structure.groups]
    if granularity == "layer":
        parts = [part for group in structure.groups for part in _by_projection(group.members)]
    groups = []
    for block in range(structure.num_blocks):
        prefix = structure.block_name(block)
        for kind, relative in parts:
            members = tuple(f"{prefix}.{member}" for member in relative)
            try:
                fitted = [fit_group(s, shapes[members[0]][1]) for s in schemes if s is not None]
            except QtoolError as error:
                raise QtoolError(f"layer {members[0]}: {error}") from None
            groups.append(
                Group(f"{prefix}.{kind}", block, kind, members, tuple(dict.fromkeys(fitted)), None in schemes)
            )
    return groups


def _by_projection(members: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """(`q_proj`, its layers) and so on; experts of one layer stay together."""
    found: dict[str, list[str]] = {}
    for member in members:
        found.setdefault(member.rpartition(".")[2], []).append(member)
    return [(name, tuple(layers)) for name, layers in found.items()]


def fake_quantize(layer: str, weight: Tensor, scheme: QuantScheme) -> Tensor:
    """`weight` [N, K] rounded to nearest under `scheme`, in its own dtype. Raises QtoolError for NaN or infinity."""
    check_finite(weight, f"layer {layer}: the weight")
    return rtn(weight, scheme, search="signed").dequantize(weight.dtype)
