"""qtool inspect: what is in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qtool.cli.common import Json, Model, Quiet, Reporter


def index_ranges(indices: Sequence[int]) -> str:
    """`0-3, 7, 9-12` for sorted numbers."""
    parts: list[list[int]] = []
    for i in indices:
        if parts and i == parts[-1][1] + 1:
            parts[-1][1] = i
        else:
            parts.append([i, i])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def folded(schemes: dict[str, str], blocks: str) -> list[tuple[str, str, str]]:
    """(module, scheme, blocks as ranges), for layers `{blocks}.{i}.{module}`."""
    found: dict[tuple[str, str], list[int]] = {}
    for layer, scheme in schemes.items():
        index, _, module = layer.removeprefix(f"{blocks}.").partition(".")
        found.setdefault((module, scheme), []).append(int(index))
    return [(module, scheme, index_ranges(sorted(indices))) for (module, scheme), indices in found.items()]


def _origin(record: dict[str, Any]) -> str:
    """How an artifact was made, in a line; a record that is damaged is said to be so."""
    try:
        if "converted_from" in record:
            return f"converted from {record['converted_from']['format']} by qtool {record['qtool_version']}"
        made, calibration = f"from {record['source']['model']} by {record['method']}", record["calibration"]
        data = "no calibration"
        if calibration is not None:
            data = f"{calibration['num_sequences']} × {calibration['seq_len']} tokens of {calibration['source']}"
        return f"made by qtool {record['qtool_version']} {made}, {data}, seed {record['seed']}"
    except (KeyError, TypeError):
        return "how it was made is not known: qtool.json is damaged"


def command(model: Model, quiet: Quiet = False, json_result: Json = False) -> None:
    """Show what MODEL holds: format, scheme of each layer, true bytes, bits per weight, how it was made."""
    from qtool.quant.artifact import read_record
    from qtool.quant.checkpoint import Checkpoint
    from qtool.quant.formats import open_reader
    from qtool.quant.hub import resolve_model
    from qtool.quant.scheme import QuantPlan, scheme_name
    from qtool.quant.structure import linear_shapes, structure_of

    reporter = Reporter(quiet, json_result)
    folder = resolve_model(model)
    with Checkpoint(folder) as checkpoint:
        reader = open_reader(checkpoint)
        shapes = linear_shapes(checkpoint)
        structure = structure_of(checkpoint.config)
        plan = QuantPlan({layer: None if reader is None else reader.scheme(layer) for layer in shapes})
        total = checkpoint.num_bytes()
        weights = sum(rows * cols for rows, cols in shapes.values())
    linear_bytes = plan.num_bytes(shapes)
    names = {layer: scheme_name(scheme) for layer, scheme in plan.layers.items()}
    form = "16-bit" if reader is None else reader.format
    record = read_record(folder)

    reporter.line(f"{folder}: {structure.model_type}, {structure.num_blocks} blocks, {form}")
    rows = [list(row) for row in folded(names, structure.blocks)]
    reporter.table("Linear layers of the blocks", ["module", "scheme", "blocks"], rows)
    planned = record.get("plan")
    if isinstance(planned, dict) and structure.head in planned:
        reporter.line(f"output projection ({structure.head}): {planned[structure.head]}")
    reporter.line(
        f"{total / 1e6:.1f} MB of weight files; blocks' linears {linear_bytes / 1e6:.1f} MB, "
        f"{plan.average_bits(shapes):.3f} bits per weight over {weights / 1e6:.1f} M weights"
    )
    if record:
        reporter.line(_origin(record))
    reporter.result(
        {
            "folder": str(folder),
            "model_type": structure.model_type,
            "num_blocks": structure.num_blocks,
            "format": form,
            "weight_file_bytes": total,
            "linear_bytes": linear_bytes,
            "average_bits": plan.average_bits(shapes),
            "schemes": names,
            "qtool": record or None,
        }
    )
