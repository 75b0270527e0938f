"""Quantizing by an original package: check, run its script, bring what it wrote into a model folder like ours."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from qtool._version import __version__
from qtool.quant.artifact import RECORD, ArtifactWriter, check_apart, check_space, check_target, companion_files
from qtool.quant.backends import autoawq, autogptq
from qtool.quant.calibration import CalibrationSet
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.fingerprint import model_fingerprint
from qtool.quant.formats import open_reader, read_quantization_config
from qtool.quant.hub import cache_folder, resolve_model
from qtool.quant.progress import ProgressFn, silent
from qtool.quant.scheme import QuantPlan, QuantScheme, scheme_name
from qtool.quant.structure import ModelStructure, linear_shapes, structure_of

BackendName = Literal["autoawq", "auto-gptq"]
BACKENDS: tuple[BackendName, ...] = ("autoawq", "auto-gptq")


class Backend(Protocol):
    """What a backend's module holds: its method, the format that it writes, whether it is symmetric unless told."""

    METHOD: str
    FORMAT: str
    SYMMETRIC: bool

    def check(self, scheme: QuantScheme, model_type: str, shapes: Mapping[str, tuple[int, int]]) -> None:
        """Raise QtoolError for what the original cannot do."""

    def ready(self) -> None:
        """Raise QtoolError where the original is not at hand and cannot be made so."""

    def run(
        self,
        checkpoint: Checkpoint,
        scheme: QuantScheme,
        calibration: CalibrationSet,
        work: Path,
        log: Path,
        progress: ProgressFn,
    ) -> dict[str, Any]:
        """Quantize into `work/out`; returns `versions` and `settings`."""


@dataclass(frozen=True)
class OriginalReport:
    """What a run of an original did.

    Attributes:
        out: the artifact's folder.
        backend, versions: which package, and what it ran on.
        plan: layer → scheme, as read back from what it wrote.
        average_bits: bits per weight over the blocks' linears, scales and zero points counted.
        source_bytes, artifact_bytes: weight files before and after.
        seconds: wall time, the making of an environment included.
    """

    out: Path
    backend: str
    versions: Mapping[str, str]
    plan: QuantPlan
    average_bits: float
    source_bytes: int
    artifact_bytes: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "backend": self.backend,
            "versions": dict(self.versions),
            "plan": {name: scheme_name(s) for name, s in self.plan.layers.items()},
            "average_bits": self.average_bits,
            "source_bytes": self.source_bytes,
            "artifact_bytes": self.artifact_bytes,
            "seconds": self.seconds,
        }


def backend_named(name: str) -> Backend:
    """The backend's module. Raises QtoolError for an unknown name."""
    match name:
        case "autoawq":
            return autoawq
        case "auto-gptq":
            return autogptq
        case _:
            raise QtoolError(f"unknown backend {name!r}: use one of qtool, {', '.join(BACKENDS)}")


def check_request(backend: Backend, checkpoint: Checkpoint, scheme: QuantScheme) -> None:
    """Refuse, before any work, what the original cannot do or is not at hand for. Raises QtoolError."""
    if read_quantization_config(checkpoint) is not None:
        raise QtoolError(f"{checkpoint.folder}: is quantized already; start from the 16-bit model")
    shapes = linear_shapes(checkpoint)
    if scheme.group_size > 0:
        for name, (_, cols) in shapes.items():
            if cols % scheme.group_size:
                raise QtoolError(
                    f"layer {name}: {cols} inputs are no multiple of {scheme.group_size}, and the originals have one "
                    "group size for all layers: use a smaller --group"
                )
    backend.check(scheme, checkpoint.config["model_type"], shapes)
    backend.ready()


def quantize_original(
    name: str,
    model: str | Path,
    out: str | Path,
    *,
    scheme: QuantScheme,
    calibration: CalibrationSet,
    seed: int = 0,
    overwrite: bool = False,
    source: str | None = None,
    progress: ProgressFn = silent,
) -> OriginalReport:
    """Let an original quantize a model; the artifact holds its tensors as it wrote them.

    Config, tokenizer and the like are the source model's, with the original's `quantization_config`; qtool.json tells
    the versions and settings. The folder appears when it is complete; after an error nothing is left there.

    Args:
        name: autoawq or auto-gptq.
        model, out, overwrite, source, progress: as for pipeline.quantize.
        scheme: of every layer.
        calibration: whose tokens the original gets, sequence by sequence.
        seed: that of the calibration set; recorded.

    Raises:
        QtoolError: a wrong argument, something that the original cannot do or that is not installed: before work
            begins. A script that fails, with its last line.
    """
    started = time.perf_counter()
    target = Path(out)
    backend = backend_named(name)
    check_target(target, overwrite=overwrite)
    folder = resolve_model(model, progress=progress)
    check_apart(target, folder)
    with Checkpoint(folder) as checkpoint:
        check_request(backend, checkpoint, scheme)
        check_space(target, checkpoint.num_bytes())
        with ArtifactWriter(target, overwrite=overwrite) as artifact, _work_folder(target) as work:
            log = cache_folder() / "backends" / f"{name}.log"
            result = backend.run(checkpoint, scheme, calibration, work, log, progress)
            with Checkpoint(work / "out") as written:
                section, plan = _what_was_written(written, linear_shapes(checkpoint), name)
                for tensor in _names_to_keep(written, structure_of(checkpoint.config)):
                    artifact.add({tensor: written.tensor(tensor)})
                artifact.write_json("config.json", {**checkpoint.config, "quantization_config": section})
                artifact.copy(companion_files(folder))
                average_bits = plan.average_bits(linear_shapes(checkpoint))
                record = {
                    "qtool_version": __version__,
                    "source": {
                        "model": source or str(model),
                        "model_type": checkpoint.config["model_type"],
                        "fingerprint": model_fingerprint(checkpoint),
                        "weight_bytes": checkpoint.num_bytes(),
                    },
                    "backend": {"name": name, **result},
                    "method": f"{backend.METHOD} ({name})",
                    "format": backend.FORMAT,
                    "seed": seed,
                    "calibration": calibration.facts(),
                    "average_bits": average_bits,
                    "plan": {layer: scheme_name(s) for layer, s in plan.layers.items()},
                    "layers": {layer: {"scheme": scheme_name(s)} for layer, s in plan.layers.items()},
                    "notes": [],
                }
                artifact.write_json(RECORD, record)
        return OriginalReport(
            out=target,
            backend=name,
            versions=result["versions"],
            plan=plan,
            average_bits=average_bits,
            source_bytes=checkpoint.num_bytes(),
            artifact_bytes=sum(p.stat().st_size for p in target.glob("*.safetensors")),
            seconds=time.perf_counter() - started,
        )


@contextmanager
def _work_folder(target: Path) -> Iterator[Path]:
    """An empty folder in the cache for one target, gone at the end; what a killed run left there goes first.

    Only one run at a time writes a target (ArtifactWriter), so no other one uses its folder.
    """
    digest = hashlib.sha256(str(target.resolve()).encode()).hexdigest()[:16]
    work = cache_folder() / "backends" / digest
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _what_was_written(
    written: Checkpoint, shapes: Mapping[str, tuple[int, int]], name: str
) -> tuple[dict[str, Any], QuantPlan]:
    """The original's quantization_config without paths of this machine, and the plan that its tensors make.

    Raises:
        QtoolError: a layer is missing or not quantized.
    """
    reader, section = open_reader(written), read_quantization_config(written)
    if reader is None or section is None:
        raise QtoolError(f"--backend {name}: what it wrote has no quantization_config")
    plan = QuantPlan({layer: reader.scheme(layer) for layer in shapes})
    if left := [layer for layer, scheme in plan.layers.items() if scheme is None]:
        raise QtoolError(f"--backend {name}: it left {len(left)} layers in 16 bits, first {left[0]}")
    paths = ("model_name_or_path", "model_file_base_name")
    return {key: value for key, value in section.items() if key not in paths}, plan


def _names_to_keep(written: Checkpoint, structure: ModelStructure) -> list[str]:
    """All tensors, but for a tied head that was stored a second time."""
    twice = f"{structure.head}.weight" if structure.tied_head else None
    return [name for name in written.names() if name != twice]
