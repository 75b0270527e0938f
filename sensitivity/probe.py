"""How much each group of linears suffers under each candidate scheme: the analysis, and the gradient-free metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from qtool.quant.calibration import Block, BlockWalker, CalibrationSet, calibration_set
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.device import resolve_device
from qtool.quant.errors import QtoolError
from qtool.quant.fingerprint import model_fingerprint
from qtool.quant.hub import resolve_model
from qtool.quant.numerics import weight_error
from qtool.quant.pipeline import check_weights
from qtool.quant.progress import ProgressFn, silent
from qtool.quant.scheme import FLOAT, QuantScheme
from qtool.quant.structure import linear_shapes, structure_of
from qtool.sensitivity.candidates import (
    DEFAULT_SCHEMES,
    Damage,
    Group,
    candidate_groups,
    check_granularity,
    fake_quantize,
    parse_candidates,
)
from qtool.sensitivity.divergence import mean_kl
from qtool.sensitivity.fisher import fisher_damage
from qtool.sensitivity.record import UNITS, GroupSensitivity, Sensitivity, check_rounding
from qtool.sensitivity.rounding import NEAREST, Round, Rounding, batch_tokens, block_rounding, rounding_for

NUM_SEQUENCES, SEQ_LEN = 16, 512


def check_request(
    schemes: Sequence[str], metric: str, device: str, rounding: str = "rtn", granularity: str = "group"
) -> None:
    """Raise QtoolError for what analyze() would refuse of these: before anything is fetched."""
    if metric not in UNITS:
        raise QtoolError(f"metric {metric!r} is not known: use one of {', '.join(UNITS)}")
    check_rounding(rounding)
    check_granularity(granularity)
    if rounding != "rtn" and metric == "weight":
        raise QtoolError(f"--rounding {rounding} reads activations, and --metric weight has none: use another metric")
    parse_candidates(schemes)
    resolve_device(device)


def analyze(
    model: str | Path,
    *,
    name: str | None = None,
    schemes: Sequence[str] = DEFAULT_SCHEMES,
    metric: str = "fisher",
    rounding: str = "rtn",
    granularity: str = "group",
    calibration: CalibrationSet | None = None,
    device: str = "auto",
    progress: ProgressFn = silent,
) -> Sensitivity:
    """Measure what every candidate scheme does to every group of linears.

    Args:
        model: folder, hub id or built-in name.
        name: what to call the model in the result; None: `model` itself.
        schemes: candidates by name; group sizes that do not divide a layer's input are fitted.
        metric: `fisher` (gradient-weighted output error, one backward pass for all), `kl` (measured end to end, slow),
            `output` (relative error of the group's output) or `weight` (no data at all).
        rounding: of the candidates: `rtn` (to nearest, signed scales; quick) or `gptq` (calibrated on one half of the
            tokens, measured on the other).
        granularity: what shares a scheme: a `group` that servers fuse (q,k,v; gate,up), or each `layer` by itself.
        calibration: tokens to measure on; None: the first 16 × 512 of the default text.
        device: auto, cpu, cuda or cuda:N.

    Raises:
        QtoolError: an unknown metric or scheme, a model that cannot be read, is quantized or is not supported.
    """
    check_request(schemes, metric, device, rounding, granularity)
    candidates, place = parse_candidates(schemes), resolve_device(device)
    folder = resolve_model(model, progress=progress)
    with Checkpoint(folder) as checkpoint:
        shapes = linear_shapes(checkpoint)
        check_weights(checkpoint, progress)
        if calibration is None:
            calibration = calibration_set(folder, data=None, num_sequences=NUM_SEQUENCES, seq_len=SEQ_LEN, seed=0)
        walker = BlockWalker(
            checkpoint, calibration.tokens, device=place, batch_tokens=batch_tokens(calibration.tokens)
        )
        groups = candidate_groups(walker.structure, shapes, candidates, granularity)
        damage, passes = _MEASURES[metric](walker, groups, progress, rounding_for(rounding, walker))
        for group in groups:
            if not all(math.isfinite(value) for value in damage[group.name].values()):
                raise QtoolError(f"{group.name}: its damage is no finite number: the model's activations overflow")
        return Sensitivity(
            model=name or str(model),
            fingerprint=model_fingerprint(checkpoint),
            metric=metric,
            rounding=rounding,
            calibration={
                "source": calibration.source,
                "num_sequences": len(calibration.tokens),
                "seq_len": calibration.tokens.shape[1],
                "fingerprint": calibration.fingerprint,
            },
            forward_passes=passes,
            shapes=shapes,
            weight_error=_weight_errors(checkpoint, groups, place, progress),
            float_bytes=_float_bytes(checkpoint, shapes),
            other_bytes=_other_bytes(checkpoint),
            groups=_with_damage(groups, damage),
        )


def outline(checkpoint: Checkpoint, schemes: Sequence[str], granularity: str = "group") -> Sensitivity:
    """A model's analysis before anything is measured, every damage 0: what is possible at what size, at once.

    Raises:
        QtoolError: an unknown scheme, a model that is not supported.
    """
    shapes = linear_shapes(checkpoint)
    groups = candidate_groups(structure_of(checkpoint.config), shapes, parse_candidates(schemes), granularity)
    return Sensitivity(
        model=str(checkpoint.folder),
        fingerprint=model_fingerprint(checkpoint),
        metric="weight",
        rounding="rtn",
        calibration={},
        forward_passes=0.0,
        shapes=shapes,
        weight_error={},
        float_bytes=_float_bytes(checkpoint, shapes),
        other_bytes=_other_bytes(checkpoint),
        groups=_with_damage(groups, {g.name: {s.name: 0.0 for s in g.schemes} for g in groups}),
    )


def _with_damage(groups: Sequence[Group], damage: Damage) -> tuple[GroupSensitivity, ...]:
    return tuple(
        GroupSensitivity(
            g.name, g.block, g.kind, g.members, {**({FLOAT: 0.0} if g.keeps_float else {}), **damage[g.name]}
        )
        for g in groups
    )


def _weight_errors(
    checkpoint: Checkpoint, groups: list[Group], device: torch.device, progress: ProgressFn
) -> dict[str, dict[str, float]]:
    errors: dict[str, dict[str, float]] = {}
    for done, group in enumerate(groups, start=1):
        for name in group.members:
            weight = checkpoint.tensor(f"{name}.weight").to(device, torch.float32)
            errors[name] = {s.name: weight_error(weight, fake_quantize(name, weight, s)) for s in group.schemes}
        progress("weight errors", done, len(groups))
    return errors


def _float_bytes(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, int]]) -> int:
    return checkpoint.tensor(f"{next(iter(shapes))}.weight").element_size()


def _other_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of everything that a plan does not cover; the copy of a tied head that some files hold is not counted."""
    structure = structure_of(checkpoint.config)
    planned = {f"{name}.weight" for name in linear_shapes(checkpoint)}
    if structure.tied_head:
        planned.add(f"{structure.head}.weight")
    return sum(checkpoint.tensor(name).nbytes for name in checkpoint.names() if name not in planned)


def weight_damage(
    walker: BlockWalker, groups: list[Group], progress: ProgressFn, rounding: Rounding = NEAREST
) -> tuple[Damage, float]:
    """‖ΔW‖² / ‖W‖² over the members of each group, rounded to nearest: GPTQ needs the data that this metric has not."""
    damage: Damage = {}
    for done, group in enumerate(groups, start=1):
        weights = {n: walker.checkpoint.tensor(f"{n}.weight").to(walker.device, torch.float32) for n in group.members}
        total = sum(float(w.square().sum()) for w in weights.values()) or 1.0
        damage[group.name] = {
            s.name: sum(float((fake_quantize(n, w, s) - w).square().sum()) for n, w in weights.items()) / total
            for s in group.schemes
        }
        progress("probe (weight)", done, len(groups))
    return damage, 0.0


def output_damage(
    walker: BlockWalker, groups: list[Group], progress: ProgressFn, rounding: Rounding = NEAREST
) -> tuple[Damage, float]:
    """‖X ΔWᵀ‖² / ‖X Wᵀ‖² over the members of each group, from the Gram matrix XᵀX of its real inputs."""
    damage: Damage = {}
    for block in walker:
        mine = [g for g in groups if g.block == block.index]
        grams: dict[str, Tensor] = {}

        def add(name: str, x: Tensor, grams: dict[str, Tensor] = grams) -> None:
            x = x.float()
            grams[name] = grams[name].addmm_(x.T, x) if name in grams else x.T @ x

        block.over(block.inputs[rounding.held :]).capture([g.members[0] for g in mine], add)
        rounded = block_rounding(block.over(block.inputs[: rounding.held]), mine, rounding)
        for group in mine:
            gram = grams[group.members[0]]
            weights = {n: block.linears[n].weight.detach().float() for n in group.members}
            total = sum(_energy(w, gram) for w in weights.values()) or 1.0
            damage[group.name] = {
                s.name: sum(_energy(rounded(n, w, s) - w, gram) for n, w in weights.items()) / total
                for s in group.schemes
            }
        progress("probe (output)", block.index + 1, len(walker))
    return damage, 2.0  # once to see the inputs, once to walk on


def _energy(weight: Tensor, gram: Tensor) -> float:
    """‖X Wᵀ‖² with gram = XᵀX."""
    return float(((weight @ gram) * weight).sum())


def kl_damage(
    walker: BlockWalker, groups: list[Group], progress: ProgressFn, rounding: Rounding = NEAREST
) -> tuple[Damage, float]:
    """KL(original ‖ one group quantized), mean over tokens, measured at the logits.

    The inputs of every block are kept, so that a variant of block i starts there; all variants of one block walk on
    together, so that each later block is read once for all of them. Memory: for each block, and for each variant of
    one, the hidden states of all samples.
    """
    prefix = [list(block.inputs) for block in walker]
    head, base = walker.head(), walker.states[rounding.held :]
    damage: Damage = {group.name: {} for group in groups}
    num_variants = sum(len(g.schemes) for g in groups)
    block_runs, done = len(walker), 0
    for index, inputs in enumerate(prefix):
        variants = [(g, s) for g in groups if g.block == index for s in g.schemes]
        block = walker.block(index, inputs[rounding.held :])
        rounded = block_rounding(block.over(inputs[: rounding.held]), [g for g in groups if g.block == index], rounding)
        states = [_run_quantized(block, group, scheme, rounded) for group, scheme in variants]
        for later in range(index + 1, len(walker)):
            block = walker.block(later, [])
            with torch.no_grad():
                states = [[block.run(x) for x in batches] for batches in states]
        block_runs += len(variants) * (len(walker) - index)
        for (group, scheme), kl in zip(variants, mean_kl(head, base, states), strict=True):
            damage[group.name][scheme.name] = kl
        done += len(variants)
        progress("probe (kl)", done, num_variants)
    return damage, block_runs / len(walker)


def _run_quantized(block: Block, group: Group, scheme: QuantScheme, rounded: Round) -> list[Tensor]:
    """The block's outputs for its inputs with one group quantized; the weights are put back."""
    originals = {name: block.linears[name].weight.data for name in group.members}
    try:
        for name, weight in originals.items():
            block.linears[name].weight.data = rounded(name, weight, scheme)
        with torch.no_grad():
            return [block.run(x) for x in block.inputs]
    finally:
        for name, weight in originals.items():
            block.linears[name].weight.data = weight


_Measure = Callable[[BlockWalker, list[Group], ProgressFn, Rounding], tuple[Damage, float]]
_MEASURES: dict[str, _Measure] = {
    "fisher": fisher_damage,
    "kl": kl_damage,
    "output": output_damage,
    "weight": weight_damage,
}
