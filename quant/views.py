"""A checkpoint seen differently: its head untied, or the whole model rotated. Tensors are made when they are asked for.

What quantizes reads a view as it reads a checkpoint: block by block, in bounded memory, the same at every reading.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtool.quant.algorithms.rotation import Rotation, random_rotation, rotate_weight
from qtool.quant.checkpoint import Weights
from qtool.quant.errors import QtoolError
from qtool.quant.structure import LinearGroup, ModelStructure


@dataclass(frozen=True)
class UntiedWeights:
    """`source`, whose head is its embedding, with a head of its own that holds the same values. See Weights."""

    source: Weights
    embed: str  # names of the two weights
    head: str

    @property
    def folder(self) -> Path:
        return self.source.folder

    @cached_property
    def config(self) -> dict[str, Any]:
        return {**self.source.config, "tie_word_embeddings": False}

    def __contains__(self, name: str) -> bool:
        return name == self.head or name in self.source

    def names(self) -> list[str]:
        return sorted({*self.source.names(), self.head})

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(self._stored(name))

    def tensor(self, name: str) -> Tensor:
        return self.source.tensor(self._stored(name))

    def tensor_bytes(self, name: str) -> int:
        return self.source.tensor_bytes(self._stored(name))

    def _stored(self, name: str) -> str:
        return self.embed if name == self.head else name


@dataclass(frozen=True)
class _Turn:
    """How a linear changes: the norm whose gain it takes over, and the rotations of its inputs and outputs."""

    norm: str | None = None
    inputs: Rotation | None = None
    outputs: Rotation | None = None


@dataclass(frozen=True)
class RotatedWeights:
    """`source` with its residual stream and the values of each head rotated; norms no longer scale. See Weights.

    The model's function is the same. Norms hand their gains to the linears that they feed, and multiply by one. Weights
    named in `exact` come in float32, all others rounded to the dtype in which they are stored.

    Attributes:
        structure: of a model whose head is not tied.
        residual: rotation [hidden] of the residual stream (R1).
        heads: rotation [head_dim] of every value head (R2).
        exact: names of weights that will be quantized.
    """

    source: Weights
    structure: ModelStructure
    residual: Rotation
    heads: Rotation
    exact: frozenset[str]

    @property
    def folder(self) -> Path:
        return self.source.folder

    @property
    def config(self) -> dict[str, Any]:
        return self.source.config

    def __contains__(self, name: str) -> bool:
        return name in self.source

    def names(self) -> list[str]:
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def tensor_bytes(self, name: str) -> int:
        return self.source.tensor_bytes(name)

    def tensor(self, name: str) -> Tensor:
        original = self.source.tensor(name)
        module, _, part = name.rpartition(".")
        if module in self._norms:
            return torch.full_like(original, 1.0 - self.structure.norm_offset)
        turn = self._turns.get(module)
        if turn is None:
            return original
        if part == "bias":
            return original if turn.outputs is None else turn.outputs.apply(original).to(original.dtype)
        gain = None
        if turn.norm is not None:
            gain = self.source.tensor(f"{turn.norm}.weight").double() + self.structure.norm_offset
        dtype = torch.float32 if name in self.exact else original.dtype
        return rotate_weight(original, gain=gain, inputs=turn.inputs, outputs=turn.outputs, dtype=dtype)

    @cached_property
    def _norms(self) -> frozenset[str]:
        return frozenset(turn.norm for turn in self._turns.values() if turn.norm is not None)

    @cached_property
    def _turns(self) -> dict[str, _Turn]:
        """Module → what happens to it, for every linear of the model and the embedding."""
        structure = self.structure
        turns = {
            structure.embed: _Turn(inputs=self.residual),  # a table's rows are what a linear's outputs would be
            structure.head: _Turn(structure.norm, self.residual),
        }
        for index in range(structure.num_blocks):
            block = structure.block_name(index)
            for group in structure.groups:
                turns |= {f"{block}.{member}": self._turn(block, group, member) for member in group.members}
        return turns

    def _turn(self, block: str, group: LinearGroup, member: str) -> _Turn:
        structure = self.structure
        linears = {name for other in structure.groups for name in other.members}
        norm = None if group.source is None or group.source in linears else f"{block}.{group.source}"
        inputs = outputs = None
        if norm is not None:
            inputs = self.residual
        elif member == structure.attention_output:
            inputs = self.heads
        if member in structure.residual_writers:
            outputs = self.residual
        elif member == structure.values:
            outputs = self.heads
        return _Turn(norm, inputs, outputs)


def untied(weights: Weights, structure: ModelStructure) -> Weights:
    """`weights` with a head of its own; the same where it has one already."""
    if not structure.tied_head:
        return weights
    return UntiedWeights(weights, f"{structure.embed}.weight", f"{structure.head}.weight")


def rotated(
    weights: Weights, structure: ModelStructure, *, head_dim: int, seed: int, exact: Iterable[str]
) -> RotatedWeights:
    """`weights` under randomised Hadamard rotations of its residual stream and values.

    Args:
        head_dim: size of an attention head.
        seed: of the random signs; the same seed gives the same weights.
        exact: see RotatedWeights.

    Raises:
        QtoolError: the head is tied: its norm's gain cannot be folded into the embedding as well.
    """
    if structure.tied_head:
        raise QtoolError(
            f"{weights.folder}: a rotation folds the last norm into the head, and this head is the embedding itself: "
            "pass --untie to store the head by itself (in 16 bits)"
        )
    hidden = weights.shape(f"{structure.embed}.weight")[1]
    return RotatedWeights(
        weights, structure, random_rotation(hidden, seed), random_rotation(head_dim, seed + 1), frozenset(exact)
    )
