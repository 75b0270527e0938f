"""plan.json: a plan with where it comes from, as `qtool plan` writes it and `qtool quantize --plan` reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qtool._version import __version__
from qtool.quant.errors import QtoolError
from qtool.quant.scheme import QuantPlan, scheme_name
from qtool.quant.textfile import read_json

FORMAT = 1


@dataclass(frozen=True)
class PlanFile:
    """A plan and its origin.

    Attributes:
        plan: layer → scheme.
        fingerprint: of the model that it was made for (quant.fingerprint); None where the file does not say.
        details: whatever else explains it: metric, limits, predicted damage, sizes.
    """

    plan: QuantPlan
    fingerprint: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        document = {
            "format": FORMAT,
            "qtool_version": __version__,
            "fingerprint": self.fingerprint,
            **self.details,
            "layers": {name: scheme_name(scheme) for name, scheme in self.plan.layers.items()},
        }
        return json.dumps(document, indent=1) + "\n"

    def check_model(self, fingerprint: str, what: str) -> None:
        """Raise QtoolError where the plan was made for another model than the one of this fingerprint."""
        if self.fingerprint is not None and self.fingerprint != fingerprint:
            raise QtoolError(
                f"{what} was made for another model (fingerprint {self.fingerprint[:12]}, "
                f"this one is {fingerprint[:12]}); analyze and plan again"
            )


def read_plan(path: Path) -> PlanFile:
    """Read plan.json, or a plain JSON object of layer → scheme name. Raises QtoolError where it is neither."""
    if not path.is_file():
        raise QtoolError(f"{path}: no such file; `qtool plan` writes it")
    document = read_json(path)
    layers = document.get("layers", document) if isinstance(document, dict) else None
    if not isinstance(layers, dict) or not layers or not all(isinstance(name, str) for name in layers.values()):
        raise QtoolError(f'{path}: expected {{"layers": {{layer: scheme name, ...}}}}')
    try:
        plan = QuantPlan.from_names(layers)
    except QtoolError as error:
        raise QtoolError(f"{path}: {error}") from None
    if layers is document:
        return PlanFile(plan)
    if document.get("format") != FORMAT:
        raise QtoolError(f"{path}: format {document.get('format')!r}, this qtool reads {FORMAT}; plan again")
    if not isinstance(document.get("fingerprint"), str | None):
        raise QtoolError(f"{path}: fingerprint must be a string or null; plan again")
    known = ("format", "qtool_version", "fingerprint", "layers")
    return PlanFile(plan, document.get("fingerprint"), {k: v for k, v in document.items() if k not in known})
