"""The LayerOps of a CUDA device: one kernel where torch would launch several."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import util

import torch
from torch import Tensor

from qtool.quant.errors import QtoolError
from qtool.runtime.kernels.cuda.attention import HEAD_DIMS, MAX_GROUP, PagedBatch, attend, plan_step
from qtool.runtime.kernels.cuda.linear import NAME, apply_gated, apply_rows, form_before, gates
from qtool.runtime.kernels.cuda.nvrtc import library
from qtool.runtime.kernels.cuda.rows import MAX_COLUMNS, Form, Int8Rows, add_norm, silu_mul
from qtool.runtime.kernels.interface import QuantLinear
from qtool.runtime.kernels.layer_ops import AttentionShape, LayerOps, Linear, silu_linear

_OLDEST = (8, 0)


def unsupported(shape: AttentionShape, hidden_size: int, block_size: int, dtype: torch.dtype) -> str | None:
    """None where the kernels of this folder run such a model on the current machine, else the reason they cannot."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"activations in {str(dtype).removeprefix('torch.')}; the kernels know float16 and bfloat16"
    if shape.head_dim not in HEAD_DIMS:
        return f"heads of {shape.head_dim}; the kernels know {', '.join(map(str, HEAD_DIMS))}"
    if shape.num_heads // shape.num_kv_heads > MAX_GROUP:
        return f"more than {MAX_GROUP} query heads to a key-value head"
    if block_size % 16:
        return f"KV blocks of {block_size} tokens; the kernels want a multiple of 16"
    if hidden_size % 64 or hidden_size > MAX_COLUMNS:
        return f"a hidden size of {hidden_size}; the kernels want a multiple of 64 up to {MAX_COLUMNS}"
    if torch.cuda.get_device_capability() < _OLDEST:
        return "compute capability below 8.0"
    if util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        library()
    except QtoolError as error:
        return str(error)
    return None


def _form(linear: Linear, tokens: int) -> Form:
    """In which form `linear` can take activations."""
    if isinstance(linear, QuantLinear) and linear.kernel.name == NAME:
        return form_before(tokens, linear.packed, linear.spec)
    return Form.PLAIN


def _run(rows: Tensor | Int8Rows, form: Form, linear: Linear) -> Tensor:
    """`linear` of what a kernel before it has left in `form`."""
    if form is Form.PLAIN:
        assert isinstance(rows, Tensor)
        return linear(rows)
    assert isinstance(linear, QuantLinear)
    out = apply_rows(rows, linear.packed, linear.spec)
    return out if linear.bias is None else out + linear.bias


def _norm_linear(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, linear: Linear
) -> tuple[Tensor, Tensor]:
    form = _form(linear, len(hidden))
    return _run(add_norm(hidden, delta, weight, eps, form), form, linear), hidden


def _gates(linear: Linear, tokens: int) -> QuantLinear | None:
    """`linear` where its product can leave the gated activation itself."""
    if isinstance(linear, QuantLinear) and linear.kernel.name == NAME and linear.bias is None:
        return linear if gates(tokens, linear.packed, linear.spec) else None
    return None


def _gated_mlp(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, gate_up: Linear, down: Linear
) -> tuple[Tensor, Tensor]:
    form = _form(gate_up, len(hidden))
    rows = add_norm(hidden, delta, weight, eps, form)
    gating = _gates(gate_up, len(hidden))
    if gating is not None:
        return down(apply_gated(rows, gating.packed, gating.spec)), hidden
    return _silu_linear(_run(rows, form, gate_up), down), hidden


def _silu_linear(gate_up: Tensor, linear: Linear) -> Tensor:
    if gate_up.shape[1] % 16 or gate_up.shape[1] // 2 > MAX_COLUMNS:
        return silu_linear(gate_up, linear)
    form = _form(linear, len(gate_up))
    return _run(silu_mul(gate_up, form), form, linear)


def _rotation(cos: Tensor, sin: Tensor, plan: PagedBatch) -> tuple[Tensor, Tensor]:
    return cos, sin


def _plan(
    starts: Sequence[int],
    counts: Sequence[int],
    tables: Sequence[Sequence[int]],
    *,
    block_size: int,
    shape: AttentionShape,
    windows: frozenset[int | None],
    dtype: torch.dtype,
    device: torch.device,
    also: Sequence[Sequence[int]] = (),
) -> PagedBatch:
    return plan_step(starts, counts, tables, block_size=block_size, shape=shape, device=device, also=also)


CUDA_OPS = LayerOps(True, _plan, _rotation, _norm_linear, attend, _gated_mlp)
"""For models and block sizes for which `unsupported` gave None."""
