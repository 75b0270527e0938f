"""The order in which the CUDA kernels want a weight: fragments of the tensor cores, ready for 16-byte loads.

A weight [N, K] is cut into tiles of 16 rows and chunks of 64 columns. A warp multiplies one chunk of one tile at a
time; lane 4 g + t (g < 8, t < 4) holds rows g and g + 8 and 16 of the columns, whose weights are one unit of 16 bytes
(4 bits) or two (8 bits), and whose activations are runs of 16 bytes. The tensor cores contract over columns in any
order, as long as both operands agree; this order is theirs.

16-bit activations: for h in 0, 1, the columns 32 h + 8 t + j, j < 8. Word v of a unit holds columns 8 t + 2 v,
8 t + 2 v + 1 of both h (8 bits: of one). Int8 activations: columns 16 t + j, j < 16. Word v holds columns 16 t + 4 v ..
16 t + 4 v + 3 of both rows (8 bits: of one).

So a lane of skinny.cu and stream.cu finds all of its columns in its own units, and ldmatrix, which hands word v of four
lanes t to lane v, gives gemm.cu what the tensor cores want beside activations that lie as they come. Units are
exchanged within 128 bytes (lane i lies at place i xor i / 8), for ldmatrix to meet no bank conflicts.

Nothing is padded to more than 16 rows and 64 columns: kernels mask the rows beyond N.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.quant.errors import QtoolError
from qtool.quant.scheme import PER_CHANNEL, QuantScheme
from qtool.quant.weight import QuantizedWeight

TILE_ROWS = 16
CHUNK_COLS = 64
GROUPS = (128, 64, 32)  # columns that share a scale inside a kernel
_SLAB_CODES = 1 << 25  # codes rearranged at once: bounds the transient memory of packing


@dataclass(frozen=True)
class PackedWeight:
    """One weight in kernel order, on one device.

    Attributes:
        codes: [tiles, chunks, bits / 4, 32 places, 4] int32.
        scales: [tiles, groups, 8, 2] float16 or bfloat16 (rows g and g + 8 side by side), or [N] float32 per channel.
        zeros: [tiles, groups, 8, 2] uint8, groups = 1 per channel; empty where symmetric.
        columns: [64 chunks] int64, which column of x each one multiplies (K: none); empty where they are 0, 1, 2, ...
        powers: [16 tiles] float32, powers of two: the largest scale of a row, divided by its power, is from 2^-9 to
            below 2^-8, or less where all are tiny (gemm.cu says what for); empty per channel, where asymmetric, with
            int8 activations, and where groups of a row differ too much.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    columns: Tensor
    powers: Tensor

    @property
    def chunks(self) -> int:
        return self.codes.shape[1]

    @property
    def tiles(self) -> int:
        return self.codes.shape[0]


def kernel_group(scheme: QuantScheme) -> int | None:
    """Columns that share a scale inside a kernel: 0 per channel, else the largest of 128, 64, 32 that divides the
    scheme's group; None where none does."""
    if scheme.group_size == PER_CHANNEL:
        return 0
    return next((g for g in GROUPS if scheme.group_size % g == 0), None)


def _column_order(weight: QuantizedWeight, group: int) -> tuple[Tensor, Tensor]:
    """Columns and scale groups in kernel order, for a weight whose columns carry their group (act-order).

    Returns:
        columns: [K'] int64, K where nothing is multiplied; each run of `group` belongs to one scale group.
        groups: [K' / group] int64, the scale group of each run.
    """
    assert weight.g_idx is not None
    cols, device = weight.shape[1], weight.codes.device
    of_column = weight.g_idx.to(device).long()
    count = torch.bincount(of_column, minlength=weight.scale.shape[1])
    runs = (count + group - 1) // group  # [G]
    groups = torch.repeat_interleave(torch.arange(len(count), device=device), runs)
    order = torch.argsort(of_column, stable=True)
    start = torch.cumsum(count, 0) - count  # first place of a group among the sorted columns
    padded_start = (torch.cumsum(runs, 0) - runs) * group
    sorted_groups = of_column[order]
    place = padded_start[sorted_groups] + torch.arange(cols, device=device) - start[sorted_groups]
    columns = torch.full((len(groups) * group,), cols, dtype=torch.int64, device=device)
    columns[place] = order
    return columns, groups


def _pad(x: Tensor, rows: int, cols: int, value: int | float = 0) -> Tensor:
    missing = (0, cols - x.shape[1], 0, rows - x.shape[0])
    return torch.nn.functional.pad(x, missing, value=value) if any(missing) else x


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _fragments(codes: Tensor, bits: int, act_bits: int) -> Tensor:
    """[16 T, 64 C] uint8 codes → [T, C, bits / 4, 32, 4] int32 in the order of one lane's loads."""
    tiles, chunks = codes.shape[0] // TILE_ROWS, codes.shape[1] // CHUNK_COLS
    if act_bits == 16:
        v = codes.view(tiles, 2, 8, chunks, 2, 4, 4, 2)  # tile, row half, g, chunk, h, t, v = j >> 1, e = j & 1
        if bits == 4:  # word v, nibble row half + 2 h + 4 e: see pairs_to_acts in common.cuh
            lanes = (v[:, 0] | (v[:, 1] << 4)).permute(0, 2, 1, 4, 5, 6, 3)  # tile, chunk, g, t, v, e, h
        else:  # load h, word v, byte 2 row half + e
            lanes = v.permute(0, 3, 4, 2, 5, 6, 1, 7)  # tile, chunk, h, g, t, v, row half, e
    else:
        v = codes.view(tiles, 2, 8, chunks, 4, 16)  # tile, row half, g, chunk, t, j
        if bits == 4:  # two's complement; byte j, low nibble row g
            lanes = ((v[:, 0] ^ 8) | ((v[:, 1] ^ 8) << 4)).permute(0, 2, 1, 3, 4)  # tile, chunk, g, t, j
        else:
            lanes = (v ^ 128).permute(0, 3, 1, 2, 4, 5)  # tile, chunk, row half, g, t, j
    places = torch.arange(32, device=codes.device)
    units = lanes.reshape(tiles, chunks, bits // 4, 32, 16)[:, :, :, places ^ (places >> 3)]
    return units.view(-1).view(torch.int32).view(tiles, chunks, bits // 4, 32, 4)


def _per_row_pair(x: Tensor, tiles: int) -> Tensor:
    """[16 T, G] → [T, G, 8, 2]: rows g and g + 8 of a tile side by side."""
    return x.view(tiles, 2, 8, x.shape[1]).permute(0, 3, 2, 1).contiguous()


def _scale_dtype(scale: Tensor) -> torch.dtype:
    """The 16-bit type that holds these scales: their own, else float16 where its range suffices, else bfloat16."""
    if scale.dtype in (torch.float16, torch.bfloat16):
        return scale.dtype
    size = scale.abs()
    low = float(torch.where(size > 0, size, torch.inf).min())
    info = torch.finfo(torch.float16)
    return torch.float16 if low >= info.tiny and float(size.max()) <= info.max else torch.bfloat16


def _powers(scale: Tensor) -> Tensor:
    """[N, G] scales → [N] float32: PackedWeight.powers. Empty where a row's smallest scale is less than 2^-8 of its
    largest, which would be rounded more than the weights themselves, or the largest has no such power."""
    size = scale.abs().float()
    most = size.amax(dim=1)
    least = torch.where(size > 0, size, torch.inf).amin(dim=1)
    if not bool(((least >= most * 2**-8) & (most < 2.0**118)).all()):
        return torch.empty(0, device=scale.device)
    lowest = -3 if scale.dtype == torch.float16 else -100  # 2^12 over a power is of the scales' type
    exponent = (torch.frexp(most).exponent + 8).clamp_min(lowest)
    return ((exponent + 127) << 23).view(torch.float32)


def pack_weight(weight: QuantizedWeight, act_bits: int, device: torch.device) -> PackedWeight:
    """Rearrange `weight` into kernel order on `device`, a slab of rows at a time.

    Args:
        weight: [N, K]; any N and K, symmetric or not, scales of any sign, with or without g_idx.
        act_bits: 16, or 8 where activations are quantized too (another order of the codes).
        device: where the packed weight lies.

    Raises:
        QtoolError: a group size that no kernel knows.
    """
    scheme = weight.scheme
    group = kernel_group(scheme)
    if group is None:
        raise QtoolError(f"group size {scheme.group_size} has no CUDA kernel: use 128, 64, 32 or -1")
    rows, cols = weight.shape
    tiles = _round_up(rows, TILE_ROWS) // TILE_ROWS
    scale = weight.scale.to(device)
    zero = None if weight.zero is None else weight.zero.to(device)
    columns = torch.empty(0, dtype=torch.int64, device=device)

    if group and weight.g_idx is not None:
        columns, of_run = (t.to(device) for t in _column_order(weight, group))
        scale = scale[:, of_run]
        zero = None if zero is None else zero[:, of_run]
        width = len(columns)
    else:
        width = cols
        if group:
            repeat = scheme.group_size // group
            scale = scale.repeat_interleave(repeat, dim=1)
            zero = None if zero is None else zero.repeat_interleave(repeat, dim=1)
    padded = _round_up(width, CHUNK_COLS)
    if len(columns):
        columns = torch.nn.functional.pad(columns, (0, padded - width), value=cols)

    chunks = padded // CHUNK_COLS
    codes = torch.empty(tiles, chunks, scheme.bits // 4, 32, 4, dtype=torch.int32, device=device)
    slab = max(1, _SLAB_CODES // (padded * TILE_ROWS))
    for first in range(0, tiles, slab):
        last = min(first + slab, tiles)
        part = weight.codes[first * TILE_ROWS : last * TILE_ROWS].to(device)
        if len(columns):
            part = torch.nn.functional.pad(part, (0, 1))[:, columns]
        part = _pad(part, (last - first) * TILE_ROWS, padded)
        codes[first:last] = _fragments(part.contiguous(), scheme.bits, act_bits)

    if group:
        groups = padded // group
        scale = _pad(scale.to(_scale_dtype(scale)), tiles * TILE_ROWS, groups)
        scales = _per_row_pair(scale, tiles)
    else:
        groups = 1
        scales = scale.to(torch.float32).reshape(rows).contiguous()
    if zero is None:
        zeros = torch.empty(0, dtype=torch.uint8, device=device)
    else:
        zeros = _per_row_pair(_pad(zero, tiles * TILE_ROWS, groups), tiles)
    fused = group and act_bits == 16 and scheme.symmetric
    powers = _powers(scale) if fused else torch.empty(0, device=device)
    return PackedWeight(codes, scales, zeros, columns, powers)


def arrange_activations(x: Tensor, packed: PackedWeight) -> Tensor:
    """x [M, K] as the kernels read it: columns in the weight's order, zeros where it has none, contiguous, 16-byte
    aligned. [M, 64 chunks]; x itself where nothing has to change."""
    width = packed.chunks * CHUNK_COLS
    if len(packed.columns):
        return torch.nn.functional.pad(x, (0, 1)).index_select(1, packed.columns)
    if x.shape[1] != width:
        return torch.nn.functional.pad(x, (0, width - x.shape[1]))
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
