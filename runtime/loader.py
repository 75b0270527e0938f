"""A checkpoint becomes a model on a device: one tensor at a time, packed weights staying packed, nothing left over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.formats import QuantReader, open_reader, read_kv_cache_scheme
from qtool.quant.numerics import find_grid, quantize
from qtool.quant.progress import ProgressFn, silent
from qtool.quant.scheme import QuantScheme
from qtool.quant.weight import QuantizedWeight, concat_rows
from qtool.runtime.kernels.kv_cache import KVMode, kv_bytes_per_token
from qtool.runtime.models import decoder_config
from qtool.runtime.models.decoder import Decoder, DecoderConfig, DecoderLayer
from qtool.runtime.models.layers import DenseLinear, LinearFn, make_linear
from qtool.runtime.models.rope import rotation_table

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

KV_SCALES = tuple(f".self_attn.{part}_scale" for part in "qkv")
KV_DTYPES = ("auto", "int8", "float")
HEAD_DTYPES = ("auto", "int8")
HEAD_SCHEME = QuantScheme(8)
_ROUND_ROWS = 8192  # of a head at a time, so that its numbers in float32 take little memory


def resolve_dtype(dtype: str, stored: str | None, device: torch.device, *, quantized: bool) -> torch.dtype:
    """The activations' dtype.

    auto: the checkpoint's own on a GPU. On a CPU float32 where the checkpoint is float32 and not quantized; else
    bfloat16, unless a probe finds it slower than float32 at batch 16 (CPUs without bfloat16 instructions). The packed
    products want bfloat16, so quantized checkpoints always take it.

    Raises:
        QtoolError: an unknown dtype.
    """
    if dtype != "auto":
        if dtype not in DTYPES:
            raise QtoolError(f"dtype {dtype!r} is not supported: use auto, {', '.join(DTYPES)}")
        return DTYPES[dtype]
    own = DTYPES.get(stored or "float32", torch.float32)
    if device.type != "cpu":
        return torch.bfloat16 if quantized and own == torch.float32 else own
    if quantized:
        return torch.bfloat16
    if own == torch.float32:
        return own
    return torch.bfloat16 if _bfloat16_is_fast() else torch.float32


def resolve_kv_cache(dtype: str, checkpoint: Checkpoint) -> KVMode:
    """How keys and values are cached. auto: as the checkpoint says, with its scales; else in the activations' dtype.

    int8 makes a scale for each token and head, whatever the checkpoint says; float never quantizes.

    Raises:
        QtoolError: an unknown dtype; auto with a scheme that cannot be served as the checkpoint means it.
    """
    check_kv_cache_dtype(dtype)
    if dtype != "auto":
        return "int8" if dtype == "int8" else "float"
    scheme = read_kv_cache_scheme(checkpoint)
    if scheme is None:
        return "float"
    if not scheme.supported:
        raise QtoolError(
            f"{checkpoint.folder}: its kv_cache_scheme ({scheme.name}, {scheme.scales}) is not supported; set "
            "kv_cache_dtype to int8 (a scale for each token and head) or float (not quantized)"
        )
    return "int8-static"


def check_kv_cache_dtype(dtype: str) -> None:
    """Raise QtoolError unless `dtype` is one of KV_DTYPES."""
    if dtype not in KV_DTYPES:
        raise QtoolError(f"kv_cache_dtype {dtype!r} is not supported: use {', '.join(KV_DTYPES)}")


def check_head_dtype(dtype: str) -> None:
    """Raise QtoolError unless `dtype` is one of HEAD_DTYPES."""
    if dtype not in HEAD_DTYPES:
        raise QtoolError(f"head_dtype {dtype!r} is not supported: use {', '.join(HEAD_DTYPES)}")


def int8_head(weight: Tensor, dtype: torch.dtype, device: torch.device) -> LinearFn:
    """A linear by a 16-bit weight [vocab_size, hidden_size] rounded to int8 with a scale for each row; `weight` is left
    as it is. Activations stay in `dtype`."""
    parts = []
    for first in range(0, len(weight), _ROUND_ROWS):
        there = weight[first : first + _ROUND_ROWS].to(device)
        parts.append(quantize(there, find_grid(there, HEAD_SCHEME), HEAD_SCHEME))
    whole = concat_rows(parts)
    assert whole is not None
    return make_linear([whole], [None], dtype, device)


def _bfloat16_is_fast() -> bool:
    """Compare both dtypes on a product of a middling layer at batch 16; takes some milliseconds."""

    def best(dtype: torch.dtype) -> float:
        x, w = torch.ones(16, 1024, dtype=dtype), torch.ones(2048, 1024, dtype=dtype)
        times = []
        for _ in range(7):
            start = time.perf_counter()
            functional.linear(x, w)
            times.append(time.perf_counter() - start)
        return min(times)

    return best(torch.bfloat16) <= best(torch.float32)


class _Source:
    """The checkpoint's tensors, with a record of which were taken."""

    def __init__(self, checkpoint: Checkpoint, reader: QuantReader | None, device: torch.device, dtype: torch.dtype):
        self.checkpoint = checkpoint
        self.reader = reader
        self.device = device
        self.dtype = dtype
        self.left = set(checkpoint.names())

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of its own on the device, in the model's dtype. Raises QtoolError where missing or misshapen."""
        return self._raw(name, shape).to(self.device, self.dtype, copy=True)

    def _raw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.checkpoint:
            raise QtoolError(f"{self.checkpoint.folder}: tensor {name!r} is missing from the checkpoint")
        if (have := self.checkpoint.shape(name)) != shape:
            raise QtoolError(f"{self.checkpoint.folder}: tensor {name!r} is {list(have)}, expected {list(shape)}")
        self.left.discard(name)
        return self.checkpoint.tensor(name)

    def _quantized(self, name: str) -> QuantizedWeight | None:
        """The packed weight of a projection; None where it is stored in 16 bits. Raises QtoolError where damaged."""
        if self.reader is None or self.reader.scheme(name) is None:
            return None
        return self.reader.read(name)

    def linear(self, names: Sequence[str], rows: Sequence[int], cols: int, *, bias: bool) -> LinearFn:
        """The projections `names` [rows[i], cols], which read the same input, as one linear."""
        weights: list[Tensor | QuantizedWeight] = []
        biases: list[Tensor | None] = []
        for name, out in zip(names, rows):
            weight = self._quantized(name)
            if weight is not None:
                if weight.shape != (out, cols):
                    raise QtoolError(f"layer {name}: its weight is {list(weight.shape)}, expected {[out, cols]}")
                weights.append(weight)
                self.left = {n for n in self.left if not n.startswith(f"{name}.") or n == f"{name}.bias"}
            else:
                weights.append(self._raw(f"{name}.weight", (out, cols)))
            has_bias = bias or f"{name}.bias" in self.checkpoint
            biases.append(self.take(f"{name}.bias", (out,)) if has_bias else None)
        linear = make_linear(weights, biases, self.dtype, self.device)
        # A lone 16-bit weight may still be the mapped file itself: the model must not depend on the file staying.
        if len(weights) == 1 and isinstance(linear, DenseLinear) and linear.weight is weights[0]:
            return DenseLinear(linear.weight.clone(), linear.bias)
        return linear

    def head(self, rows: int, cols: int, dtype: str) -> LinearFn:
        """The head [rows, cols] as stored or, where it is in 16 bits and `dtype` says so, in int8."""
        if dtype == "auto" or (self.reader is not None and self.reader.scheme("lm_head") is not None):
            return self.linear(["lm_head"], [rows], cols, bias=False)
        return int8_head(self._raw("lm_head.weight", (rows, cols)), self.dtype, self.device)

    def kv_scales(self, attention: str, kv_heads: int) -> Tensor:
        """The static scales of an attention's keys and values, [2 * kv_heads] float32: one each, or one a head."""
        scales = []
        for name in (f"{attention}.k_scale", f"{attention}.v_scale"):
            if name not in self.checkpoint:
                raise QtoolError(f"{self.checkpoint.folder}: tensor {name!r} is missing from the checkpoint")
            stored = self.checkpoint.tensor(name).float().flatten()
            if len(stored) not in (1, kv_heads) or not bool((stored.isfinite() & (stored > 0)).all()):
                raise QtoolError(
                    f"{self.checkpoint.folder}: tensor {name!r} must hold a scale above 0, or one for each of the "
                    f"{kv_heads} key-value heads, got {stored.tolist()[:8]}"
                )
            scales.append(stored.expand(kv_heads))
        return torch.cat(scales).to(self.device)


def _layer(source: _Source, name: str, index: int, config: DecoderConfig, kv_mode: KVMode) -> DecoderLayer:
    """Block `name`, read in the order in which a checkpoint lists it."""
    hidden, dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    qkv = [f"{attention}.{part}_proj" for part in "qkv"]
    return DecoderLayer(
        input_norm=source.take(f"{name}.input_layernorm.weight", (hidden,)),
        qkv=source.linear(qkv, [queries, keys, keys], hidden, bias=config.qkv_bias),
        q_norm=source.take(f"{attention}.q_norm.weight", (dim,)) if config.qk_norm else None,
        k_norm=source.take(f"{attention}.k_norm.weight", (dim,)) if config.qk_norm else None,
        o=source.linear([f"{attention}.o_proj"], [hidden], queries, bias=config.o_bias),
        post_norm=source.take(f"{name}.post_attention_layernorm.weight", (hidden,)),
        gate_up=source.linear([f"{mlp}.gate_proj", f"{mlp}.up_proj"], [inner, inner], hidden, bias=config.mlp_bias),
        down=source.linear([f"{mlp}.down_proj"], [hidden], inner, bias=config.mlp_bias),
        window=config.windows[index],
        kv_scales=source.kv_scales(attention, config.num_kv_heads) if kv_mode == "int8-static" else None,
    )


def load_model(
    folder: str | Path,
    *,
    device: torch.device,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    head_dtype: str = "auto",
    max_model_len: int | None = None,
    cache_bytes: int | None = None,
    progress: ProgressFn = silent,
) -> Decoder:
    """Load a checkpoint folder: 16-bit, compressed-tensors, GPTQ or AutoAWQ.

    Peak memory is the model as it will stay, plus one group of projections on the CPU.

    Args:
        head_dtype: of HEAD_DTYPES. int8: a head in 16 bits is served in int8; an embedding that it shares stays.
        max_model_len: positions that can be rotated. None: the model's own context.
        cache_bytes: what its KV cache may take. Positions beyond those that it can hold get no rotation.

    Raises:
        QtoolError: unsupported architecture or quantization; a tensor missing, misshapen, or not used (all by name).
    """
    check_head_dtype(head_dtype)
    with Checkpoint(folder) as checkpoint:
        raw = checkpoint.config
        config = decoder_config(raw)
        reader = open_reader(checkpoint)
        stored = raw.get("dtype") or raw.get("torch_dtype")
        kv_mode = resolve_kv_cache(kv_cache_dtype, checkpoint)
        kind = resolve_dtype(dtype, stored, device, quantized=reader is not None)
        source = _Source(checkpoint, reader, device, kind)
        hidden = config.hidden_size
        embed = source.take("model.embed_tokens.weight", (config.vocab_size, hidden))
        layers = []
        for i in range(config.num_layers):
            layers.append(_layer(source, f"model.layers.{i}", i, config, kv_mode))
            progress("loading", i + 1, config.num_layers)
        norm = source.take("model.norm.weight", (hidden,))
        if config.tied_head:
            head: LinearFn = DenseLinear(embed, None) if head_dtype == "auto" else int8_head(embed, kind, device)
            source.left.discard("lm_head.weight")
        else:
            head = source.head(config.vocab_size, hidden, head_dtype)
        if read_kv_cache_scheme(checkpoint) is not None:  # taken above, or not wanted
            source.left = {n for n in source.left if not n.endswith(KV_SCALES)}
        if left := sorted(n for n in source.left if not n.endswith("rotary_emb.inv_freq")):
            raise QtoolError(
                f"{checkpoint.folder}: {len(left)} tensors of the checkpoint belong to no layer of a "
                f"{raw.get('model_type')} model: {', '.join(left[:5])}{' ...' if len(left) > 5 else ''}"
            )
        length = max_model_len or config.max_position_embeddings
        if cache_bytes is not None:
            token = kv_bytes_per_token(2 * config.num_kv_heads, config.head_dim, kind, kv_mode)
            length = min(length, cache_bytes // (config.num_layers * token))
        try:
            cos, sin = rotation_table(raw, config.head_dim, length, kind, device)
        except (RuntimeError, MemoryError):  # torch's allocators raise the former
            raise QtoolError(
                f"{checkpoint.folder}: no memory for the rotary positions of {length} tokens: set max_model_len to less"
            ) from None
        return Decoder(config, embed, tuple(layers), norm, head, cos[:, None], sin[:, None], kv_mode)
