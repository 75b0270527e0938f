"""CPU kernels: torch's packed int4 and int8 products with bfloat16 activations.

`_weight_int4pack_mm_for_cpu` multiplies by (code - 8) * scale + offset, scale and offset per row and group of 32, 64,
128 or 256 columns; `_weight_int8pack_mm` by code * scale, scale per row. Both run well with bfloat16 activations alone
(float32 is over ten times slower), so float32 takes the reference kernel. Where activations are quantized too (W8A8),
`_int_mm` sums products of int8 exactly in int32, for activations of any dtype.

Scales are rounded to bfloat16, as both products want them: at most 0.2 % of a weight, far below the rounding of the
codes themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from qtool.quant.errors import QtoolError
from qtool.quant.scheme import PER_CHANNEL
from qtool.quant.weight import QuantizedWeight
from qtool.runtime.kernels.activations import quantize_per_token
from qtool.runtime.kernels.interface import LinearKernel, LinearSpec, Packed

INT4_GROUPS = (256, 128, 64, 32)
ROW_TILE = 64  # the int4 product wants a multiple of 16 rows; with 64 its layout has no odd end
INT8_COLS = 16  # torch's int8 product reads so many inputs at a time, beyond the end of a row that is no multiple
WIDE_INT8 = 64  # from this many rows of x on, dense products of weights converted on the fly are faster
WIDE_INT4 = 256
INT32_COLS = (1 << 31) // (1 << 14) - 1  # inputs whose products of two int8 always sum up within int32
WIDE_CHUNK = 1 << 20  # weights converted at a time: they should stay in the cache until they are multiplied


# torch declares both operators in C++ alone
def _int4_pack(codes: Tensor) -> Tensor:
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return packed


def _int4_mm(x: Tensor, packed: Tensor, group: int, scale_offset: Tensor) -> Tensor:
    out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, scale_offset)
    return out


def _int8_mm(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    out: Tensor = torch.ops.aten._weight_int8pack_mm(x, weight, scale)
    return out


def _once(trial: Callable[[], bool]) -> Callable[[], bool]:
    """`trial` as a function that runs it once a process; False also where this torch or this CPU lacks the product."""

    @cache
    def runs() -> bool:
        try:
            return trial()
        except (RuntimeError, AttributeError):  # NotImplementedError is a RuntimeError
            return False

    return runs


@_once
def _int4_runs() -> bool:
    """Try the int4 product on numbers that bfloat16 holds exactly."""
    codes = (torch.arange(32 * 64, dtype=torch.int32) * 7 % 16).view(32, 64)
    scale_offset = torch.stack((torch.full((2, 32), 0.5), torch.full((2, 32), 1.0)), dim=2).bfloat16()
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    x[0, 3], x[1, 40] = 1.0, 2.0
    got = _int4_mm(x, _int4_pack(codes), 32, scale_offset)
    want = x.float() @ ((codes.float() - 8) * 0.5 + 1).T
    return torch.equal(got.float(), want)


@_once
def _int8_runs() -> bool:
    """Try the int8 product on numbers that bfloat16 holds exactly."""
    weight = (torch.arange(32 * 64) % 100 - 50).to(torch.int8).view(32, 64)
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, 5] = 2.0
    got = _int8_mm(x, weight, torch.full((32,), 0.5).bfloat16())
    return torch.equal(got.float(), x.float() @ (weight.float() * 0.5).T)


@_once
def _int8_int8_runs() -> bool:
    """Try the product of int8 matrices at the ends of their range (some CPUs' instructions saturate there)."""
    x = torch.tensor([[127], [-128], [3]], dtype=torch.int8).expand(3, 70).contiguous()
    weight = torch.tensor([[127], [-128], [-5], [0], [1]], dtype=torch.int8).expand(5, 70).contiguous()
    got = torch._int_mm(x, weight.T)
    return got.dtype == torch.int32 and torch.equal(got.double(), x.double() @ weight.double().T)


@cache
def _int4_tile() -> int | None:
    """Rows per tile of torch's packed int4 layout; None where the layout is not the one that is known.

    Known: tiles of 64 or 32 rows, depending on the CPU, each [K, tile / 2] bytes, whose low halves are the tile's first
    rows and whose high halves are its last. Two packed matrices that spell out their row numbers show it.
    """
    rows = torch.arange(ROW_TILE, dtype=torch.int32)
    digits = [_int4_pack(d[:, None].expand(-1, 32).contiguous()) for d in (rows % 16, rows // 16)]
    for tile in (64, 32):
        low, high = (_unpack_tiles(d, tile, torch.int32) for d in digits)
        if torch.equal(low + 16 * high, rows.expand(32, -1)):
            return tile
    return None


def _unpack_tiles(packed: Tensor, tile: int, dtype: torch.dtype) -> Tensor:
    """Packed int4 weight [N, K / 2] → codes [K, N] in `dtype`."""
    tiles = packed.shape[0] // tile
    pairs = packed.view(tiles, -1, tile // 2)
    codes = torch.empty(pairs.shape[1], tiles, 2, tile // 2, dtype=dtype)
    codes[:, :, 0] = (pairs & 15).transpose(0, 1)
    codes[:, :, 1] = (pairs >> 4).transpose(0, 1)
    return codes.view(pairs.shape[1], -1)


def _int4_wide(x: Tensor, packed: Tensor, scale_offset: Tensor, tile: int) -> Tensor:
    """The int4 product for many rows of x: dequantize some tiles to x's dtype, multiply densely, go on."""
    rows, cols, groups = packed.shape[0], x.shape[1], scale_offset.shape[0]
    out = x.new_empty(x.shape[0], rows)
    step = max(1, WIDE_CHUNK // (cols * tile)) * tile
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        scale, offset = scale_offset[:, None, part].unbind(dim=3)  # [groups, 1, rows of this part]
        # (code - 8) is exact in bfloat16; the product is rounded once, as a stored 16-bit weight would be
        weight = _unpack_tiles(packed[part], tile, x.dtype).sub_(8).view(groups, cols // groups, -1).mul_(scale)
        if bool(offset.any()):
            weight.add_(offset)
        out[:, part] = x @ weight.view(cols, -1)
    return out


def _int4_product(x: Tensor, packed: Tensor, scale_offset: Tensor) -> Tensor:
    """x [M, K] times an int4 weight, by whichever way is faster for M."""
    tile = _int4_tile() if x.shape[0] >= WIDE_INT4 else None
    if tile is not None:
        return _int4_wide(x, packed, scale_offset, tile)
    return _int4_mm(x.contiguous(), packed, x.shape[1] // scale_offset.shape[0], scale_offset)


def _common(spec: LinearSpec, device: torch.device, bits: int) -> str | None:
    if device.type != "cpu":
        return "it runs on the CPU alone"
    if spec.scheme.bits != bits:
        return f"it multiplies {bits}-bit weights"
    if spec.dtype != torch.bfloat16:
        return "it wants bfloat16 activations"
    if spec.scheme.act_bits:
        return "activations would have to be quantized"
    return None


def _tile_group(spec: LinearSpec) -> int | None:
    """The kernel's group size for a spec: the largest that divides the scheme's own groups."""
    span = spec.cols if spec.scheme.group_size == PER_CHANNEL else spec.scheme.group_size
    return next((g for g in INT4_GROUPS if span % g == 0 and spec.cols % g == 0), None)


def _int4_supports(spec: LinearSpec, device: torch.device, bits: int = 4) -> str | None:
    if reason := _common(spec, device, bits):
        return reason
    if _tile_group(spec) is None:
        return f"groups of {spec.scheme.group_size} over {spec.cols} inputs are no multiple of 32"
    if spec.act_order and spec.scheme.group_size == PER_CHANNEL:
        return "act-order without groups"
    return None if _int4_runs() else "torch's int4 product does not run here"


def _in_group_order(weight: QuantizedWeight, spec: LinearSpec) -> tuple[Tensor, Tensor]:
    """codes with the columns of each group side by side, and the permutation of x that goes with it (or empty)."""
    if weight.g_idx is None:
        return weight.codes, torch.empty(0, dtype=torch.long)
    counts = torch.bincount(weight.g_idx, minlength=weight.scale.shape[1])
    if not bool((counts == spec.scheme.group_size).all()):
        raise QtoolError(f"g_idx does not give every group {spec.scheme.group_size} columns: the checkpoint is damaged")
    order = torch.argsort(weight.g_idx, stable=True)
    return weight.codes[:, order], order


def _per_tile(per_group: Tensor, spec: LinearSpec, group: int) -> Tensor:
    """[N, G] of the scheme → [N, cols / group] of the kernel."""
    return per_group.repeat_interleave(spec.cols // group // per_group.shape[1], dim=1)


def _scale_offset(scale: Tensor, offset: Tensor, rows: int) -> Tensor:
    """[N, G] each → [G, rows, 2] bfloat16, the rows padded with zeros."""
    both = torch.stack((scale, offset), dim=2).transpose(0, 1)
    return functional.pad(both, (0, 0, 0, rows - both.shape[1])).bfloat16().contiguous()


def _padded_rows(rows: int) -> int:
    return -(-rows // ROW_TILE) * ROW_TILE


def _pack_codes(codes: Tensor) -> Tensor:
    missing = _padded_rows(codes.shape[0]) - codes.shape[0]
    return _int4_pack(functional.pad(codes, (0, 0, 0, missing)).int().contiguous())


def _int4_pack_weight(weight: QuantizedWeight, spec: LinearSpec, device: torch.device) -> Packed:
    """packed codes, [G, rows, 2] scale and offset, order of x."""
    group = _tile_group(spec)
    assert group is not None
    codes, order = _in_group_order(weight, spec)
    scale = _per_tile(weight.scale.float(), spec, group)
    zero = torch.full_like(scale, 8.0) if weight.zero is None else _per_tile(weight.zero.float(), spec, group)
    return _pack_codes(codes), _scale_offset(scale, (8 - zero) * scale, _padded_rows(spec.rows)), order


def _int4_apply(x: Tensor, packed: Packed, spec: LinearSpec) -> Tensor:
    codes, scale_offset, order = packed
    if order.numel():
        x = x.index_select(1, order)
    out = _int4_product(x, codes, scale_offset)
    return out if out.shape[1] == spec.rows else out[:, : spec.rows]


def _int8_grouped_supports(spec: LinearSpec, device: torch.device) -> str | None:
    return _int4_supports(spec, device, bits=8)


def _int8_grouped_pack(weight: QuantizedWeight, spec: LinearSpec, device: torch.device) -> Packed:
    """An 8-bit code is 16 * high + low: two int4 products, as many bytes as one int8 product, but with groups.

    (16 h + l - z) s = (h - 8) 16 s + (l - 8) s + (136 - z) s; the last term is split over both offsets so that what
    bfloat16 cuts off the first is made good by the second.
    """
    group = _tile_group(spec)
    assert group is not None
    codes, order = _in_group_order(weight, spec)
    scale = _per_tile(weight.scale.float(), spec, group).bfloat16().float()
    zero = torch.full_like(scale, 128.0) if weight.zero is None else _per_tile(weight.zero.float(), spec, group)
    offset = (136 - zero) * scale
    coarse = offset.bfloat16().float()
    rows = _padded_rows(spec.rows)
    return (
        _pack_codes(codes >> 4), _scale_offset(16 * scale, coarse, rows),
        _pack_codes(codes & 15), _scale_offset(scale, offset - coarse, rows), order,
    )  # fmt: skip


def _int8_grouped_apply(x: Tensor, packed: Packed, spec: LinearSpec) -> Tensor:
    high, high_scales, low, low_scales, order = packed
    if order.numel():
        x = x.index_select(1, order)
    out = _int4_product(x, high, high_scales).add_(_int4_product(x, low, low_scales))
    return out if out.shape[1] == spec.rows else out[:, : spec.rows]


def _int8_supports(spec: LinearSpec, device: torch.device) -> str | None:
    if reason := _common(spec, device, bits=8):
        return reason
    if spec.scheme.group_size not in (PER_CHANNEL, spec.cols) or not spec.scheme.symmetric or spec.act_order:
        return "it wants one symmetric scale per row"
    if spec.cols % INT8_COLS:
        return f"{spec.cols} inputs are no multiple of {INT8_COLS}"
    return None if _int8_runs() else "torch's int8 product does not run here"


def _int8_pack(weight: QuantizedWeight, spec: LinearSpec, device: torch.device) -> Packed:
    """[N, K] int8, [N] bfloat16."""
    return (weight.codes.to(torch.int16) - 128).to(torch.int8), weight.scale[:, 0].bfloat16().contiguous()


def _int8_apply(x: Tensor, packed: Packed, spec: LinearSpec) -> Tensor:
    weight, scale = packed
    if x.shape[0] >= WIDE_INT8:
        return functional.linear(x, weight.to(x.dtype)).mul_(scale)
    return _int8_mm(x.contiguous(), weight, scale)


def _int8_int8_supports(spec: LinearSpec, device: torch.device) -> str | None:
    if device.type != "cpu":
        return "it runs on the CPU alone"
    scheme = spec.scheme
    if scheme.act_bits is None:
        return "it quantizes activations"
    if scheme.bits != 8 or scheme.group_size not in (PER_CHANNEL, spec.cols) or not scheme.symmetric or spec.act_order:
        return "it wants 8-bit weights with one symmetric scale per row"
    if spec.cols > INT32_COLS:
        return f"sums over {spec.cols} inputs may overflow int32"
    return None if _int8_int8_runs() else "torch's product of int8 matrices is not exact here"


def _int8_int8_pack(weight: QuantizedWeight, spec: LinearSpec, device: torch.device) -> Packed:
    """[N, K] int8, [N] float32."""
    return (weight.codes.to(torch.int16) - 128).to(torch.int8), weight.scale[:, 0].float().contiguous()


def _int8_int8_apply(x: Tensor, packed: Packed, spec: LinearSpec) -> Tensor:
    weight, scale = packed
    codes, token_scale = quantize_per_token(x)
    return torch._int_mm(codes, weight.T).float().mul_(scale).mul_(token_scale).to(x.dtype)


CPU_KERNELS = (
    LinearKernel("torch int8 x int8 (CPU)", _int8_int8_supports, _int8_int8_pack, _int8_int8_apply),
    LinearKernel("torch int4 (CPU)", _int4_supports, _int4_pack_weight, _int4_apply),
    LinearKernel("torch int8 (CPU)", _int8_supports, _int8_pack, _int8_apply),
    LinearKernel("torch int8 as two int4 (CPU)", _int8_grouped_supports, _int8_grouped_pack, _int8_grouped_apply),
)
