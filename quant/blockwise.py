"""Quantize one decoder block: the steps between a block with its inputs and the tensors that are stored for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from qtool.quant.algorithms.gptq import gptq
from qtool.quant.algorithms.hessian import Hessian, InverseFactor, diagonal_blocks, invert
from qtool.quant.algorithms.rounding import SearchSettings, changed_share
from qtool.quant.algorithms.rows import pick_rows, rounding_errors, row_errors, split_rows
from qtool.quant.algorithms.rtn import rtn
from qtool.quant.algorithms.smoothquant import ALPHA
from qtool.quant.block_search import search_block
from qtool.quant.calibration import Block, Reached
from qtool.quant.channel_scales import scale_channels
from qtool.quant.folding import ScaledBlock, group_layers
from qtool.quant.kv_calibration import KVRecord
from qtool.quant.method import Stages, parse_method
from qtool.quant.numerics import GridSearch, check_finite, clipped_share, find_grid, quantize, weight_error
from qtool.quant.scheme import PER_CHANNEL, QuantScheme
from qtool.quant.smoothing import smooth_channels
from qtool.quant.structure import LinearGroup, ModelStructure
from qtool.quant.weight import QuantizedWeight

LOST = 0.9  # a relative error above which a layer is as good as gone: zero in its place is off by 1


@dataclass(frozen=True)
class Settings:
    """How layers are rounded.

    Attributes:
        method: stages joined by +, see method.parse_method.
        grid: the search for scales, see numerics.find_grid.
        damping: GPTQ's, as a share of mean(diag H).
        act_order: GPTQ takes inputs by descending activation, on static groups.
        block_size: GPTQ's columns per lazy update; changes speed alone.
        scale_dtype: 16-bit dtype of stored scales.
        head_dim: of attention, for the value → output edge.
        alpha: SmoothQuant's, how much of the difficulty goes from activations to weights.
        search: length and steps of the rounding search.
    """

    method: str
    grid: GridSearch
    scale_dtype: torch.dtype
    damping: float = 0.01
    act_order: bool = True
    block_size: int = 128
    head_dim: int = 0
    alpha: float = ALPHA
    search: SearchSettings = field(default_factory=SearchSettings)

    @property
    def stages(self) -> Stages:
        return parse_method(self.method)


@dataclass(frozen=True)
class LayerRecord:
    """What is known of one quantized layer.

    Attributes:
        relative_error: ‖(W − Q)X‖/‖WX‖ over the calibration inputs, or ‖W − Q‖/‖W‖ where there are none (`measured`).
        rtn_error: the same for plain rounding to nearest on the minmax grid.
        damping: what GPTQ's Hessian needed; None for the other methods.
        dead_inputs: inputs that calibration never excited.
        rtn_rows: rows that kept plain rounding because it was better there.
        clipped: share of weights that lie beyond the grid's ends.
        fallback: `rtn` where no calibration token reached the layer: it is rounded to nearest on the minmax grid.
        awq_ratio: exponent of the chosen channel scales; None: no scaling.
        changed_codes: share of codes that the rounding search changed; None: there was none.
        block_loss_ratio: the search's objective, the error of the whole block, after it over before it.
        seconds: time of rounding and search, shared evenly among layers quantized together.
    """

    scheme: str
    measured: Literal["output", "weight"]
    relative_error: float
    rtn_error: float
    damping: float | None = None
    dead_inputs: int = 0
    rtn_rows: int = 0
    clipped: float = 0.0
    fallback: Literal["rtn"] | None = None
    awq_ratio: float | None = None
    changed_codes: float | None = None
    block_loss_ratio: float | None = None
    seconds: float = 0.0


def lost_notes(records: Mapping[str, LayerRecord]) -> tuple[str, ...]:
    """A warning where quantized layers have next to nothing in common with the original ones."""
    lost = [name for name, record in records.items() if record.relative_error > LOST]
    if not lost:
        return ()
    return (
        f"{len(lost)} layers (first {lost[0]}) are off by more than {LOST:.0%}, so that the artifact is of no use; "
        "weights beyond the reach of 16-bit scales come out so",
    )


@dataclass
class BlockResult:
    """Weights and records by layer, and the 16-bit tensors that had to change, by their stored names."""

    weights: dict[str, QuantizedWeight] = field(default_factory=dict)
    records: dict[str, LayerRecord] = field(default_factory=dict)
    changed: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    kv: KVRecord | None = None


def capture_inputs(block: Block, layer: str, on_input: Callable[[Tensor], None]) -> None:
    """Run the block's inputs up to `layer`; call `on_input` with its input [tokens, in_features] for each batch."""

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        on_input(block.as_read(args[0]))
        raise Reached

    handle = block.linears[layer].register_forward_pre_hook(hook)
    try:
        for inputs in block.inputs:
            block.run_until(inputs)
    finally:
        handle.remove()


# --- rounding --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rounded:
    """A rounded weight [N, K] and, per row ([N] float64), its squared output error, plain rounding's, and WHWᵀ."""

    weight: QuantizedWeight
    error: Tensor
    rtn_error: Tensor
    norm: Tensor
    kept_rtn: Tensor  # [N] bool: rows where plain rounding was better and stays


def _grid_metric(hessian: Tensor, scheme: QuantScheme, compensated: bool) -> Tensor:
    """What the grid search minimises: GPTQ makes up for correlated errors later, so there the diagonal alone counts."""
    if scheme.group_size == PER_CHANNEL:
        return hessian.diagonal()[None]
    if compensated:
        return hessian.diagonal().reshape(-1, scheme.group_size)
    return diagonal_blocks(hessian, scheme.group_size)


def round_weight(
    weight: Tensor, scheme: QuantScheme, hessian: Tensor, factor: InverseFactor | None, settings: Settings
) -> Rounded:
    """Round `weight` [N, K] against the `hessian` of its inputs: by GPTQ where a `factor` is given, else to the nearest
    code of the searched grid. No row comes out worse than by plain rounding on the minmax grid.
    """
    metric = _grid_metric(hessian, scheme, factor is not None) if settings.grid == "mse" else None
    grid = find_grid(weight, scheme, settings.grid, metric=metric, scale_dtype=settings.scale_dtype)
    if factor is None:
        found = quantize(weight, grid, scheme)
    else:
        found = gptq(weight, factor, grid, scheme, block_size=settings.block_size)
    plain = rtn(weight, scheme, scale_dtype=settings.scale_dtype)
    error = rounding_errors(weight, found, hessian)
    rtn_error = rounding_errors(weight, plain, hessian)
    kept = rtn_error < error
    return Rounded(
        weight=pick_rows(kept, plain, found),
        error=torch.minimum(error, rtn_error),
        rtn_error=rtn_error,
        norm=row_errors(weight, hessian),
        kept_rtn=kept,
    )


def _relative(error: Tensor, norm: Tensor) -> float:
    """√(Σ error / Σ norm); 0 where the layer's output is zero."""
    total = float(norm.sum())
    return (float(error.sum()) / total) ** 0.5 if total > 0 else 0.0


def round_group(
    block: Block,
    group: LinearGroup,
    schemes: Mapping[str, QuantScheme | None],
    settings: Settings,
    result: BlockResult,
    ratio: float | None = None,
) -> Tensor | None:
    """Quantize the layers of `group` on inputs captured now, and leave the dequantized weights in the block.

    Returns the Hessian [in_features, in_features] of those inputs; None where the whole group keeps its 16 bits, or
    where no token reaches it and it is rounded to nearest.

    Raises:
        QtoolError: NaN or infinite activations, a Hessian that no damping makes regular; names the layer.
    """
    layers = [name for name in group_layers(block, group) if schemes[name] is not None]
    if not layers:
        return None
    started = time.perf_counter()
    running = Hessian(block.linears[layers[0]].in_features, block.linears[layers[0]].weight.device)
    capture_inputs(block, layers[0], running.add)
    if running.tokens == 0:
        result.notes.append(f"{', '.join(layers)}: no calibration token reached them, rounded to nearest")
        for name in layers:
            _round_unreached(block.linears[name], name, schemes[name], settings, result)
        return None
    hessian = running.matrix()
    check_finite(hessian, f"layer {layers[0]}: the Hessian of its calibration inputs")
    factor = None
    if settings.stages.compensate:
        factor = invert(hessian, damping=settings.damping, act_order=settings.act_order, layer=f"layer {layers[0]}")
        if factor.damping > settings.damping:
            result.notes.append(f"{', '.join(layers)}: singular Hessian, damping raised to {factor.damping:g}")
    dead = int((hessian.diagonal() <= 0).sum())
    if dead:
        result.notes.append(f"{', '.join(layers)}: {dead} inputs that calibration never excited, rounded to nearest")
    for scheme in dict.fromkeys(s for s in (schemes[name] for name in layers) if s is not None):
        same = [name for name in layers if schemes[name] == scheme]
        sizes = [block.linears[name].out_features for name in same]
        stacked = torch.cat([block.linears[name].weight.data for name in same])
        rounded = round_weight(stacked, scheme, hessian, factor, settings)
        seconds = (time.perf_counter() - started) / len(same)
        started = time.perf_counter()
        per_row = (rounded.error, rounded.rtn_error, rounded.norm, rounded.kept_rtn)
        parts = zip(same, split_rows(rounded.weight, sizes), *(torch.split(t, sizes) for t in per_row), strict=True)
        for name, weight, error, rtn_error, norm, kept in parts:
            result.weights[name] = weight
            result.records[name] = LayerRecord(
                scheme=scheme.name,
                measured="output",
                relative_error=_relative(error, norm),
                rtn_error=_relative(rtn_error, norm),
                damping=None if factor is None else factor.damping,
                dead_inputs=dead,
                rtn_rows=int(kept.sum()),
                clipped=clipped_share(block.linears[name].weight.data, weight),
                awq_ratio=ratio,
                seconds=seconds,
            )
            block.linears[name].weight.data = weight.dequantize()
    return hessian


def _round_unreached(
    linear: nn.Linear, name: str, scheme: QuantScheme | None, settings: Settings, result: BlockResult
) -> None:
    """Round a layer that calibration says nothing about, as method rtn does (an expert that no token is sent to)."""
    if scheme is None:
        return
    started = time.perf_counter()
    weight = rtn(linear.weight.data, scheme, scale_dtype=settings.scale_dtype)
    error = weight_error(linear.weight.data, weight.dequantize())
    result.weights[name] = weight
    result.records[name] = LayerRecord(
        scheme=scheme.name,
        measured="weight",
        relative_error=error,
        rtn_error=error,
        dead_inputs=linear.in_features,
        fallback="rtn",
        seconds=time.perf_counter() - started,
    )
    linear.weight.data = weight.dequantize()


# --- one block -------------------------------------------------------------------------------------------------------


def quantize_block(
    block: Block,
    structure: ModelStructure,
    schemes: Mapping[str, QuantScheme | None],
    settings: Settings,
    targets: Sequence[Tensor] | None = None,
) -> BlockResult:
    """Quantize the linears of `block` group by group, each on inputs that the groups before it already changed.

    The block is left with the dequantized weights, so that its outputs are the quantized model's. Methods with a
    rounding search need `targets`, the 16-bit model's hidden states after this block.

    Raises:
        QtoolError: NaN or infinite activations, or a Hessian that no damping makes regular; names the layer.
    """
    result = BlockResult()
    ratios: dict[str, float | None] = {}
    with torch.no_grad():
        if settings.stages.scale is not None:
            scaled = _scale(block, structure, schemes, settings)
            ratios = scaled.ratios
            result.changed.update(scaled.changed)
            result.notes.extend(scaled.notes)
            for name, linear in block.linears.items():
                if schemes[name] is None:  # may feed a scaled group, and is stored as it now is
                    stored = linear.weight.data.to(settings.scale_dtype)
                    linear.weight.data = stored.to(linear.weight.dtype)
                    result.changed[f"{name}.weight"] = stored
        originals: Mapping[str, Tensor] = {}  # held for the search alone
        if settings.stages.search:
            originals = block.spill.hold({name: linear.weight.data for name, linear in block.linears.items()})
        hessians: dict[str, Mapping[str, Tensor]] = {}  # layer → that of its group
        for group in structure.groups:
            hessian = round_group(block, group, schemes, settings, result, ratios.get(group.kind))
            if hessian is not None and settings.stages.search:
                hessians.update(dict.fromkeys(group_layers(block, group), block.spill.hold({"hessian": hessian})))
            del hessian
    if settings.stages.search:
        assert targets is not None
        _search(block, originals, hessians, targets, settings, result)
    return result


def _scale(
    block: Block, structure: ModelStructure, schemes: Mapping[str, QuantScheme | None], settings: Settings
) -> ScaledBlock:
    """Give the block the channel scales of its method, in place."""
    head_dim, dtype = settings.head_dim, settings.scale_dtype
    if settings.stages.scale == "awq":
        return scale_channels(block, structure, schemes, head_dim=head_dim, dtype=dtype)
    return smooth_channels(block, structure, schemes, alpha=settings.alpha, head_dim=head_dim, dtype=dtype)


def _search(
    block: Block,
    originals: Mapping[str, Tensor],
    hessians: Mapping[str, Mapping[str, Tensor]],
    targets: Sequence[Tensor],
    settings: Settings,
    result: BlockResult,
) -> None:
    """Search the rounding of the whole block, out from what `result` holds; its weights and records are replaced.

    The layers' own errors are measured against the `hessians` of the inputs that they had before the search.
    """
    started = time.perf_counter()
    reached = {name: weight for name, weight in result.weights.items() if name in hessians}
    found = search_block(block, originals, reached, targets, settings.search)
    seconds = (time.perf_counter() - started) / max(1, len(found.weights))
    for name, weight in found.weights.items():
        values = weight.dequantize()
        original, hessian = originals[name], hessians[name]["hessian"]
        error = rounding_errors(original, weight, hessian)
        record = result.records[name]
        result.records[name] = replace(
            record,
            relative_error=_relative(error, row_errors(original, hessian)),
            clipped=clipped_share(original, weight),
            changed_codes=changed_share(result.weights[name], weight),
            block_loss_ratio=found.loss / found.start_loss if found.start_loss > 0 else 1.0,
            seconds=record.seconds + seconds,
        )
        result.weights[name] = weight
        block.linears[name].weight.data = values
