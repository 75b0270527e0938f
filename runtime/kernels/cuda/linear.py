"""The CUDA kernels as LinearKernel: what they support, packing at load, the product for any number of tokens."""

from __future__ import annotations

import functools
from importlib import util

import torch
from torch import Tensor

from qtool.quant.errors import QtoolError
from qtool.quant.scheme import PER_CHANNEL, QuantScheme
from qtool.quant.weight import QuantizedWeight
from qtool.runtime.kernels.cuda import dequantize, gemm, gemm16, skinny, stream, wide
from qtool.runtime.kernels.cuda.choice import Choice, choose
from qtool.runtime.kernels.cuda.gemm import GemmConfig
from qtool.runtime.kernels.cuda.gemm16 import Gemm16Config
from qtool.runtime.kernels.cuda.layout import CHUNK_COLS, PackedWeight, arrange_activations, kernel_group, pack_weight
from qtool.runtime.kernels.cuda.rows import MAX_COLUMNS, ROUNDED, ROW_MAJOR, Int8Rows, quantize_rows, round_rows
from qtool.runtime.kernels.cuda.skinny import SkinnyConfig
from qtool.runtime.kernels.cuda.stream import StreamConfig
from qtool.runtime.kernels.cuda.wide import WideConfig
from qtool.runtime.kernels.interface import LinearKernel, LinearSpec, Packed

NAME = "cuda-int"
_OLDEST = (8, 0)  # Ampere: bfloat16 and int8 tensor cores
_MAX_COLS = 1 << 17  # an int32 sum of products of bytes stays exact


def supports(spec: LinearSpec, device: torch.device) -> str | None:
    """None where the kernels multiply by such a weight on `device`, else the reason they cannot. Never raises."""
    if device.type != "cuda":
        return "not a CUDA device"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"activations in {str(spec.dtype).removeprefix('torch.')}; the kernels know float16 and bfloat16"
    if kernel_group(spec.scheme) is None:
        return f"group size {spec.scheme.group_size}; the kernels know multiples of 32, and one scale per channel"
    if spec.cols > _MAX_COLS:
        return f"more than {_MAX_COLS} input columns"
    try:
        index = torch.cuda.current_device() if device.index is None else device.index
        return _probe(index, spec.scheme.bits, spec.scheme.act_bits, spec.dtype)
    except Exception as error:
        return f"the device cannot be used: {error}"


@functools.cache
def _probe(device_index: int, bits: int, act_bits: int | None, dtype: torch.dtype) -> str | None:
    """Run one small product of this kind on the device and compare; the reason it cannot be trusted, or None."""
    if torch.cuda.get_device_capability(device_index) < _OLDEST:
        return "compute capability below 8.0"
    device = torch.device("cuda", device_index)
    scheme = QuantScheme(bits, 64, act_bits=act_bits)
    generator = torch.Generator().manual_seed(0)
    rows, cols = 16, 128
    weight = QuantizedWeight(
        codes=torch.randint(0, 1 << bits, (rows, cols), generator=generator, dtype=torch.uint8),
        scale=(torch.rand(rows, cols // 64, generator=generator) + 0.5).to(torch.float16) / (1 << bits),
        zero=None,
        scheme=scheme,
    )
    x = torch.randn(2, cols, generator=generator).to(dtype)
    spec = LinearSpec(rows, cols, scheme, dtype=dtype)
    try:
        y = apply(x.to(device), pack(weight, spec, device), spec).cpu().double()
    except QtoolError as error:
        return str(error)
    want = x.double() @ weight.dequantize(torch.float64).T
    error_size = float((y - want).norm() / want.norm())
    # 8-bit activations and bfloat16 outputs cost up to 1e-2; a wrong instruction costs everything.
    return None if error_size < 0.03 else f"a trial product was wrong (relative error {error_size:.3g})"


def pack(weight: QuantizedWeight, spec: LinearSpec, device: torch.device) -> Packed:
    """`weight` in kernel order on `device`: (codes, scales, zeros, columns) of layout.PackedWeight.

    Raises:
        QtoolError: the weight does not agree with `spec`.
    """
    if weight.shape != (spec.rows, spec.cols) or weight.scheme != spec.scheme:
        raise QtoolError(
            f"a weight of {weight.shape} in {weight.scheme.name} was given to a kernel made for "
            f"({spec.rows}, {spec.cols}) in {spec.scheme.name}"
        )
    packed = pack_weight(weight, spec.scheme.act_bits or 16, device)
    return packed.codes, packed.scales, packed.zeros, packed.columns


def apply(x: Tensor, packed: Packed, spec: LinearSpec) -> Tensor:
    """x [M, cols] @ weight.T → [M, rows], both in spec.dtype; any M. Can be captured into a CUDA graph.

    Raises:
        QtoolError: x has another shape, type or device than the weight was packed for.
    """
    if x.ndim != 2 or x.shape[1] != spec.cols or x.dtype != spec.dtype or x.device != packed[0].device:
        raise QtoolError(
            f"activations {tuple(x.shape)} {x.dtype} on {x.device}, expected (M, {spec.cols}) {spec.dtype} "
            f"on {packed[0].device}"
        )
    return apply_choice(x, PackedWeight(*packed), spec, choose(spec, x.shape[0], x.device))


def apply_choice(x: Tensor, packed: PackedWeight, spec: LinearSpec, choice: Choice) -> Tensor:
    """The product through one given kernel; the tuner and the tests call it."""
    out = torch.empty(x.shape[0], spec.rows, dtype=spec.dtype, device=x.device)
    if not len(x):
        return out
    with torch.cuda.device(x.device):
        x = arrange_activations(x, packed)
        if isinstance(choice, SkinnyConfig):
            if spec.scheme.act_bits:
                rows = quantize_rows(x, 0)
                skinny.multiply(rows.codes, rows.scales, packed, spec, choice, out)
            else:
                skinny.multiply(x, None, packed, spec, choice, out)
        elif isinstance(choice, StreamConfig):
            stream.multiply(x, packed, spec, choice, out)
        elif isinstance(choice, Gemm16Config):
            gemm16.multiply(x, packed, spec, choice, out)
        elif isinstance(choice, WideConfig) and wide.supports(packed, spec):
            rows = quantize_rows(x, choice.tokens)
            wide.multiply(rows.codes, rows.scales, packed, spec, choice, out)
        elif isinstance(choice, GemmConfig) and gemm.supports(packed, spec):
            rows = quantize_rows(x, choice.tokens)
            gemm.multiply(rows.codes, rows.scales, packed, spec, choice, out)
        elif multiplies_int8(packed, spec):
            int8_product(quantize_rows(x, ROW_MAJOR), packed, spec, out)
        else:
            dequantize.multiply(round_rows(x) if spec.scheme.act_bits else x, packed, spec, out)
    return out


def int8_order(tokens: int, packed: Packed, spec: LinearSpec) -> int | None:
    """The order (see rows.cuh) in which a kernel before this product can leave its int8 activations; None where the
    product wants them in 16 bits."""
    weight = PackedWeight(*packed)
    whole = weight.chunks * CHUNK_COLS == spec.cols and not len(weight.columns)
    if not spec.scheme.act_bits or not whole or spec.cols > MAX_COLUMNS or not tokens:
        return None
    choice = choose(spec, tokens, weight.codes.device)
    if isinstance(choice, SkinnyConfig):
        return 0
    if isinstance(choice, WideConfig) and wide.supports(weight, spec):
        return choice.tokens
    if isinstance(choice, GemmConfig) and gemm.supports(weight, spec):
        return choice.tokens
    return ROW_MAJOR if multiplies_int8(weight, spec) else ROUNDED


def gates(tokens: int, packed: Packed, spec: LinearSpec) -> bool:
    """Whether the product of so many tokens by gate and up can leave silu(gate) * up, through `apply_gated`."""
    choice = choose(spec, tokens, packed[0].device) if tokens else None
    if isinstance(choice, StreamConfig):
        return stream.gates(spec, tokens, choice)
    if isinstance(choice, Gemm16Config):
        return gemm16.gates(spec)
    return isinstance(choice, SkinnyConfig) and skinny.gates(spec, tokens, choice)


def apply_gated(x: Tensor, packed: Packed, spec: LinearSpec) -> Tensor:
    """silu(gate) * up [M, rows / 2] of x [M, cols], for which `gates` holds."""
    weight = PackedWeight(*packed)
    choice = choose(spec, len(x), x.device)
    out = torch.empty(len(x), spec.rows // 2, dtype=spec.dtype, device=x.device)
    with torch.cuda.device(x.device):
        x = arrange_activations(x, weight)
        if isinstance(choice, StreamConfig):
            stream.multiply(x, weight, spec, choice, out, gated=True)
        elif isinstance(choice, Gemm16Config):
            gemm16.multiply(x, weight, spec, choice, out, gated=True)
        else:
            assert isinstance(choice, SkinnyConfig)
            skinny.multiply(x, None, weight, spec, choice, out, gated=True)
    return out


def multiplies_int8(packed: PackedWeight, spec: LinearSpec) -> bool:
    """Whether many tokens go through int8_matmul: both sides int8, one scale a channel, and Triton is there."""
    scheme = spec.scheme
    plain = scheme.bits == 8 and scheme.act_bits == 8 and scheme.symmetric and scheme.group_size == PER_CHANNEL
    return plain and packed.chunks % 2 == 0 and not len(packed.columns) and util.find_spec("triton") is not None


def int8_product(rows: Int8Rows, packed: PackedWeight, spec: LinearSpec, out: Tensor) -> None:
    """out = rows @ weight.T for a weight for which `multiplies_int8` holds; rows in ROW_MAJOR order."""
    from qtool.runtime.kernels.cuda.int8_matmul import int8_matmul, unpack_rows

    int8_matmul(rows, unpack_rows(packed, spec.rows), packed.scales, out)


def apply_rows(rows: Int8Rows | Tensor, packed: Packed, spec: LinearSpec) -> Tensor:
    """The product of activations that are rounded already, in the order that int8_order gave. → [M, rows]"""
    weight = PackedWeight(*packed)
    tokens = len(rows) if isinstance(rows, Tensor) else len(rows.scales)
    out = torch.empty(tokens, spec.rows, dtype=spec.dtype, device=weight.codes.device)
    choice = choose(spec, tokens, out.device)
    if isinstance(rows, Tensor):
        dequantize.multiply(rows, weight, spec, out)
    elif isinstance(choice, SkinnyConfig):
        skinny.multiply(rows.codes, rows.scales, weight, spec, choice, out)
    elif isinstance(choice, WideConfig) and wide.supports(weight, spec):
        wide.multiply(rows.codes, rows.scales, weight, spec, choice, out)
    elif isinstance(choice, GemmConfig) and gemm.supports(weight, spec):
        gemm.multiply(rows.codes, rows.scales, weight, spec, choice, out)
    else:
        int8_product(rows, weight, spec, out)
    return out


def cuda_kernel() -> LinearKernel:
    """Int4 and int8 weights with 16-bit or int8 activations, Ampere and later."""
    return LinearKernel(NAME, supports, pack, apply)
