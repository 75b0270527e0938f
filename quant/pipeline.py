"""A 16-bit model folder in, a quantized one out: plan, refuse early, go block by block, write beside and rename."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtool._version import __version__
from qtool.quant.algorithms.rounding import SearchSettings
from qtool.quant.algorithms.rtn import rtn
from qtool.quant.algorithms.smoothquant import ALPHA, check_alpha
from qtool.quant.artifact import RECORD, ArtifactWriter, check_apart, check_space, check_target, companion_files
from qtool.quant.blockwise import BlockResult, LayerRecord, Settings, quantize_block
from qtool.quant.calibration import BlockWalker, CalibrationSet, calibration_set, compute_dtype
from qtool.quant.checkpoint import Checkpoint, Weights
from qtool.quant.device import resolve_device
from qtool.quant.errors import QtoolError
from qtool.quant.fingerprint import model_fingerprint
from qtool.quant.formats import FormatName, QuantWriter, compressed_tensors, read_quantization_config, writer
from qtool.quant.hub import resolve_model
from qtool.quant.kv_calibration import KVRecord, calibrate_kv, kv_notes, kv_tensors
from qtool.quant.method import parse_method
from qtool.quant.numerics import GRID_SEARCHES, GridSearch, check_finite, clipped_share, weight_error
from qtool.quant.progress import ProgressFn, silent
from qtool.quant.resume import BlockStore, restore
from qtool.quant.scheme import QuantPlan, QuantScheme, check_covers, scheme_name, uniform_plan
from qtool.quant.structure import ModelStructure, fused_groups, linear_shapes, structure_of
from qtool.quant.usage import peak_gpu_memory, peak_memory
from qtool.quant.views import rotated, untied
from qtool.quant.weight import QuantizedWeight

log = logging.getLogger(__name__)

RUN_RECORD = "qtool_run.json"
DEFAULT_SEQUENCES, DEFAULT_SEQ_LEN = 32, 512
KV_CACHES = ("float", "int8")
DEFAULT_ITERS = SearchSettings.iters


@dataclass(frozen=True)
class QuantizeReport:
    """What a run did.

    Attributes:
        out: the artifact's folder.
        plan: layer → scheme.
        layers: layer → record, in model order; 16-bit layers are not among them.
        kv: of each block, what an int8 KV cache costs; empty where none was asked for.
        notes: everything a user should know of it: groups made smaller, damping raised, scales not applied.
        average_bits: bits per weight over the planned linears, scales and zero points counted.
        source_bytes, artifact_bytes: weight files before and after.
        seconds: wall time.
    """

    out: Path
    plan: QuantPlan
    layers: dict[str, LayerRecord]
    kv: tuple[KVRecord, ...]
    notes: tuple[str, ...]
    average_bits: float
    source_bytes: int
    artifact_bytes: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "average_bits": self.average_bits,
            "source_bytes": self.source_bytes,
            "artifact_bytes": self.artifact_bytes,
            "seconds": self.seconds,
            "plan": {name: scheme_name(s) for name, s in self.plan.layers.items()},
            "layers": {name: asdict(record) for name, record in self.layers.items()},
            "kv_cache": kv_facts(self.kv),
            "notes": list(self.notes),
        }


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


def _summarize(notes: Mapping[str, str]) -> tuple[str, ...]:
    """One line for each distinct note, with how many layers it concerns."""
    counts = Counter(notes.values())
    first = {note: layer for layer, note in reversed(list(notes.items()))}
    return tuple(f"{count} layers (first {first[note]}): {note}" for note, count in counts.items())


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
    for names in fused_groups(structure):
        if len({plan[name] for name in names}) > 1:
            found = ", ".join(f"{name.rpartition('.')[2]} {scheme_name(plan[name])}" for name in names)
            raise QtoolError(
                f"the plan's layers {names[0].rpartition('.')[0]}: {found}; servers fuse them, so they need one scheme"
            )
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
        scale_dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float16,
        head_dim=int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]),
        alpha=alpha,
        search=SearchSettings(iters=iters, seed=seed),
    )
    said = _summarize(notes)
    if untied_bytes:
        said = (*said, f"the head is untied from the embedding: {untied_bytes / 1e6:.1f} MB more in 16 bits")
    if stages.rotate:
        exact = {f"{name}.weight" for name, own in plan.layers.items() if own is not None}
        weights = rotated(weights, structure, head_dim=settings.head_dim, seed=seed, exact=exact)
    kv_int8 = kv_cache == "int8"
    return Job(checkpoint, weights, structure, shapes, ordered, settings, out_format, format, kv_int8, said)


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
    if scheme is not None and format != "compressed-tensors":
        raise QtoolError(f"a quantized head ({structure.head}) is not written in the {format} format")
    return structure.head in plan.layers


def _head_shape(weights: Weights, structure: ModelStructure) -> tuple[int, int]:
    tied = structure.tied_head and f"{structure.head}.weight" not in weights
    rows, cols = weights.shape(f"{structure.embed if tied else structure.head}.weight")
    return rows, cols


def artifact_bytes(job: Job) -> int:
    """Bytes that the artifact will take on disk, from shapes alone; files copied along are counted."""
    planned = job.plan.num_bytes(job.shapes)
    kept = sum(job.weights.tensor_bytes(name) for name in _kept_names(job))
    extra = 256 * len(job.weights.names())  # headers
    if job.format != "compressed-tensors":  # these store zero points and group indices always
        extra += sum(4 * cols + rows * cols // 32 for rows, cols in job.shapes.values())
    return planned + kept + extra + sum(p.stat().st_size for p in companion_files(job.checkpoint.folder))


def _kept_names(job: Job) -> list[str]:
    """Tensors that stay in 16 bits. A tied head that is stored all the same is left out."""
    replaced = {f"{name}.weight" for name, scheme in job.plan.layers.items() if scheme is not None}
    if job.structure.tied_head and f"{job.structure.embed}.weight" in job.weights:
        replaced.add(f"{job.structure.head}.weight")
    return [name for name in job.weights.names() if name not in replaced]


def check_weights(checkpoint: Checkpoint, progress: ProgressFn = silent) -> None:
    """Raise QtoolError naming the first tensor that holds NaN or infinity."""
    names = checkpoint.names()
    for i, name in enumerate(names):
        tensor = checkpoint.tensor(name)
        if tensor.is_floating_point():
            check_finite(tensor, f"{checkpoint.folder}: tensor {name}")
        progress("check weights", i + 1, len(names))


def _round_plainly(
    job: Job, name: str, scheme: QuantScheme, device: torch.device
) -> tuple[QuantizedWeight, LayerRecord]:
    """Round one layer to nearest, straight from the checkpoint."""
    started = time.perf_counter()
    weight = job.weights.tensor(f"{name}.weight").to(device, torch.float32)
    plain = rtn(weight, scheme, scale_dtype=job.settings.scale_dtype)
    chosen = plain
    if job.settings.grid != "minmax":
        chosen = rtn(weight, scheme, search=job.settings.grid, scale_dtype=job.settings.scale_dtype)
    record = LayerRecord(
        scheme=scheme.name,
        measured="weight",
        relative_error=weight_error(weight, chosen.dequantize()),
        rtn_error=weight_error(weight, plain.dequantize()),
        clipped=clipped_share(weight, chosen),
        seconds=time.perf_counter() - started,
    )
    return chosen, record


def _rtn_blocks(job: Job, device: torch.device) -> Iterator[BlockResult]:
    """Round every block to nearest, straight from the checkpoint."""
    for index in range(job.structure.num_blocks):
        result = BlockResult()
        for name, scheme in _block_schemes(job, index).items():
            if scheme is None:
                continue
            result.weights[name], result.records[name] = _round_plainly(job, name, scheme, device)
        yield result


def _run_facts(job: Job, calibration: CalibrationSet, seed: int, device: torch.device) -> dict[str, Any]:
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


def _calibrated_blocks(
    job: Job, calibration: CalibrationSet, device: torch.device, store: BlockStore, activation_memory: int
) -> Iterator[BlockResult]:
    """Quantize every block on the activations of the quantized blocks before it; take those in `store` as they are."""
    stored = job.checkpoint.tensor(f"{job.structure.embed}.weight").dtype
    search = job.settings.stages.search
    walker = BlockWalker(
        job.weights,
        calibration.tokens,
        device=device,
        compute=compute_dtype(stored, device),
        activation_memory=activation_memory // 2 if search else activation_memory,
    )
    outputs = walker.states.copy() if search else None  # of the 16-bit model, after the blocks so far
    for block in walker:
        if outputs is not None:
            with torch.no_grad():
                for i, states in enumerate(outputs):
                    outputs[i] = block.run(states)
        result = store.load(block.index, device)
        if result is not None:
            restore(block, result)
        else:
            result = quantize_block(block, job.structure, _block_schemes(job, block.index), job.settings, outputs)
            store.save(block.index, result)
        if job.kv_int8:
            result.kv = calibrate_kv(block)
        yield result


def default_activation_memory(device: torch.device) -> int:
    """How many bytes of hidden states may stay on `device`: on a CPU little, since files that are read again and again
    lie in free memory anyway; on a GPU a quarter of it.
    """
    if device.type == "cpu":
        return 256 << 20
    return torch.cuda.get_device_properties(device).total_memory // 4


def _block_schemes(job: Job, index: int) -> dict[str, QuantScheme | None]:
    prefix = f"{job.structure.block_name(index)}."
    return {name: scheme for name, scheme in job.plan.layers.items() if name.startswith(prefix)}


def _record(
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


def _block_tensors(job: Job, index: int, result: BlockResult) -> dict[str, Tensor]:
    """All tensors of one block as they are stored."""
    stored: dict[str, Tensor] = {}
    prefix = f"{job.structure.block_name(index)}."
    for name in _kept_names(job):
        if name.startswith(prefix):
            original = job.weights.tensor(name)
            stored[name] = result.changed.get(name, original).to(original.dtype)
    for layer, weight in result.weights.items():
        stored.update(job.writer.tensors(layer, weight))
    if result.kv is not None:
        stored.update(kv_tensors(f"{prefix}self_attn", result.kv))
    return stored


def _usage(seconds: float, device: torch.device) -> dict[str, Any]:
    """Time, and the largest memory so far in bytes."""
    used: dict[str, Any] = {"seconds": seconds, "peak_memory_bytes": peak_memory()}
    gpu = peak_gpu_memory(device)
    return used if gpu is None else {**used, "peak_gpu_bytes": gpu}


def calibration_notes(job: Job, calibration: CalibrationSet) -> tuple[str, ...]:
    """What a user should know of the data: its own notes, and where it is too short for the widest layer.

    The Hessian of K inputs has at most as many independent directions as there are tokens: with fewer than K it is
    singular, and damping alone says what the others are worth.
    """
    planned = {name: job.shapes[name][1] for name, scheme in job.plan.layers.items() if scheme is not None}
    widest = max(planned, key=lambda name: planned[name])
    tokens, seq_len = calibration.tokens.numel(), calibration.tokens.shape[1]
    if tokens >= planned[widest]:
        return calibration.notes
    least = -(-planned[widest] // seq_len)
    short = (
        f"{calibration.source}: {tokens} tokens are too few for {widest} with its {planned[widest]} inputs: "
        f"use at least {least} sequences of {seq_len} tokens, better {4 * least}"
    )
    return (*calibration.notes, short)


def quantize(
    model: str | Path,
    out: str | Path,
    *,
    scheme: QuantScheme | None = None,
    plan: QuantPlan | None = None,
    head: QuantScheme | None = None,
    method: str = "gptq",
    calibration: CalibrationSet | None = None,
    device: str = "auto",
    seed: int = 0,
    untie: bool = False,
    iters: int = DEFAULT_ITERS,
    alpha: float = ALPHA,
    grid: GridSearch | None = None,
    format: FormatName = "compressed-tensors",
    kv_cache: str = "float",
    activation_memory: int | None = None,
    fresh: bool = False,
    overwrite: bool = False,
    source: str | None = None,
    progress: ProgressFn = silent,
) -> QuantizeReport:
    """Quantize the linears of a model's blocks and write the result as a model folder.

    Args:
        model: folder, hub id or built-in name of a 16-bit model.
        out: the folder to make. It appears when it is complete; after an error or Ctrl-C nothing is left there. Blocks
            that were finished stay in the cache, and the same call goes on after them (quant/resume.py).
        scheme: one scheme for every layer (its group made smaller where it does not divide a layer's input), or
        plan: a scheme for each layer. One of the two.
        head: a scheme for the output projection too, which is rounded to nearest; None: as the plan says, or 16 bits.
        method: stages joined by + (method.parse_method): rotation, then awq or smoothquant, then rtn, gptq or rounding
            (GPTQ, then the rounding search).
        untie: store a head that is the embedding by itself; a rotation needs that.
        calibration: what all but rtn are calibrated on; None: 32 × 512 tokens of the Python standard library.
        device: auto, cpu, cuda or cuda:N.
        seed: of the default calibration set and of the rounding search; recorded.
        iters: steps of the rounding search for each block.
        alpha: SmoothQuant's: 0 leaves weights as they are, 1 makes all activations alike.
        grid: minmax, signed or mse (numerics.find_grid); None: minmax for rtn, mse for the others.
        format: compressed-tensors, or gptq or awq for uniform plans.
        kv_cache: float, or int8: measure keys and values on the calibration set (with rtn too) and store static scales
            (compressed-tensors alone).
        activation_memory: bytes of hidden states past which they lie on the disk of the cache; None: 256 MiB on a CPU,
            a quarter of a GPU's memory.
        fresh: start over, where blocks are kept of a run to `out` that was cut short.
        source: what qtool.json names as the model; None: `model` as given.
        overwrite: replace `out` where it exists; the old folder goes when the new one is complete.

    Raises:
        QtoolError: a wrong argument, a model or plan that does not fit, NaN or infinite weights, too little disk
            space: all before work begins. Activations that overflow, later.
    """
    started = time.perf_counter()
    target = Path(out)
    check_target(target, overwrite=overwrite)
    on = resolve_device(device)
    folder = resolve_model(model, progress=progress)
    check_apart(target, folder)
    with Checkpoint(folder) as checkpoint:
        job = prepare(
            checkpoint,
            scheme=scheme,
            plan=plan,
            head=head,
            method=method,
            untie=untie,
            grid=grid,
            format=format,
            kv_cache=kv_cache,
            iters=iters,
            alpha=alpha,
            seed=seed,
        )
        check_space(target, artifact_bytes(job))
        if not job.calibrated:
            calibration = None
        elif calibration is None:
            calibration = calibration_set(
                folder, data=None, num_sequences=DEFAULT_SEQUENCES, seq_len=DEFAULT_SEQ_LEN, seed=seed, chat=None
            )
        notes = [*job.notes, *(() if calibration is None else calibration_notes(job, calibration))]
        layers: dict[str, LayerRecord] = {}
        kv: list[KVRecord] = []
        usage: list[dict[str, Any]] = []
        with ArtifactWriter(target, overwrite=overwrite) as artifact:
            # after the writer has claimed the target: no other run is at work on these blocks
            store = (
                None if calibration is None else BlockStore(target, _run_facts(job, calibration, seed, on), fresh=fresh)
            )
            kept = 0 if store is None else len(store)
            check_weights(checkpoint, progress)
            if calibration is None or store is None:
                blocks = _rtn_blocks(job, on)
            else:
                if kept:
                    log.info("an earlier run was cut short: going on after block %d", kept)
                limit = default_activation_memory(on) if activation_memory is None else activation_memory
                blocks = _calibrated_blocks(job, calibration, on, store, limit)
            for name in _kept_names(job):
                if not name.startswith(f"{job.structure.blocks}."):
                    artifact.add({name: job.weights.tensor(name)})
            stage = f"quantize ({method})"
            try:
                block_started = time.perf_counter()
                for index, result in enumerate(blocks):
                    artifact.add(_block_tensors(job, index, result))
                    layers.update(result.records)
                    notes.extend(result.notes)
                    kv += [] if result.kv is None else [result.kv]
                    usage.append(_usage(time.perf_counter() - block_started, on))
                    progress(stage, index + 1, job.structure.num_blocks)
                    block_started = time.perf_counter()
            except BaseException:
                if store is not None:
                    store.tell(job.structure.num_blocks)
                raise
            last, last_scheme = job.structure.head, job.plan.layers.get(job.structure.head)
            if last_scheme is not None:
                weight, layers[last] = _round_plainly(job, last, last_scheme, on)
                artifact.add(job.writer.tensors(last, weight.to("cpu")))
            config = {k: v for k, v in job.weights.config.items() if k != "quantization_config"}
            section = job.writer.quantization_config(job.plan, job.structure.head)
            if kv:
                section["kv_cache_scheme"] = compressed_tensors.KV_CACHE_INT8
                notes.extend(kv_notes(kv))
            artifact.write_json("config.json", {**config, "quantization_config": section})
            artifact.copy(companion_files(folder))
            artifact.write_json(RECORD, _record(job, source or str(model), calibration, seed, notes, layers, kv))
            seconds = time.perf_counter() - started
            run = {
                "device": str(on),
                "kept_blocks": kept,  # of an earlier run; what follows is this run's
                **_usage(seconds, on),
                "blocks": usage,
                "layers": {n: r.seconds for n, r in layers.items()},
            }
            artifact.write_json(RUN_RECORD, run)
        if store is not None:
            store.clear()
        source_bytes = checkpoint.num_bytes()
    return QuantizeReport(
        out=target,
        plan=job.plan,
        layers=layers,
        kv=tuple(kv),
        notes=tuple(notes),
        average_bits=job.plan.average_bits(job.shapes),
        source_bytes=source_bytes,
        artifact_bytes=sum(p.stat().st_size for p in target.glob("*.safetensors")),
        seconds=seconds,
    )
