"""What an analysis found (Sensitivity), and its JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool._version import __version__
from qtool.quant.errors import QtoolError
from qtool.quant.scheme import FLOAT, layer_bytes, parse_scheme, scheme_name
from qtool.quant.textfile import read_json

FORMAT = 3

UNITS = {
    "fisher": "predicted KL divergence of the logits, nats per token",
    "kl": "measured KL divergence of the logits, nats per token",
    "output": "squared relative error of the group's output",
    "weight": "squared relative error of the group's weights",
}
KL_METRICS = ("fisher", "kl")  # whose damage is a KL divergence in nats
ROUNDINGS = ("rtn", "gptq")


def check_rounding(rounding: str) -> None:
    """Raise QtoolError for a rounding of candidates that is not known."""
    if rounding not in ROUNDINGS:
        raise QtoolError(f"--rounding {rounding}: use one of {', '.join(ROUNDINGS)}")


@dataclass(frozen=True)
class GroupSensitivity:
    """Linears that share one scheme, and what each candidate scheme does to the model when they alone are quantized.

    Attributes:
        name: `model.layers.3.qkv`.
        block, kind: `3`, `qkv`.
        members: full layer names.
        damage: scheme name → damage in the metric's unit; holds every candidate, `fp16` (0.0) where it is one.
    """

    name: str
    block: int
    kind: str
    members: tuple[str, ...]
    damage: Mapping[str, float]


@dataclass(frozen=True)
class Sensitivity:
    """One analysis of one model.

    Attributes:
        model: what the user called it.
        fingerprint: of the checkpoint (quant.fingerprint).
        metric: a key of UNITS.
        rounding: how the candidates were rounded, one of ROUNDINGS.
        calibration: source, number and length of sequences, fingerprint.
        forward_passes: what the probe cost, in passes of all samples through all blocks, quantizing apart.
        shapes: layer → (rows, cols), every linear of the blocks.
        weight_error: layer → scheme name → ‖W − Q‖ / ‖W‖.
        float_bytes: of a weight that is not quantized, as the checkpoint stores it: 2, or 4 in float32.
        other_bytes: true bytes of all other weights (embedding, norms, biases, head; a tied head counts once).
        groups: in model order.
    """

    model: str
    fingerprint: str
    metric: str
    rounding: str
    calibration: Mapping[str, Any]
    forward_passes: float
    shapes: Mapping[str, tuple[int, int]]
    weight_error: Mapping[str, Mapping[str, float]]
    float_bytes: int
    other_bytes: int
    groups: tuple[GroupSensitivity, ...]

    def group_bytes(self, group: GroupSensitivity, scheme: str) -> int:
        """True bytes of the group's weights under a scheme, scales and zero points included."""
        found = parse_scheme(scheme)
        return sum(layer_bytes(found, *self.shapes[name], self.float_bytes) for name in group.members)

    def to_json(self) -> str:
        document = {
            "format": FORMAT,
            "qtool_version": __version__,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "metric": self.metric,
            "unit": UNITS[self.metric],
            "rounding": self.rounding,
            "calibration": dict(self.calibration),
            "forward_passes": self.forward_passes,
            "float_bytes": self.float_bytes,
            "other_bytes": self.other_bytes,
            "groups": [
                {"name": g.name, "block": g.block, "kind": g.kind, "members": list(g.members), "damage": dict(g.damage)}
                for g in self.groups
            ],
            "layers": {
                name: {"shape": list(shape), "weight_error": dict(self.weight_error[name])}
                for name, shape in self.shapes.items()
            },
        }
        return json.dumps(document, indent=1) + "\n"

    @classmethod
    def load(cls, path: Path) -> Sensitivity:
        """Read the file that `qtool analyze` wrote. Raises QtoolError where it is missing, damaged or another file."""
        if not path.is_file():
            raise QtoolError(f"{path}: no such file; `qtool analyze MODEL` writes it")
        document = read_json(path)
        try:
            if document["format"] != FORMAT:
                raise QtoolError(f"format {document['format']}, this qtool reads {FORMAT}; analyze again")
            sensitivity = cls(
                model=document["model"],
                fingerprint=document["fingerprint"],
                metric=document["metric"],
                rounding=document["rounding"],
                calibration=document["calibration"],
                forward_passes=float(document["forward_passes"]),
                shapes={name: (int(v["shape"][0]), int(v["shape"][1])) for name, v in document["layers"].items()},
                weight_error={name: v["weight_error"] for name, v in document["layers"].items()},
                float_bytes=int(document["float_bytes"]),
                other_bytes=int(document["other_bytes"]),
                groups=tuple(
                    GroupSensitivity(
                        str(g["name"]),
                        int(g["block"]),
                        g["kind"],
                        tuple(g["members"]),
                        {k: float(v) for k, v in g["damage"].items()},
                    )
                    for g in document["groups"]
                ),
            )
            check_rounding(sensitivity.rounding)
            sensitivity._check()
        except QtoolError as error:
            raise QtoolError(f"{path}: {error}") from None
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise QtoolError(f"{path}: not a sensitivity file, or a damaged one ({error}); analyze again") from None
        return sensitivity

    def _check(self) -> None:
        """ValueError for what no analysis can have found."""
        if not self.groups:
            raise ValueError("no groups")
        if self.metric not in UNITS or not (isinstance(self.model, str) and isinstance(self.fingerprint, str)):
            raise ValueError("metric, model or fingerprint is damaged")
        sizes = [self.calibration[key] for key in ("num_sequences", "seq_len")]
        if "source" not in self.calibration or not all(type(n) is int and n > 0 for n in sizes):
            raise ValueError("calibration is damaged")
        if self.float_bytes not in (2, 4) or self.other_bytes < 0 or not math.isfinite(self.forward_passes):
            raise ValueError("float_bytes, other_bytes or forward_passes is damaged")
        if any(rows < 1 or cols < 1 for rows, cols in self.shapes.values()):
            raise ValueError("a layer has no weights")
        if sorted(m for g in self.groups for m in g.members) != sorted(self.shapes):
            raise ValueError("its groups are not the model's layers")
        if len({g.name for g in self.groups}) < len(self.groups):
            raise ValueError("two groups have one name")
        for group in self.groups:
            self._check_group(group)
        if not math.isfinite(sum(max(g.damage.values()) for g in self.groups)):
            raise ValueError("the sum of its damages is no finite number")

    def _check_group(self, group: GroupSensitivity) -> None:
        if not group.members or not group.damage or group.block < 0:
            raise ValueError(f"{group.name} has no members, no damage or no block")
        for name, value in group.damage.items():
            if not (math.isfinite(value) and value >= 0) or (name == FLOAT and value > 0):
                raise ValueError(f"the damage of {group.name} under {name} is {value}")
            scheme = parse_scheme(name)  # QtoolError for a scheme that is none
            if scheme_name(scheme) != name or (scheme is not None and scheme.act_bits):
                raise ValueError(f"{name} is no scheme that is measured")
            self.group_bytes(group, name)  # QtoolError for one that does not fit
