"""GPTQ (AutoGPTQ, GPTQModel): `qweight` int32 [K·b/32, N] packed along the inputs, `qzeros` int32 [G, N·b/32], `scales`
[G, N], `g_idx` int32 [K].

Version 1 stores zero − 1, version 2 (`checkpoint_format: gptq_v2`) stores the zero itself. A true zero of 0 cannot be
told in version 1, so asymmetric weights are written as version 2.
"""

from __future__ import annotations

import re
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

NAME = "gptq"
V1, V2 = "gptq", "gptq_v2"


@dataclass(frozen=True)
class GPTQReader:
    """Reads the layers of a GPTQ checkpoint. See formats.QuantReader."""

    checkpoint: Checkpoint
    bits: int
    group_size: int
    version: str
    overrides: tuple[tuple[str, Mapping[str, Any]], ...]  # GPTQModel's `dynamic`: patterns in order, first match wins
    format: str = NAME

    @classmethod
    def open(cls, checkpoint: Checkpoint, config: Mapping[str, Any]) -> GPTQReader:
        where = f"{checkpoint.folder}: quantization_config"
        version = config.get("checkpoint_format") or config.get("format") or V1
        if version not in (V1, V2) or config.get("is_marlin_format"):
            raise QtoolError(f"{where}: GPTQ layout {version!r} is not supported, only {V1} and {V2}")
        try:
            bits, group_size = int(config["bits"]), int(config["group_size"])
        except (KeyError, TypeError, ValueError):
            raise QtoolError(f"{where}: bits and group_size are missing or no integers") from None
        QuantScheme(bits, group_size)  # refuse here what no layer could have
        overrides = tuple((config.get("dynamic") or {}).items())
        return cls(checkpoint, bits, group_size, version, overrides)

    def _bits_and_group(self, layer: str) -> tuple[int, int]:
        for pattern, values in self.overrides:
            if re.match(pattern.removeprefix("+:"), layer):
                return int(values.get("bits", self.bits)), int(values.get("group_size", self.group_size))
        return self.bits, self.group_size

    def _zero(self, layer: str, bits: int, rows: int) -> Tensor:
        """[N, G] uint8."""
        stored = unpack(self.checkpoint.tensor(f"{layer}.qzeros"), bits, rows).T.contiguous()
        return (stored + 1) & ((1 << bits) - 1) if self.version == V1 else stored

    def _scheme_and_zero(self, layer: str) -> tuple[QuantScheme, Tensor | None]:
        bits, group_size = self._bits_and_group(layer)
        zero = self._zero(layer, bits, self.checkpoint.shape(f"{layer}.qweight")[1])
        check_zero_shape(zero, self.checkpoint.shape(f"{layer}.scales")[::-1], layer)  # too few might all be midpoints
        # `sym` of the config is a wish of its writer: what is stored decides
        symmetric = bool((zero == 1 << (bits - 1)).all())
        return QuantScheme(bits, group_size, symmetric), None if symmetric else zero

    def scheme(self, layer: str) -> QuantScheme | None:
        if f"{layer}.qweight" not in self.checkpoint:
            return None
        return self._scheme_and_zero(layer)[0]

    def read(self, layer: str) -> QuantizedWeight:
        scheme, zero = self._scheme_and_zero(layer)
        words = self.checkpoint.tensor(f"{layer}.qweight")
        cols = words.shape[0] * 32 // scheme.bits
        codes = unpack(words.T, scheme.bits, cols)
        scale = self.checkpoint.tensor(f"{layer}.scales").T.contiguous()
        g_idx: Tensor | None = None
        if f"{layer}.g_idx" in self.checkpoint:
            g_idx = self.checkpoint.tensor(f"{layer}.g_idx").to(torch.int32)
        in_order = torch.arange(cols, dtype=torch.int32) // (scheme.group_size if scheme.group_size > 0 else cols)
        ragged = scheme.group_size > 0 and cols % scheme.group_size != 0
        if g_idx is None or torch.equal(g_idx, in_order):
            g_idx = in_order if ragged else None  # a shorter last group is told by an index
        weight = QuantizedWeight(codes, scale, zero, scheme, g_idx)
        weight.check(layer)
        return weight


def check_plan(plan: QuantPlan, shapes: Mapping[str, tuple[int, int]]) -> None:
    """One scheme for all layers, whole words along both sides. Raises QtoolError."""
    if not plan.is_uniform():
        raise QtoolError(
            "the gptq format holds one bit width and group size for all layers, the plan has "
            f"{', '.join(s.name for s in plan.schemes())}: use --format compressed-tensors"
        )
    for layer, scheme in plan.layers.items():
        if scheme is None or scheme.act_bits:
            raise QtoolError(f"layer {layer}: the gptq format stores 4- or 8-bit weights alone")
        rows, cols = shapes[layer]
        if rows * scheme.bits % 32 or cols * scheme.bits % 32:
            raise QtoolError(f"layer {layer}: shape {rows}×{cols} does not fill whole 32-bit words in the gptq format")


def tensors(layer: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors under which one layer is stored: version 1 for symmetric weights, version 2 for the others."""
    scheme = weight.scheme
    rows, cols = weight.shape
    groups = weight.scale.shape[1]
    if weight.zero is None:
        stored = torch.full((groups, rows), scheme.midpoint - 1, dtype=torch.uint8)
    else:
        stored = weight.zero.T.contiguous()
    g_idx = weight.g_idx if weight.g_idx is not None else torch.arange(cols, dtype=torch.int32) // (cols // groups)
    return {
        f"{layer}.qweight": pack(weight.codes, scheme.bits).T.contiguous(),
        f"{layer}.qzeros": pack(stored, scheme.bits),
        f"{layer}.scales": weight.scale.T.contiguous(),
        f"{layer}.g_idx": g_idx,
    }


def quantization_config(plan: QuantPlan, head: str) -> dict[str, Any]:
    """The `quantization_config` of config.json for a uniform `plan`."""
    (scheme,) = plan.schemes()
    return {
        "quant_method": NAME,
        "checkpoint_format": V1 if scheme.symmetric else V2,
        "bits": scheme.bits,
        "group_size": scheme.group_size,
        "sym": scheme.symmetric,
        "desc_act": False,
        "lm_head": False,
        "pack_dtype": "int32",
    }
