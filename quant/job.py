"""What a run of the quantizer is to do, decided and checked before any weight is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from qtool.quant.algorithms.rounding import SearchSettings
from qtool.quant.algorithms.smoothquant import ALPHA, check_alpha
from qtool.quant.artifact import companion_files
from qtool.quant.blockwise import Settings
from qtool.quant.calibration import CalibrationSet
from qtool.quant.checkpoint import Checkpoint, Weights
from qtool.quant.errors import QtoolError
from qtool.quant.formats import FormatName, QuantWriter, compressed_tensors, read_quantization_config, writer
from qtool.quant.method import parse_method
from qtool.quant.numerics import GRID_SEARCHES, GridSearch
from qtool.quant.scheme import QuantPlan, QuantScheme, check_covers, scheme_name, uniform_plan
from qtool.quant.structure import ModelStructure, fused_groups, linear_shapes, structure_of
from qtool.quant.views import rotated, untied

KV_CACHES = ("float", "int8")
DEFAULT_ITERS = SearchSettings.iters


@dataclass(frozen=True)
class Job:
    """Everything that a run needs, checked: nothing of it can be refused any more but for the weights themselves.

    `weights` is what is quantized: the `checkpoint`, or a view of it (untied, rotated).
    """

    checkpoint: Checkpoint
    weights: Weights
    structure: ModelStructure
    shapes: Mapping[str, tuple[int, int]]
    plan: QuantPlan
    settings: Settings
    writer: QuantWriter
    format: str
    kv_int8: bool
    notes: tuple[str, ...]

    @property
    def calibrated(self) -> bool:
        """Something of the run is measured on calibration data."""
        return self.settings.stages.calibrated or self.kv_int8


def check_seed(seed: int) -> None:
    """Raise QtoolError for a seed that a generator of random numbers does not take."""
    if not 0 <= seed < 1 << 63:
        raise QtoolError(f"seed {seed} is not from 0 to 2^63 - 1")


def _summarize(notes: Mapping[str, str]) -> tuple[str, ...]:
    """One line for each distinct note, with how many layers it concerns."""
    counts = Counter(notes.values())
    first = {note: layer for layer, note in reversed(list(notes.items()))}
    return tuple(f"{count} layers (first {first[note]}): {note}" for note, count in counts.items())


def scale_dtype(stored: torch.dtype) -> torch.dtype:
    """The 16-bit dtype of scales for weights of this dtype."""
    return torch.bfloat16 if stored == torch.bfloat16 else torch.float16


def prepare(
    checkpoint: Checkpoint,
    *,
    scheme: QuantScheme | None = None,
    plan: QuantPlan | None = None,
    head: QuantScheme | None = None,
    method: str = "gptq",
    untie: bool = False,
    grid: GridSearch | None = None,
    format: FormatName = "compressed-tensors",
    kv_cache: str = "float",
    iters: int = DEFAULT_ITERS,
    alpha: float = ALPHA,
    seed: int = 0,
) -> Job:
    """Decide how every layer is quantized; refuse what cannot be done. Reads no weights.

    Raises:
        QtoolError: a checkpoint that is quantized already, an unsupported architecture, neither or both of scheme and
            plan, a plan of other layers, a group that nothing divides, a plan that the format cannot hold.
    """
    if read_quantization_config(checkpoint) is not None:
        raise QtoolError(f"{checkpoint.folder}: is quantized already; start from the 16-bit model")
    stages = parse_method(method)
    check_alpha(alpha)
    if grid is not None and grid not in GRID_SEARCHES:
        raise QtoolError(f"unknown grid {grid!r}: use one of {', '.join(GRID_SEARCHES)}")
    if iters < 1:
        raise QtoolError(f"{iters} iterations of the rounding search: use at least 1, or --method gptq for none")
    check_seed(seed)
    if kv_cache not in KV_CACHES:
        raise QtoolError(f"KV cache {kv_cache!r} is not supported: use one of {', '.join(KV_CACHES)}")
    if kv_cache == "int8" and format != compressed_tensors.NAME:
        raise QtoolError(f"the {format} format cannot say that the KV cache is int8: use {compressed_tensors.NAME}")
    if (scheme is None) == (plan is None):
        raise QtoolError("give either one scheme for all layers or a plan, not both and not neither")
    structure = structure_of(checkpoint.config)
    weights = untied(checkpoint, structure) if untie else checkpoint
    structure = structure_of(weights.config)
    shapes = linear_shapes(checkpoint)
    notes: dict[str, str] = {}
    untied_bytes = 0 if weights is checkpoint else weights.tensor_bytes(f"{structure.head}.weight")
    if plan is None:
        assert scheme is not None
        plan, notes = uniform_plan(shapes, scheme)
    if head is not None:
        plan = QuantPlan({**plan.layers, structure.head: head})
    if check_head(plan, structure, format):
        shapes[structure.head] = _head_shape(weights, structure)
    check_covers(plan, shapes)
    for name, own in plan.layers.items():
        if own is not None:
            try:
                own.num_groups(shapes[name][1])
            except QtoolError as error:
                raise QtoolError(f"the plan's layer {name}: {error}") from None
    if stages.scale == "smoothquant" and not any(own.act_bits for own in plan.schemes()):
        raise QtoolError(
            "smoothquant makes room for 8-bit activations, and no layer has them: use --w-bit 8 --a-bit 8, or awq"
        )
    if not plan.schemes():
        raise QtoolError("the plan leaves every layer in 16 bits: there is nothing to quantize")
    out_format = writer(format)
    out_format.check_plan(plan, shapes)
    ordered = QuantPlan({name: plan[name] for name in shapes})
    dtype = checkpoint.tensor(f"{next(iter(shapes))}.weight").dtype
    config = checkpoint.config
    settings = Settings(
        method=method,
        grid=grid or ("mse" if stages.calibrated else "minmax"),
        scale_dtype=scale_dtype(dtype),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]),
        alpha=alpha,
        search=SearchSettings(iters=iters, seed=seed),
    )
    said = (*_summarize(notes), *_split_notes(plan, structure))
    if untied_bytes:
        said = (*said, f"the head is untied from the embedding: {untied_bytes / 1e6:.1f} MB more in 16 bits")
    if format == compressed_tensors.NAME and (note := _transformers_note(plan)):
        said = (*said, note)
    if stages.rotate:
        exact = {f"{name}.weight" for name, own in plan.layers.items() if own is not None}
        weights = rotated(weights, structure, head_dim=settings.head_dim, seed=seed, exact=exact)
    kv_int8 = kv_cache == "int8"
    return Job(checkpoint, weights, structure, shapes, ordered, settings, out_format, format, kv_int8, said)


def _split_notes(plan: QuantPlan, structure: ModelStructure) -> tuple[str, ...]:
    """A line where layers that servers fuse have schemes of their own."""
    split = [names for names in fused_groups(structure) if len({plan[name] for name in names}) > 1]
    if not split:
        return ()
    found = ", ".join(f"{name.rpartition('.')[2]} {scheme_name(plan[name])}" for name in split[0])
    return (
        f"{len(split)} groups (first {split[0][0].rpartition('.')[0]}: {found}) hold several schemes: qtool and "
        "transformers serve that, vLLM and SGLang need one scheme for what they fuse (plan with --granularity group)",
    )


def _transformers_note(plan: QuantPlan) -> str | None:
    """What transformers makes of asymmetric layers among others, in one line; None where there are no such."""
    schemes = plan.schemes()
    if len(schemes) < 2 or all(scheme.symmetric for scheme in schemes):
        return None
    names = ", ".join(scheme.name for scheme in schemes)
    return (
        f"transformers 5.24 does not read asymmetric layers among others ({names}): serve it with qtool, or use --sym"
    )


def check_head(plan: QuantPlan, structure: ModelStructure, format: str) -> bool:
    """Whether `plan` says something of the head.

    Raises:
        QtoolError: it quantizes the embedding, a head that is the embedding, or a head in a format that cannot say so.
    """
    if plan.layers.get(structure.embed) is not None:
        raise QtoolError(f"the plan quantizes {structure.embed}: an embedding is looked up, not multiplied, and stays")
    scheme = plan.layers.get(structure.head)
    if scheme is not None and structure.tied_head:
        raise QtoolError(
            f"the plan quantizes {structure.head}, which is the embedding itself: pass --untie to store the head by "
            "itself, or leave it in 16 bits"
        )
    if scheme is not None and format != compressed_tensors.NAME:
        raise QtoolError(f"a quantized head ({structure.head}) is not written in the {format} format")
    return structure.head in plan.layers


def _head_shape(weights: Weights, structure: ModelStructure) -> tuple[int, int]:
    tied = structure.tied_head and f"{structure.head}.weight" not in weights
    rows, cols = weights.shape(f"{structure.embed if tied else structure.head}.weight")
    return rows, cols


def artifact_bytes(job: Job) -> int:
    """Bytes that the artifact will take on disk, from shapes alone; files copied along are counted."""
    planned = job.plan.num_bytes(job.shapes)
    kept = sum(job.weights.tensor_bytes(name) for name in kept_names(job))
    extra = 256 * len(job.weights.names())  # headers
    if job.format != compressed_tensors.NAME:  # these store zero points and group indices always
        extra += sum(4 * cols + rows * cols // 32 for rows, cols in job.shapes.values())
    return planned + kept + extra + sum(p.stat().st_size for p in companion_files(job.checkpoint.folder))


def kept_names(job: Job) -> list[str]:
    """Tensors that stay in 16 bits. A tied head that is stored all the same is left out."""
    replaced = {f"{name}.weight" for name, scheme in job.plan.layers.items() if scheme is not None}
    if job.structure.tied_head and f"{job.structure.embed}.weight" in job.weights:
        replaced.add(f"{job.structure.head}.weight")
    return [name for name in job.weights.names() if name not in replaced]


def block_schemes(job: Job, index: int) -> dict[str, QuantScheme | None]:
    prefix = f"{job.structure.block_name(index)}."
    return {name: scheme for name, scheme in job.plan.layers.items() if name.startswith(prefix)}


def calibration_notes(job: Job, calibration: CalibrationSet) -> tuple[str, ...]:
    """What a user should know of the data: its own notes, and where it is too short for the widest layer.

    The Hessian of K inputs has at most as many independent directions as there are tokens: with fewer than K it is
    singular, and damping alone says what the others are worth.
    """
    planned = {name: job.shapes[name][1] for name, scheme in job.plan.layers.items() if scheme is not None}
    widest = max(planned, key=lambda name: planned[name])
    tokens, seq_len = calibration.tokens.numel(), calibration.tokens.shape[1]
    notes = list(calibration.notes)
    context = job.checkpoint.config.get("max_position_embeddings")
    if isinstance(context, int) and seq_len > context:
        notes.append(f"{calibration.source}: sequences of {seq_len} tokens are longer than the model's {context}")
    if tokens < planned[widest]:
        least = -(-planned[widest] // seq_len)
        notes.append(
            f"{calibration.source}: {tokens} tokens are too few for {widest} with its {planned[widest]} inputs: "
            f"use at least {least} sequences of {seq_len} tokens, better {4 * least}"
        )
    return tuple(notes)
