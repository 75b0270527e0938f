"""A 16-bit model folder in, a quantized one out: plan, refuse early, go block by block, write beside and rename."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtool.quant.algorithms.rtn import rtn
from qtool.quant.algorithms.smoothquant import ALPHA
from qtool.quant.artifact import (
    RECORD,
    RUN_RECORD,
    ArtifactWriter,
    bytes_while_written,
    check_apart,
    check_space,
    check_target,
    companion_files,
)
from qtool.quant.blockwise import BlockResult, LayerRecord, lost_notes, quantize_block
from qtool.quant.calibration import BlockWalker, CalibrationSet, calibration_set, compute_dtype
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.device import resolve_device
from qtool.quant.formats import FormatName, compressed_tensors
from qtool.quant.hub import resolve_model
from qtool.quant.job import DEFAULT_ITERS, Job, artifact_bytes, block_schemes, calibration_notes, kept_names, prepare
from qtool.quant.kv_calibration import KVRecord, calibrate_kv, kv_notes, kv_tensors
from qtool.quant.numerics import GridSearch, check_finite, clipped_share, weight_error
from qtool.quant.progress import ProgressFn, silent
from qtool.quant.record import artifact_record, kv_facts, run_facts
from qtool.quant.resume import BlockStore, restore
from qtool.quant.scheme import QuantPlan, QuantScheme, scheme_name
from qtool.quant.skeleton import check_tensors
from qtool.quant.usage import peak_gpu_memory, peak_memory
from qtool.quant.weight import QuantizedWeight

log = logging.getLogger(__name__)

DEFAULT_SEQUENCES, DEFAULT_SEQ_LEN = 32, 512


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


def check_weights(checkpoint: Checkpoint, progress: ProgressFn = silent) -> None:
    """Raise QtoolError naming the first tensor that is missing, another than the config's, or not finite."""
    check_tensors(checkpoint)
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
        for name, scheme in block_schemes(job, index).items():
            if scheme is None:
                continue
            result.weights[name], result.records[name] = _round_plainly(job, name, scheme, device)
        yield result


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
            result = quantize_block(block, job.structure, block_schemes(job, block.index), job.settings, outputs)
            store.save(block.index, result)
        if job.kv_int8:
            result.kv = calibrate_kv(block)
        yield result
        del result


def default_activation_memory(device: torch.device) -> int:
    """How many bytes of hidden states may stay on `device`: on a CPU little, since files that are read again and again
    lie in free memory anyway; on a GPU a quarter of it.
    """
    if device.type == "cpu":
        return 256 << 20
    return torch.cuda.get_device_properties(device).total_memory // 4


def _block_tensors(job: Job, index: int, result: BlockResult) -> dict[str, Tensor]:
    """All tensors of one block as they are stored."""
    stored: dict[str, Tensor] = {}
    prefix = f"{job.structure.block_name(index)}."
    for name in kept_names(job):
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
        size = artifact_bytes(job)
        check_space(target, size)
        if not job.calibrated:
            calibration = None
        elif calibration is None:
            calibration = calibration_set(
                folder, data=None, num_sequences=DEFAULT_SEQUENCES, seq_len=DEFAULT_SEQ_LEN, seed=seed, chat=None
            )
        notes = [*job.notes, *(() if calibration is None else calibration_notes(job, calibration))]
        check_weights(checkpoint, progress)
        layers: dict[str, LayerRecord] = {}
        kv: list[KVRecord] = []
        usage: list[dict[str, Any]] = []
        with ArtifactWriter(target, overwrite=overwrite) as artifact:
            # after the writer has claimed the target: no other run is at work on these blocks
            store = None
            if calibration is not None:
                facts = run_facts(job, calibration, seed, on)
                store = BlockStore(target, facts, fresh=fresh, reserve=bytes_while_written(size))
            kept = 0 if store is None else len(store)
            if calibration is None or store is None:
                blocks = _rtn_blocks(job, on)
            else:
                if kept:
                    log.info("an earlier run was cut short: going on after block %d", kept)
                limit = default_activation_memory(on) if activation_memory is None else activation_memory
                blocks = _calibrated_blocks(job, calibration, on, store, limit)
            for name in kept_names(job):
                if not name.startswith(f"{job.structure.blocks}."):
                    artifact.add({name: job.weights.tensor(name)})
            stage = f"quantize ({method})"
            try:
                block_started = time.perf_counter()
                for result in blocks:  # not enumerated: that would hold each while the next is made
                    artifact.add(_block_tensors(job, len(usage), result))
                    layers.update(result.records)
                    notes.extend(result.notes)
                    kv += [] if result.kv is None else [result.kv]
                    usage.append(_usage(time.perf_counter() - block_started, on))
                    del result
                    progress(stage, len(usage), job.structure.num_blocks)
                    block_started = time.perf_counter()
            except BaseException:
                if store is not None:
                    store.tell(job.structure.num_blocks)
                raise
            last, last_scheme = job.structure.head, job.plan.layers.get(job.structure.head)
            if last_scheme is not None:
                weight, layers[last] = _round_plainly(job, last, last_scheme, on)
                artifact.add(job.writer.tensors(last, weight.to("cpu")))
            notes.extend(lost_notes(layers))
            config = {k: v for k, v in job.weights.config.items() if k != "quantization_config"}
            section = job.writer.quantization_config(job.plan, job.structure.head)
            if kv:
                section["kv_cache_scheme"] = compressed_tensors.KV_CACHE_INT8
                notes.extend(kv_notes(kv))
            artifact.write_json("config.json", {**config, "quantization_config": section})
            artifact.copy(companion_files(folder))
            artifact.write_json(
                RECORD, artifact_record(job, source or str(model), calibration, seed, notes, layers, kv)
            )
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
