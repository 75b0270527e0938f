"""What is written down of a run: qtool.json beside the weights, and the facts by which a run is resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from qtool._version import __version__
from qtool.quant.blockwise import LayerRecord
from qtool.quant.calibration import CalibrationSet
from qtool.quant.fingerprint import model_fingerprint
from qtool.quant.job import Job
from qtool.quant.kv_calibration import KVRecord
from qtool.quant.scheme import scheme_name
from qtool.quant.structure import structure_of


def run_facts(job: Job, calibration: CalibrationSet, seed: int, device: torch.device) -> dict[str, Any]:
    """What the blocks of a run depend on: two runs that agree in it quantize every block alike."""
    return {
        "qtool_version": __version__,
        "torch_version": torch.__version__,
        "device": device.type,
        "model": model_fingerprint(job.checkpoint),
        "calibration": calibration.facts(),
        "seed": seed,
        "settings": asdict(job.settings),
        "plan": {name: scheme_name(scheme) for name, scheme in job.plan.layers.items()},
    }


def artifact_record(
    job: Job,
    model: str,
    calibration: CalibrationSet | None,
    seed: int,
    notes: list[str],
    layers: Mapping[str, LayerRecord],
    kv: Sequence[KVRecord],
) -> dict[str, Any]:
    """qtool.json: how the artifact came about. Times are not in it, so that the same run gives the same bytes."""
    return {
        "qtool_version": __version__,
        "source": {
            "model": model,
            "model_type": job.structure.model_type,
            "fingerprint": model_fingerprint(job.checkpoint),
            "weight_bytes": job.checkpoint.num_bytes(),
        },
        "method": job.settings.method,
        "untied": job.structure.tied_head != structure_of(job.checkpoint.config).tied_head,
        "grid": job.settings.grid,
        "damping": job.settings.damping if job.settings.stages.compensate else None,
        "alpha": job.settings.alpha if job.settings.stages.scale == "smoothquant" else None,
        "search": asdict(job.settings.search) if job.settings.stages.search else None,
        "format": job.format,
        "seed": seed,
        "calibration": None if calibration is None else calibration.facts(),
        "average_bits": job.plan.average_bits(job.shapes),
        "plan": {name: scheme_name(s) for name, s in job.plan.layers.items()},
        "layers": {n: {k: v for k, v in asdict(r).items() if k != "seconds"} for n, r in layers.items()},
        "kv_cache": kv_facts(kv),
        "notes": notes,
    }


def kv_facts(kv: Sequence[KVRecord]) -> dict[str, Any] | None:
    """An int8 KV cache as qtool.json records it; None where there is none."""
    if not kv:
        return None
    return {"scheme": "int8", "scales": "tensor", "blocks": [asdict(record) for record in kv]}
