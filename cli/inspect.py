"""qtool inspect: what is in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qtool.cli.common import Json, Model, Quiet, Reporter, duration

if TYPE_CHECKING:
    from qtool.quant.scheme import KVCacheScheme


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
            if calibration.get("chat_template"):
                data += f" in the chat template {calibration['chat_template'][:8]}"
        return f"made by qtool {record['qtool_version']} {made}, {data}, seed {record['seed']}"
    except (KeyError, TypeError):
        return "how it was made is not known: qtool.json is damaged"


def _layers_line(record: dict[str, Any]) -> str | None:
    """What quantizing did to the layers, in a line; None where the record does not say."""
    try:
        layers = list(record["layers"].values())
        clipped = sum(layer["clipped"] for layer in layers) / len(layers)
        raised = sum(1 for layer in layers if (layer["damping"] or 0) > (record["damping"] or 0))
        fallback = sum(1 for layer in layers if layer["fallback"])
        worst = max(record["layers"], key=lambda name: record["layers"][name]["relative_error"])
        error = record["layers"][worst]["relative_error"]
        return (
            f"{clipped:.2%} of weights beyond their grid; damping raised in {raised} layers; {fallback} that no token "
            f"reached; worst {worst} with a relative error of {error:.4f}"
        )
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        return None


def _run_line(run: Any) -> str | None:
    """Time and memory of the run that made an artifact, in a line; None where qtool_run.json does not say."""
    try:
        line = f"took {duration(run['seconds'])} on {run['device']}, at most {run['peak_memory_bytes'] / 1e9:.2f} GB"
        if "peak_gpu_bytes" in run:
            line += f", {run['peak_gpu_bytes'] / 1e9:.2f} GB of GPU memory"
        slowest = max(block["seconds"] for block in run["blocks"])
        kept = f"; {run['kept_blocks']} blocks were kept from a run that was cut short" if run["kept_blocks"] else ""
        return f"{line}; slowest block {slowest:.1f} s{kept}"
    except (KeyError, TypeError, ValueError):
        return None


def _kv_cache(scheme: KVCacheScheme, record: dict[str, Any]) -> str:
    """How keys and values are to be cached, and what that was measured to cost, in a line."""
    each = {"tensor": "one for all keys and one for all values of a block", "attn_head": "one for each head"}
    line = f"KV cache {scheme.name}, scales {each.get(scheme.scales, scheme.scales)}"
    try:
        blocks = record["kv_cache"]["blocks"]
        errors = [float(block["static_error"]) for block in blocks]
        return f"{line}; attention outputs off by {sum(errors) / len(errors):.4f}, at worst {max(errors):.4f}"
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return line  # another tool's artifact, or a damaged record


def command(model: Model, quiet: Quiet = False, json_result: Json = False) -> None:
    """Show what MODEL holds: format, scheme of each layer, true bytes, bits per weight, how it was made."""
    from qtool.quant.artifact import RUN_RECORD, read_record
    from qtool.quant.checkpoint import Checkpoint
    from qtool.quant.formats import open_reader, read_kv_cache_scheme
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
        kv = read_kv_cache_scheme(checkpoint)
        total = checkpoint.num_bytes()
        weights = sum(rows * cols for rows, cols in shapes.values())
    linear_bytes = plan.num_bytes(shapes)
    names = {layer: scheme_name(scheme) for layer, scheme in plan.layers.items()}
    form = "16-bit" if reader is None else reader.format
    record, run = read_record(folder), read_record(folder, RUN_RECORD)

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
    if kv is not None:
        reporter.line(_kv_cache(kv, record))
    if record:
        reporter.line(_origin(record))
    for line in (_layers_line(record), _run_line(run)):
        if line is not None:
            reporter.line(line)
    notes = record.get("notes")
    for note in notes if isinstance(notes, list) else []:
        reporter.line(f"note: {note}")
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
            "kv_cache_scheme": None if kv is None else {"scheme": kv.name, "scales": kv.scales},
            "qtool": record or None,
            "run": run or None,
        }
    )
