"""The CUDA kernels as LinearKernel: what they support, packing at load, the product for any number of tokens."""

from __future__ import annotations

import functools
from importlib import util

import torch
from torch import Tensor

from qtool.quant.errors import QtoolError
from qtool.quant.scheme import PER_CHANNEL, QuantScheme
from qtool.quant.weight import QuantizedWeight
from qtool.runtime.kernels.cuda import dequantize, gemm, skinny, stream
from qtool.runtime.kernels.cuda.choice import Choice, choose
from qtool.runtime.kernels.cuda.gemm import GemmConfig
from qtool.runtime.kernels.cuda.layout import CHUNK_COLS, PackedWeight, arrange_activations, kernel_group, pack_weight
from qtool.runtime.kernels.cuda.rows import MAX_COLUMNS, Form, Int8Rows, quantize_rows, round_rows
from qtool.runtime.kernels.cuda.skinny import SkinnyConfig
from qtool.runtime.kernels.cuda.stream import StreamConfig
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
    """`weight` in kernel order on `device`: the tensors of layout.PackedWeight.

    Raises:
        QtoolError: the weight does not agree with `spec`.
    """
    if weight.shape != (spec.rows, spec.cols) or weight.scheme != spec.scheme:
        raise QtoolError(
            f"a weight of {weight.shape} in {weight.scheme.name} was given to a kernel made for "
            f"({spec.rows}, {spec.cols}) in {spec.scheme.name}"
        )
    packed = pack_weight(weight, spec.scheme.act_bits or 16, device)
    return packed.codes, packed.scales, packed.zeros, packed.columns, packed.powers


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
    """The product through one given kernel; the tests call it."""
    out = torch.empty(x.shape[0], spec.rows, dtype=spec.dtype, device=x.device)
    if len(x):
        with torch.cuda.device(x.device):
            multiply(ready(x, packed, spec, choice), packed, spec, choice, out)
    return out


def ready(x: Tensor, packed: PackedWeight, spec: LinearSpec, choice: Choice) -> Tensor | Int8Rows:
    """x [M, cols] in the order and the form in which `multiply` takes it."""
    x, form = arrange_activations(x, packed), _form(packed, spec, choice)
    return x if form is Form.PLAIN else quantize_rows(x) if form is Form.INT8 else round_rows(x)


def multiply(
    rows: Tensor | Int8Rows, packed: PackedWeight, spec: LinearSpec, choice: Choice, out: Tensor, *, gated: bool = False
) -> None:
    """out = rows @ weight.T by one kernel; silu(gate) * up where `gated`, which `gates` allows."""
    x, scales = (rows.codes, rows.scales) if isinstance(rows, Int8Rows) else (rows, None)
    if isinstance(choice, SkinnyConfig):
        skinny.multiply(x, scales, packed, spec, choice, out, gated=gated)
    elif isinstance(choice, StreamConfig):
        stream.multiply(x, packed, spec, choice, out, gated=gated)
    elif isinstance(choice, GemmConfig):
        gemm.multiply(x, scales, packed, spec, choice, out, gated=gated)
    elif isinstance(rows, Int8Rows):
        _multiply_int8(rows, packed, spec, out)
    else:
        dequantize.multiply(rows, packed, spec, out)


def _form(packed: PackedWeight, spec: LinearSpec, choice: Choice) -> Form:
    if not spec.scheme.act_bits:
        return Form.PLAIN
    return Form.INT8 if choice is not None or _has_int8_product(packed, spec) else Form.ROUNDED


def form_before(tokens: int, packed: Packed, spec: LinearSpec) -> Form:
    """The form in which a kernel before this product can leave its activations."""
    weight = PackedWeight(*packed)
    whole = weight.chunks * CHUNK_COLS == spec.cols and not len(weight.columns)
    if not spec.scheme.act_bits or not whole or spec.cols > MAX_COLUMNS or not tokens:
        return Form.PLAIN
    return _form(weight, spec, choose(spec, tokens, weight.codes.device))


def apply_rows(rows: Int8Rows | Tensor, packed: Packed, spec: LinearSpec) -> Tensor:
    """The product of activations that are rounded already, in the form that form_before gave. → [M, rows]"""
    weight = PackedWeight(*packed)
    out = torch.empty(len(rows), spec.rows, dtype=spec.dtype, device=weight.codes.device)
    with torch.cuda.device(out.device):
        multiply(rows, weight, spec, choose(spec, len(rows), out.device), out)
    return out


def gates(tokens: int, packed: Packed, spec: LinearSpec) -> bool:
    """Whether the product of so many tokens by gate and up can leave silu(gate) * up, through `apply_gated`."""
    choice = choose(spec, tokens, packed[0].device) if tokens else None
    if isinstance(choice, StreamConfig):
        return stream.gates(spec, tokens, choice)
    if isinstance(choice, GemmConfig):
        return gemm.gates(spec)
    return isinstance(choice, SkinnyConfig) and skinny.gates(spec, tokens, choice)


def apply_gated(rows: Int8Rows | Tensor, packed: Packed, spec: LinearSpec) -> Tensor:
    """silu(gate) * up [M, rows / 2], for which `gates` holds, of x [M, cols] or its rows as form_before allows."""
    weight = PackedWeight(*packed)
    out = torch.empty(len(rows), spec.rows // 2, dtype=spec.dtype, device=weight.codes.device)
    choice = choose(spec, len(rows), out.device)
    with torch.cuda.device(out.device):
        if isinstance(rows, Tensor):
            rows = ready(rows, weight, spec, choice)
        multiply(rows, weight, spec, choice, out, gated=True)
    return out


def _has_int8_product(packed: PackedWeight, spec: LinearSpec) -> bool:
    """Whether many tokens can go through int8_matmul: both sides int8, one scale a channel, and Triton is there."""
    scheme = spec.scheme
    plain = scheme.bits == 8 and scheme.act_bits == 8 and scheme.symmetric and scheme.group_size == PER_CHANNEL
    return plain and packed.chunks % 2 == 0 and not len(packed.columns) and util.find_spec("triton") is not None


def _multiply_int8(rows: Int8Rows, packed: PackedWeight, spec: LinearSpec, out: Tensor) -> None:
    """out = rows @ weight.T for a weight for which `_has_int8_product` holds."""
    from qtool.runtime.kernels.cuda.int8_matmul import int8_matmul, unpack_rows

    int8_matmul(rows, unpack_rows(packed, spec.rows), packed.scales, out)


def cuda_kernel() -> LinearKernel:
    """Int4 and int8 weights with 16-bit or int8 activations, Ampere and later."""
    return LinearKernel(NAME, supports, pack, apply)
