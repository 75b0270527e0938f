"""How far each layer's stored weight lies from the base's: which layer is to blame when a candidate fails."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.formats import DAMAGE, QuantReader, open_reader
from qtool.quant.progress import ProgressFn, silent
from qtool.quant.structure import linear_shapes

FACTOR = 3.0  # a layer stands out at so many times what is usual for its scheme,
LEAST = 0.05  # and so much above it
TRANSFORMED = 0.5  # from this median on, weights were scaled or rotated before they were quantized
FEW = 4  # schemes of fewer layers are judged by the median of all


@dataclass(frozen=True)
class LayerDistance:
    """One linear layer of the candidate: how it is stored, and ‖W − W_base‖ / ‖W_base‖ (Frobenius)."""

    scheme: str
    distance: float


@dataclass(frozen=True)
class Suspect:
    """A layer that lies further from the base than is usual for layers stored alike; `usual` is their median."""

    layer: str
    scheme: str
    distance: float
    usual: float


def layer_distances(base: Path, candidate: Path, *, progress: ProgressFn = silent) -> dict[str, LayerDistance]:
    """Distance of every linear layer of two checkpoints, one layer in memory at a time; {} where one cannot be read.

    The base may be quantized itself. A layer that the two do not share, or in another shape, is left out.
    """
    found: dict[str, LayerDistance] = {}
    try:
        with Checkpoint(base) as ours, Checkpoint(candidate) as theirs:
            readers = open_reader(ours), open_reader(theirs)
            shapes = linear_shapes(ours)
            for number, name in enumerate(shapes, 1):
                pair = _weight(ours, readers[0], name), _weight(theirs, readers[1], name)
                if pair[0] is not None and pair[1] is not None and pair[0][1].shape == pair[1][1].shape:
                    (_, weight), (scheme, other) = pair[0], pair[1]
                    found[name] = LayerDistance(scheme, ((other - weight).norm() / weight.norm()).item())
                progress("weights", number, len(shapes))
    except (QtoolError, OSError, *DAMAGE):  # a decoration of the report must not end the run
        return {}
    return found


def _weight(checkpoint: Checkpoint, reader: QuantReader | None, name: str) -> tuple[str, Tensor] | None:
    """Name of the scheme, and the weight [out, in] float32."""
    scheme = None if reader is None else reader.scheme(name)
    if reader is not None and scheme is not None:
        return scheme.name, reader.read(name).dequantize()
    stored = f"{name}.weight"
    if stored not in checkpoint:
        return None
    weight = checkpoint.tensor(stored)
    return str(weight.dtype).removeprefix("torch."), weight.float()


def suspects(distances: Mapping[str, LayerDistance]) -> tuple[Suspect, ...]:
    """Layers that stand out, the furthest first.

    None where layers lie far from the base as a rule: then a rotation or scales were folded into them, and a distance
    says nothing.
    """
    values = [d.distance for d in distances.values() if math.isfinite(d.distance)]
    if not values or median(values) > TRANSFORMED:
        return ()
    found = []
    for layer, own in distances.items():
        alike = [d.distance for d in distances.values() if d.scheme == own.scheme and math.isfinite(d.distance)]
        usual = median(alike if len(alike) >= FEW else values)
        if not own.distance <= max(FACTOR * usual, usual + LEAST):  # NaN stands out too
            found.append(Suspect(layer, own.scheme, own.distance, usual))
    return tuple(sorted(found, key=lambda s: -s.distance if math.isfinite(s.distance) else -math.inf))


def with_distances(
    schemes: Mapping[str, Mapping[str, Any]], distances: Mapping[str, LayerDistance]
) -> dict[str, dict[str, Any]]:
    """The record of the layers (see `compare.layer_schemes`) with the distances; layers without a record are added."""
    names = dict.fromkeys([*schemes, *distances])
    found: dict[str, dict[str, Any]] = {
        name: {"scheme": distances[name].scheme} if name in distances else {} for name in names
    }
    for name, facts in found.items():
        facts |= schemes.get(name, {})
        if name in distances:
            facts["distance"] = distances[name].distance
    return found


def suspect_notes(found: Sequence[Suspect], most: int = 5) -> list[str]:
    """A line for each of the first `most` layers that stand out."""
    lines = []
    for s in found[:most]:
        how = f"by {100 * s.distance:.3g} %" if math.isfinite(s.distance) else "in values that are not finite numbers"
        usual = f"{100 * s.usual:.3g} % is usual for {s.scheme}"
        lines.append(f"look at layer {s.layer}: its weight differs from the base's {how}, where {usual}")
    if len(found) > most:
        lines.append(f"{len(found) - most} more layers stand out in the same way")
    return lines
