"""What a model family looks like, as data: its blocks, the projections that share an input, what feeds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qtool.quant.checkpoint import Weights
from qtool.quant.errors import QtoolError


@dataclass(frozen=True)
class LinearGroup:
    """Projections of one block that read the same input and that a server fuses into one product.

    Attributes:
        kind: short name for tables: `qkv`, `o`, `gate_up`, `down`.
        members: module names relative to the block, in the order in which a server stacks them.
        source: the norm or linear whose output feeds them and can absorb a per-channel scale; None: nothing can.
        consumer: the module whose output error the AWQ search measures.
    """

    kind: str
    members: tuple[str, ...]
    source: str | None
    consumer: str


@dataclass(frozen=True)
class ModelStructure:
    """Where the parts of a decoder lie in its state dict.

    Attributes:
        model_type: `model_type` of config.json.
        blocks: prefix of the decoder blocks; block i is `{blocks}.{i}`.
        num_blocks: how many blocks.
        groups: the linears of one block in true-sequential order (each group's input depends on those before it alone).
        embed, norm, head: module names of token embedding, final norm and output projection.
        tied_head: the head's weight is the embedding's, stored once.
        norm_offset: what a norm adds to its weight before it multiplies (1.0 where it multiplies by 1 + w).
        residual_writers: members whose outputs are added to the residual stream as they are.
        values, attention_output: the members between which attention mixes tokens alone, head by head.
    """

    model_type: str
    blocks: str
    num_blocks: int
    groups: tuple[LinearGroup, ...]
    embed: str
    norm: str
    head: str
    tied_head: bool
    norm_offset: float
    residual_writers: tuple[str, ...]
    values: str
    attention_output: str

    def block_name(self, index: int) -> str:
        return f"{self.blocks}.{index}"


_LLAMA_GROUPS = (
    LinearGroup("qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm", "self_attn"),
    LinearGroup("o", ("self_attn.o_proj",), "self_attn.v_proj", "self_attn.o_proj"),
    LinearGroup("gate_up", ("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm", "mlp"),
    LinearGroup("down", ("mlp.down_proj",), "mlp.up_proj", "mlp.down_proj"),
)
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")  # all four share the Llama layout of names


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise QtoolError(f"config.json: {key} is {value!r}, expected a positive integer")
    return value


def structure_of(config: Mapping[str, Any]) -> ModelStructure:
    """The structure of the model that this config.json describes.

    Raises:
        QtoolError: an architecture that is not among the supported ones, or a config without its layer count.
    """
    model_type = config.get("model_type")
    if model_type not in SUPPORTED:
        experts = any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
        kind = " (a mixture of experts)" if experts else ""
        raise QtoolError(
            f"config.json: architecture {model_type!r}{kind} is not supported: qtool knows {', '.join(SUPPORTED)}"
        )
    return ModelStructure(
        model_type=str(model_type),
        blocks="model.layers",
        num_blocks=_positive(config, "num_hidden_layers"),
        groups=_LLAMA_GROUPS,
        embed="model.embed_tokens",
        norm="model.norm",
        head="lm_head",
        tied_head=bool(config.get("tie_word_embeddings", False)),
        norm_offset=0.0,
        residual_writers=("self_attn.o_proj", "mlp.down_proj"),
        values="self_attn.v_proj",
        attention_output="self_attn.o_proj",
    )


def _block_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Module name relative to a block → (rows, cols)."""
    hidden, inner = _positive(config, "hidden_size"), _positive(config, "intermediate_size")
    heads = _positive(config, "num_attention_heads")
    kv_heads = heads if config.get("num_key_value_heads") is None else _positive(config, "num_key_value_heads")
    head_dim = hidden // heads if config.get("head_dim") is None else _positive(config, "head_dim")
    return {
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def linear_shapes(checkpoint: Weights) -> dict[str, tuple[int, int]]:
    """Full name → (rows, cols) of every linear of the blocks, in model order; the head is not among them.

    Shapes follow from the config, so that quantized checkpoints have them too; 16-bit weights are checked against it.

    Raises:
        QtoolError: an unsupported architecture, or a weight whose shape is not the config's.
    """
    structure = structure_of(checkpoint.config)
    block = _block_shapes(checkpoint.config)
    shapes: dict[str, tuple[int, int]] = {}
    for names in fused_groups(structure):
        for name in names:
            relative = name.removeprefix(f"{structure.blocks}.").partition(".")[2]
            shapes[name] = block[relative]
            stored = f"{name}.weight"
            if stored in checkpoint and checkpoint.shape(stored) != shapes[name]:
                raise QtoolError(
                    f"{checkpoint.folder}: {stored} has shape {checkpoint.shape(stored)}, "
                    f"config.json says {shapes[name]}"
                )
    return shapes


def fused_groups(structure: ModelStructure) -> list[tuple[str, ...]]:
    """Full names of the linears that servers fuse into one product, block by block in true-sequential order."""
    return [
        tuple(f"{structure.block_name(i)}.{member}" for member in group.members)
        for i in range(structure.num_blocks)
        for group in structure.groups
    ]
