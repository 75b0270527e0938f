"""The decoder-only transformer that every supported family is a setting of: pre-norm blocks, rotary positions,
grouped-query attention over the paged cache, gated MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from qtool.runtime.kernels.attention import AttentionBatch, paged_attention
from qtool.runtime.kernels.kv_cache import KVCache, KVMode
from qtool.runtime.models.layers import LinearFn, rms_norm


@dataclass(frozen=True)
class DecoderConfig:
    """What a family says of itself; sizes in elements.

    Attributes:
        qkv_bias, o_bias, mlp_bias: which projections add a bias.
        qk_norm: queries and keys are normed per head before the rotation.
        windows: per layer, the sliding window in tokens, or None.
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

    def forward(self, token_ids: Tensor, batch: AttentionBatch, caches: Sequence[KVCache]) -> Tensor:
        """[num_tokens] int64 → hidden states [num_tokens, hidden_size]; keys and values go into `caches`."""
        config = self.config
        eps = config.rms_norm_eps
        cos, sin = self.cos[batch.positions], self.sin[batch.positions]  # [num_tokens, 1, head_dim]
        hidden = functional.embedding(token_ids, self.embed)
        for layer, cache in zip(self.layers, caches):
            normed = rms_norm(hidden, layer.input_norm, eps)
            hidden = hidden + layer.o(self._attention(layer, layer.qkv(normed), cos, sin, batch, cache))
            normed = rms_norm(hidden, layer.post_norm, eps)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            hidden = hidden + layer.down(functional.silu(gate).mul_(up))
        return hidden

    def _attention(
        self, layer: DecoderLayer, qkv: Tensor, cos: Tensor, sin: Tensor, batch: AttentionBatch, cache: KVCache
    ) -> Tensor:
        config = self.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = qkv.view(-1, heads + 2 * kv_heads, dim)
        turned = qkv[:, : heads + kv_heads]  # queries and keys
        if layer.q_norm is not None and layer.k_norm is not None:
            turned[:, :heads] = rms_norm(turned[:, :heads], layer.q_norm, config.rms_norm_eps)
            turned[:, heads:] = rms_norm(turned[:, heads:], layer.k_norm, config.rms_norm_eps)
        other = turned.roll(dim // 2, dims=-1)
        turned.mul_(cos).addcmul_(other, sin)
        kv = cache.write(qkv[:, heads:], batch.slot_mapping)
        return paged_attention(qkv[:, :heads], kv, cache, batch, scale=dim**-0.5, window=layer.window)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [rows, hidden_size] → [rows, vocab_size] float32."""
        return self.head(rms_norm(hidden, self.norm, self.config.rms_norm_eps)).float()

    @property
    def windows(self) -> frozenset[int | None]:
        return frozenset(layer.window for layer in self.layers)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype
