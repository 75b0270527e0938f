"""The decoder-only transformer that every supported family is a setting of: pre-norm blocks, rotary positions,
grouped-query attention over the paged cache, gated MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from qtool.runtime.kernels.kv_cache import KVCache, KVMode
from qtool.runtime.kernels.layer_ops import AttentionShape, LayerOps, StepPlan
from qtool.runtime.models.layers import LinearFn


@dataclass(frozen=True)
class DecoderConfig:
    """What a family says of itself; sizes in elements.

    Attributes:
        qkv_bias, o_bias, mlp_bias: which projections add a bias.
        qk_norm: queries and keys are normed per head before the rotation.
        windows: per layer, the sliding window in tokens, or None.
        soft_cap: of attention scores, see AttentionShape.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tied_head: bool
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    soft_cap: float = 0.0


@dataclass(frozen=True)
class DecoderLayer:
    input_norm: Tensor
    qkv: LinearFn
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: LinearFn
    post_norm: Tensor
    gate_up: LinearFn
    down: LinearFn
    window: int | None
    kv_scales: Tensor | None = None  # [2 * num_kv_heads] float32, of the keys and then the values: `int8-static`


@dataclass(frozen=True)
class Decoder:
    """Weights and the two halves of a step: `forward` to hidden states, `logits` for the rows that need them.

    Attributes:
        cos, sin: rotation tables [max_model_len, 1, head_dim], see rope.rotation_table.
        kv_mode: how its keys and values are to be cached.
    """

    config: DecoderConfig
    embed: Tensor  # [vocab_size, hidden_size]
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    head: LinearFn
    cos: Tensor
    sin: Tensor
    kv_mode: KVMode = "float"

    def forward(self, token_ids: Tensor, plan: StepPlan, caches: Sequence[KVCache], ops: LayerOps) -> Tensor:
        """[num_tokens] integers → hidden states [num_tokens, hidden_size]; keys and values go into `caches`.

        `plan` is `ops`'s own layout of the step.
        """
        delta, hidden = self._run(token_ids, plan, caches, ops)
        return hidden + delta

    def all_logits(self, token_ids: Tensor, plan: StepPlan, caches: Sequence[KVCache], ops: LayerOps) -> Tensor:
        """`logits` of all of `forward`, with the last sum and the norm after it in one."""
        delta, hidden = self._run(token_ids, plan, caches, ops)
        return ops.norm_linear(hidden, delta, self.norm, self.config.rms_norm_eps, self.head)[0]

    def _run(
        self, token_ids: Tensor, plan: StepPlan, caches: Sequence[KVCache], ops: LayerOps
    ) -> tuple[Tensor, Tensor]:
        """All layers: token ids → what the residual stream still lacks, and the stream."""
        rotation = ops.rotation(self.cos, self.sin, plan)
        qkv, hidden = self.enter(token_ids, ops)
        for index, cache in enumerate(caches):
            attended = self.attend(index, qkv, rotation, cache, plan, ops)
            qkv, hidden = self._next_qkv(index, attended, hidden, ops)
        return qkv, hidden

    def enter(self, token_ids: Tensor, ops: LayerOps) -> tuple[Tensor, Tensor]:
        """Up to the first attention: token ids → its queries, keys and values, and the residual stream."""
        hidden = functional.embedding(token_ids, self.embed)
        first = self.layers[0]
        return ops.norm_linear(hidden, None, first.input_norm, self.config.rms_norm_eps, first.qkv)

    def attend(
        self,
        index: int,
        qkv: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: KVCache,
        plan: StepPlan,
        ops: LayerOps,
        out: Tensor | None = None,
    ) -> Tensor:
        """The attention of layer `index`, see AttendFn."""
        layer = self.layers[index]
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        return ops.attend(qkv, self.attention_shape, norms, rotation, cache, plan, layer.window, out)

    def advance(self, index: int, attended: Tensor, hidden: Tensor, ops: LayerOps) -> tuple[Tensor, Tensor]:
        """From the attention of layer `index` to the next one: its output → queries, keys and values, and the residual
        stream; after the last layer the stream, twice. Works on each row alone; `hidden` may be overwritten."""
        found, hidden = self._next_qkv(index, attended, hidden, ops)
        if index + 1 < len(self.layers):
            return found, hidden
        hidden = hidden + found
        return hidden, hidden

    def _next_qkv(self, index: int, attended: Tensor, hidden: Tensor, ops: LayerOps) -> tuple[Tensor, Tensor]:
        """As advance, but for the last layer: what the stream still lacks, and the stream."""
        eps, layer = self.config.rms_norm_eps, self.layers[index]
        delta, hidden = ops.gated_mlp(hidden, layer.o(attended), layer.post_norm, eps, layer.gate_up, layer.down)
        if index + 1 == len(self.layers):
            return delta, hidden
        following = self.layers[index + 1]
        return ops.norm_linear(hidden, delta, following.input_norm, eps, following.qkv)

    def logits(self, hidden: Tensor, ops: LayerOps) -> Tensor:
        """Hidden states [rows, hidden_size] → [rows, vocab_size]."""
        return ops.norm_linear(hidden, None, self.norm, self.config.rms_norm_eps, self.head)[0]

    @property
    def linears(self) -> list[LinearFn]:
        """Every product by a weight."""
        return [p for layer in self.layers for p in (layer.qkv, layer.o, layer.gate_up, layer.down)] + [self.head]

    @property
    def attention_shape(self) -> AttentionShape:
        config = self.config
        return AttentionShape(
            config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps, config.soft_cap
        )

    @property
    def windows(self) -> frozenset[int | None]:
        return frozenset(layer.window for layer in self.layers)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype
