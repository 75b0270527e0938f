"""AutoAWQ GEMM: `qweight` int32 [K, N/8] and `qzeros` int32 [G, N/8] with the eight rows of a word in an order of their
own, `scales` [G, N]. Four bits alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.formats.packing import pack, unpack
from qtool.quant.scheme import QuantPlan, QuantScheme
from qtool.quant.weight import QuantizedWeight, check_zero_shape

NAME = "awq"
BITS = 4
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds output 8c + _ORDER[i]
_INVERSE = tuple(_ORDER.index(i) for i in range(8))


def _reorder(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    words = codes.reshape(*codes.shape[:-1], -1, 8)
    return words[..., list(order)].reshape(codes.shape)


@dataclass(frozen=True)
class AWQReader:
    """Reads the layers of an AutoAWQ GEMM checkpoint. See formats.QuantReader."""

    checkpoint: Checkpoint
    group_size: int
    format: str = NAME

    @classmethod
    def open(cls, checkpoint: Checkpoint, config: Mapping[str, Any]) -> AWQReader:
        where = f"{checkpoint.folder}: quantization_config"
        version = str(config.get("version") or config.get("checkpoint_format") or "gemm").lower()
        if version != "gemm":
            raise QtoolError(f"{where}: AWQ layout {version!r} is not supported, only gemm")
        try:
            bits, group_size = int(config["bits"]), int(config["group_size"])
        except (KeyError, TypeError, ValueError):
            raise QtoolError(f"{where}: bits and group_size are missing or no integers") from None
        if bits != BITS:
            raise QtoolError(f"{where}: AWQ with {bits} bits is not supported, only {BITS}")
        return cls(checkpoint, group_size)

    def _scheme_and_zero(self, layer: str) -> tuple[QuantScheme, Tensor | None]:
        words = self.checkpoint.tensor(f"{layer}.qzeros")
        zero = _reorder(unpack(words, BITS, words.shape[1] * 8), _INVERSE).T.contiguous()
        check_zero_shape(zero, self.checkpoint.shape(f"{layer}.scales")[::-1], layer)  # too few might all be midpoints
        symmetric = bool((zero == 1 << (BITS - 1)).all())
        return QuantScheme(BITS, self.group_size, symmetric), None if symmetric else zero

    def scheme(self, layer: str) -> QuantScheme | None:
        if f"{layer}.qweight" not in self.checkpoint:
            return None
        return self._scheme_and_zero(layer)[0]

    def read(self, layer: str) -> QuantizedWeight:
        scheme, zero = self._scheme_and_zero(layer)
        words = self.checkpoint.tensor(f"{layer}.qweight")
        codes = _reorder(unpack(words, BITS, words.shape[1] * 8), _INVERSE).T.contiguous()
        scale = self.checkpoint.tensor(f"{layer}.scales").T.contiguous()
        weight = QuantizedWeight(codes, scale, zero, scheme)
        weight.check(layer)
        return weight


def check_plan(plan: QuantPlan, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Four bits, one group size for all layers, outputs in eights. Raises QtoolError."""
    if not plan.is_uniform():
        raise QtoolError(
            "the awq format holds one group size for all layers, the plan has "
            f"{', '.join(s.name for s in plan.schemes())}: use --format compressed-tensors"
        )
    for layer, scheme in plan.layers.items():
        if scheme is None or scheme.bits != BITS or scheme.act_bits:
            raise QtoolError(f"layer {layer}: the awq format stores 4-bit weights alone")
        if shapes[layer][0] % 8:
            raise QtoolError(f"layer {layer}: {shapes[layer][0]} outputs are no multiple of 8, as the awq format needs")


def tensors(layer: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors under which one layer is stored."""
    zero = weight.zero
    if zero is None:
        zero = torch.full(weight.scale.shape, weight.scheme.midpoint, dtype=torch.uint8)
    return {
        f"{layer}.qweight": pack(_reorder(weight.codes.T, _ORDER), BITS),
        f"{layer}.qzeros": pack(_reorder(zero.T, _ORDER), BITS),
        f"{layer}.scales": weight.scale.T.contiguous(),
    }


def quantization_config(plan: QuantPlan, head: str) -> dict[str, Any]:
    """The `quantization_config` of config.json for a uniform 4-bit `plan`."""
    (scheme,) = plan.schemes()
    return {
        "quant_method": NAME,
        "version": "gemm",
        "bits": scheme.bits,
        "group_size": scheme.group_size,
        "zero_point": True,
        "modules_to_not_convert": [head],
    }
