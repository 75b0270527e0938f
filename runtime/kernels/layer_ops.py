"""What a decoder block does between its linears, as one table of functions a device: norms, rotation, attention over
the paged cache, the gated activation. Here in torch, for any device; the CUDA table is cuda/layer_ops.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from qtool.runtime.kernels.attention import AttentionBatch, paged_attention, plan_attention
from qtool.runtime.kernels.kv_cache import KVCache

Linear = Callable[[Tensor], Tensor]
"""x [tokens, in_features] → [tokens, out_features]."""


@dataclass(frozen=True)
class AttentionShape:
    """The static facts of a model's attention.

    Attributes:
        eps: of the norms of queries and keys, where there are any.
        soft_cap: a scaled score s counts as soft_cap * tanh(s / soft_cap) (Gemma 2, arXiv 2408.00118); 0: as it is.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    soft_cap: float = 0.0


class StepPlan(Protocol):
    """The layout of one step, as an LayerOps planned it: opaque, but for where its tokens go."""

    @property
    def slot_mapping(self) -> Tensor:
        """[num_tokens]: block * block_size + offset."""
        ...

    @property
    def also(self) -> tuple[Tensor, ...]:
        """What PlanFn was given to bring along, [numbers] int32 each."""
        ...


class PlanFn(Protocol):
    """Lay out a step: row i computes tokens starts[i] .. starts[i] + counts[i] - 1 of the sequence in tables[i].

    Rows of one token come first, in ascending order of `starts`, then best by length and start. `windows`: those that
    the model's layers have. `also`: numbers that are wanted on the device too, in the same copy.
    """

    def __call__(
        self,
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
    ) -> Any: ...


class AttendFn(Protocol):
    """Norm queries and keys, rotate them, cache keys and values, attend.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; may be overwritten.
        norms: of queries and of keys, [head_dim] each, or None.
        rotation: what LayerOps.rotation gave.
        window: a token sees itself and the window - 1 tokens before it; None: all.
        out: where to put the result, contiguous; None: anywhere.

    Returns [num_tokens, num_heads * head_dim].
    """

    def __call__(
        self,
        qkv: Tensor,
        shape: AttentionShape,
        norms: tuple[Tensor, Tensor] | None,
        rotation: tuple[Tensor, Tensor],
        cache: KVCache,
        plan: Any,
        window: int | None,
        out: Tensor | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class LayerOps:
    """The operations of one device.

    Attributes:
        on_device: no call waits for the device, so steps can be queued and decodes captured into CUDA graphs; slots
            that hold no token of a sequence count for nothing, even where NaN lies in them.
        plan: a step's layout, shared by all layers.
        rotation: (cos, sin tables [max_model_len, 1, head_dim], plan) → what `attend` wants of them.
        norm_linear: (hidden [tokens, hidden_size], delta or None, norm weight, eps, linear) → (linear of the norm of
            hidden + delta, hidden + delta); `hidden` may be overwritten.
        attend: see AttendFn.
        gated_mlp: (hidden, delta, norm weight, eps, gate_up, down) → (down of silu(gate) * up, where gate and up
            [tokens, inner] are what gate_up gives, side by side, of the norm of hidden + delta; hidden + delta);
            `hidden` may be overwritten.
    """

    on_device: bool
    plan: PlanFn
    rotation: Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]
    norm_linear: Callable[[Tensor, Tensor | None, Tensor, float, Linear], tuple[Tensor, Tensor]]
    attend: AttendFn
    gated_mlp: Callable[[Tensor, Tensor | None, Tensor, float, Linear, Linear], tuple[Tensor, Tensor]]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, the statistics in float32 (Zhang and Sennrich 2019)."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


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
) -> AttentionBatch:
    return plan_attention(
        starts,
        counts,
        tables,
        block_size=block_size,
        windows=windows,
        dtype=dtype,
        device=device,
        also=also,
        heads_per_key=shape.num_heads // shape.num_kv_heads,
    )


def _rotation(cos: Tensor, sin: Tensor, plan: AttentionBatch) -> tuple[Tensor, Tensor]:
    return cos[plan.positions], sin[plan.positions]


def _norm_linear(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, linear: Linear
) -> tuple[Tensor, Tensor]:
    if delta is not None:
        hidden = hidden + delta
    return linear(rms_norm(hidden, weight, eps)), hidden


def _attend(
    qkv: Tensor,
    shape: AttentionShape,
    norms: tuple[Tensor, Tensor] | None,
    rotation: tuple[Tensor, Tensor],
    cache: KVCache,
    plan: AttentionBatch,
    window: int | None,
    out: Tensor | None = None,
) -> Tensor:
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    qkv = qkv.view(-1, heads + 2 * kv_heads, dim)
    turned = qkv[:, : heads + kv_heads]  # queries and keys
    if norms is not None:
        turned[:, :heads] = rms_norm(turned[:, :heads], norms[0], shape.eps)
        turned[:, heads:] = rms_norm(turned[:, heads:], norms[1], shape.eps)
    cos, sin = rotation
    other = turned.roll(dim // 2, dims=-1)
    turned.mul_(cos).addcmul_(other, sin)
    kv = cache.write(qkv[:, heads:], plan.slot_mapping)
    queries = qkv[:, :heads]
    attended = paged_attention(queries, kv, cache, plan, scale=dim**-0.5, window=window, soft_cap=shape.soft_cap)
    return attended if out is None else out.copy_(attended)


def silu_linear(gate_up: Tensor, linear: Linear) -> Tensor:
    """`linear` of silu(gate) * up, given side by side [tokens, 2 * inner]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return linear(functional.silu(gate).mul_(up))


def _gated_mlp(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, gate_up: Linear, down: Linear
) -> tuple[Tensor, Tensor]:
    both, hidden = _norm_linear(hidden, delta, weight, eps, gate_up)
    return silu_linear(both, down), hidden


TORCH_OPS = LayerOps(False, _plan, _rotation, _norm_linear, _attend, _gated_mlp)
