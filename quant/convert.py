"""From one on-disk format of a quantized model to another, where every code, scale and zero point stays what it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qtool._version import __version__
from qtool.quant.artifact import (
    RECORD,
    ArtifactWriter,
    check_apart,
    check_space,
    check_target,
    companion_files,
    read_record,
)
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.fingerprint import model_fingerprint
from qtool.quant.formats import (
    FormatName,
    QuantReader,
    compressed_tensors,
    gptq,
    open_reader,
    read_kv_cache_scheme,
    read_quantization_config,
    writer,
)
from qtool.quant.hub import resolve_model
from qtool.quant.job import check_head
from qtool.quant.progress import ProgressFn, silent
from qtool.quant.scheme import QuantPlan, QuantScheme, scheme_name
from qtool.quant.structure import linear_shapes, structure_of
from qtool.quant.weight import QuantizedWeight

_PLAIN = (".weight", ".bias")
_KV = (".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point")


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did: the folder, from which format to which, the schemes as they are stored now."""

    out: Path
    source_format: str
    format: str
    plan: QuantPlan

    def to_dict(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "source_format": self.source_format,
            "format": self.format,
            "plan": {name: scheme_name(scheme) for name, scheme in self.plan.layers.items()},
        }


def _one_symmetry(plan: QuantPlan) -> QuantPlan:
    """Where layers differ in symmetry alone, all asymmetric: a zero point at the midpoint is one like any other."""
    schemes = plan.schemes()
    if len(schemes) < 2 or len({replace(s, symmetric=False) for s in schemes}) > 1:
        return plan
    return QuantPlan({n: None if s is None else replace(s, symmetric=False) for n, s in plan.layers.items()})


def _as_scheme(weight: QuantizedWeight, scheme: QuantScheme) -> QuantizedWeight:
    """The same weight with its zero points written out where `scheme` is asymmetric."""
    if scheme.symmetric or weight.zero is not None:
        return weight
    zero = torch.full(weight.scale.shape, scheme.midpoint, dtype=torch.uint8)
    return replace(weight, zero=zero, scheme=scheme)


def _read(reader: QuantReader, layer: str, target: str) -> QuantizedWeight:
    weight = reader.read(layer)
    if weight.g_idx is not None and target != gptq.NAME:
        raise QtoolError(
            f"layer {layer}: its columns are grouped by activation order (g_idx), which qtool cannot write in the "
            f"{target} format"
        )
    return weight


def _head_shape(checkpoint: Checkpoint, head: str) -> dict[str, tuple[int, int]]:
    """head → (rows, cols) where it is quantized, else nothing."""
    if f"{head}.weight_scale" in checkpoint or f"{head}.qweight" in checkpoint:
        return {head: (int(checkpoint.config["vocab_size"]), int(checkpoint.config["hidden_size"]))}
    return {}


def _kv_cache_section(checkpoint: Checkpoint, target: str) -> Any:
    """The source's `kv_cache_scheme`, as it is; None: there is none. Raises QtoolError where `target` has no such."""
    scheme = read_kv_cache_scheme(checkpoint)
    if scheme is None:
        return None
    if target != compressed_tensors.NAME:
        raise QtoolError(f"{checkpoint.folder}: the {target} format cannot say that the KV cache is {scheme.name}")
    return (read_quantization_config(checkpoint) or {})["kv_cache_scheme"]


def _kept_names(checkpoint: Checkpoint, plan: QuantPlan, kv_cache: bool) -> list[str]:
    """Tensors that go over as they are. Raises QtoolError for parts of quantized layers that are not in the plan."""
    prefixes = tuple(f"{name}." for name, scheme in plan.layers.items() if scheme is not None)
    kept = [n for n in checkpoint.names() if not n.startswith(prefixes) or n.endswith(".bias")]
    if odd := [n for n in kept if not n.endswith((*_PLAIN, *_KV) if kv_cache else _PLAIN)]:
        raise QtoolError(f"{checkpoint.folder}: {odd[0]} belongs to no layer that qtool can convert")
    return kept


def convert(
    model: str | Path,
    out: str | Path,
    *,
    format: FormatName,
    overwrite: bool = False,
    progress: ProgressFn = silent,
) -> ConvertReport:
    """Store a quantized model in another format, bit for bit: its dequantized weights are the same afterwards.

    Args:
        model: folder, hub id or built-in name of a quantized model.
        out: the folder to make; it appears when it is complete.
        format: compressed-tensors, gptq or awq.
        overwrite: replace `out` where it exists.

    Raises:
        QtoolError: a 16-bit model; a plan, a shape or an order of columns that the format cannot hold, by layer name.
    """
    target = Path(out)
    check_target(target, overwrite=overwrite)
    out_format = writer(format)
    folder = resolve_model(model, progress=progress)
    check_apart(target, folder)
    with Checkpoint(folder) as checkpoint:
        reader = open_reader(checkpoint)
        if reader is None:
            raise QtoolError(f"{folder}: is a 16-bit model; `qtool quantize` makes it smaller")
        structure = structure_of(checkpoint.config)
        shapes = linear_shapes(checkpoint) | _head_shape(checkpoint, structure.head)
        plan = _one_symmetry(QuantPlan({name: reader.scheme(name) for name in shapes}))
        if not plan.schemes():
            raise QtoolError(f"{folder}: no linear layer of its blocks is quantized")
        check_head(plan, structure, format)
        out_format.check_plan(plan, shapes)
        kv_cache = _kv_cache_section(checkpoint, format)
        kept = _kept_names(checkpoint, plan, kv_cache is not None)
        check_space(target, checkpoint.num_bytes() + sum(p.stat().st_size for p in companion_files(folder)))
        reordered = False
        with ArtifactWriter(target, overwrite=overwrite) as artifact:
            artifact.add({name: checkpoint.tensor(name) for name in kept})
            for done, (layer, scheme) in enumerate(plan.layers.items(), start=1):
                if scheme is not None:
                    weight = _read(reader, layer, format)
                    reordered |= weight.g_idx is not None
                    artifact.add(out_format.tensors(layer, _as_scheme(weight, scheme)))
                progress(f"convert to {format}", done, len(plan.layers))
            section = out_format.quantization_config(plan, structure.head)
            if reordered:
                section["desc_act"] = True
            if kv_cache is not None:
                section["kv_cache_scheme"] = kv_cache
            config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
            artifact.write_json("config.json", {**config, "quantization_config": section})
            artifact.copy(companion_files(folder))
            artifact.write_json(RECORD, _record(checkpoint, str(model), reader.format, format, plan))
    return ConvertReport(target, reader.format, format, plan)


def _record(checkpoint: Checkpoint, model: str, source: str, format: str, plan: QuantPlan) -> Mapping[str, Any]:
    """qtool.json of the source, where there is one, with what was done to it."""
    return {
        "qtool_version": __version__,
        "plan": {name: scheme_name(scheme) for name, scheme in plan.layers.items()},
        **read_record(checkpoint.folder),
        "format": format,
        "converted_from": {"model": model, "format": source, "fingerprint": model_fingerprint(checkpoint)},
    }
