"""compressed-tensors: qtool's own artifact format, read unmodified by transformers, vLLM and SGLang.

`pack-quantized` (weight only) stores `weight_packed` int32 [N, ⌈K·b/32⌉], `weight_scale` [N, G], `weight_shape` [2]
and, for asymmetric schemes, `weight_zero_point` int32 [⌈N·b/32⌉, G] packed along the rows. `int-quantized` (W8A8)
stores `weight` int8 [N, K] and `weight_scale` [N, 1]. `config_groups` and `ignore` say which layer has which scheme.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.formats.packing import pack, unpack
from qtool.quant.scheme import PER_CHANNEL, KVCacheScheme, QuantPlan, QuantScheme
from qtool.quant.weight import QuantizedWeight

NAME = "compressed-tensors"
KV_STRATEGIES = ("tensor", "attn_head")
PACKED, INT8 = "pack-quantized", "int-quantized"
_INDEXED = re.compile(r"(.+?)\.(\d+)\.(.+)$")


def _storage(scheme: QuantScheme) -> str:
    return INT8 if scheme.act_bits else PACKED


# --- reading ---------------------------------------------------------------------------------------------------------


def _matches(layer: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], layer) is not None
    return target == layer


def _targets(value: Any, where: str) -> tuple[str, ...]:
    """A list of targets, its patterns checked. Raises QtoolError."""
    targets = value or []
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        raise QtoolError(f"{where} must be a list of names")
    for target in targets:
        try:
            re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
        except re.error as error:
            raise QtoolError(f"{where}: {target!r} is not a regular expression ({error})") from None
    return tuple(targets)


def _number(section: Mapping[str, Any], key: str, where: str) -> int:
    value = section.get(key)
    if not isinstance(value, int):
        raise QtoolError(f"{where}: {key} is {value!r}, expected an integer")
    return value


def _scheme_from(group: Mapping[str, Any], where: str) -> QuantScheme:
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping):
        raise QtoolError(f"{where}: no weights section")
    strategy = weights.get("strategy")
    if weights.get("type", "int") != "int" or weights.get("dynamic") or strategy not in ("group", "channel"):
        raise QtoolError(
            f"{where}: {weights.get('type')} weights with strategy {strategy!r} are not supported: "
            "qtool reads static integers per group or per channel"
        )
    act_bits = None
    if inputs:
        if not isinstance(inputs, Mapping):
            raise QtoolError(f"{where}: input_activations must be an object or null")
        if inputs.get("type", "int") != "int" or not inputs.get("dynamic") or inputs.get("strategy") != "token":
            raise QtoolError(f"{where}: activations must be dynamic integers per token, found {dict(inputs)}")
        act_bits = _number(inputs, "num_bits", where)
    return QuantScheme(
        bits=_number(weights, "num_bits", where),
        group_size=_number(weights, "group_size", where) if strategy == "group" else PER_CHANNEL,
        symmetric=bool(weights.get("symmetric", True)),
        act_bits=act_bits,
    )


def kv_cache_scheme(config: Mapping[str, Any], where: str) -> KVCacheScheme | None:
    """The `kv_cache_scheme` of a quantization_config; None: there is none. Raises QtoolError where it is no scheme."""
    section = config.get("kv_cache_scheme")
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise QtoolError(f"{where} must be an object or null")
    bits, kind = _number(section, "num_bits", where), section.get("type", "int")
    strategy = section.get("strategy") or "tensor"
    plain = section.get("symmetric", True) and not section.get("dynamic") and strategy in KV_STRATEGIES
    return KVCacheScheme(f"{kind}{bits}", str(strategy), supported=bool(plain and (bits, kind) == (8, "int")))


@dataclass(frozen=True)
class CompressedTensorsReader:
    """Reads the layers of a compressed-tensors checkpoint. See formats.QuantReader."""

    checkpoint: Checkpoint
    groups: tuple[tuple[tuple[str, ...], QuantScheme], ...]  # targets and scheme of each config group
    ignore: tuple[str, ...]
    format: str = NAME

    @classmethod
    def open(cls, checkpoint: Checkpoint, config: Mapping[str, Any]) -> CompressedTensorsReader:
        where = f"{checkpoint.folder}: quantization_config"
        found = config.get("config_groups")
        if not isinstance(found, Mapping) or not found:
            raise QtoolError(f"{where} has no config_groups")
        groups = tuple(
            (_targets(group.get("targets"), f"{where}.{name}.targets"), _scheme_from(group, f"{where}.{name}"))
            for name, group in found.items()
            if isinstance(group, Mapping)
        )
        if len(groups) < len(found):
            raise QtoolError(f"{where}: each of config_groups must be an object")
        return cls(checkpoint, groups, _targets(config.get("ignore"), f"{where}.ignore"))

    def scheme(self, layer: str) -> QuantScheme | None:
        if any(_matches(layer, target) for target in self.ignore):
            return None
        # exact names and patterns go before the class of the module
        for by_class in (False, True):
            for targets, scheme in self.groups:
                if "Linear" in targets if by_class else any(_matches(layer, t) for t in targets):
                    return scheme
        return None

    def read(self, layer: str) -> QuantizedWeight:
        scheme = self.scheme(layer)
        if scheme is None:
            raise QtoolError(f"{self.checkpoint.folder}: layer {layer} is not quantized")
        tensor = self.checkpoint.tensor
        scale = tensor(f"{layer}.weight_scale")
        zero = None
        if f"{layer}.weight_packed" in self.checkpoint:
            rows, cols = tensor(f"{layer}.weight_shape").tolist()
            codes = unpack(tensor(f"{layer}.weight_packed"), scheme.bits, cols)
            if not scheme.symmetric:
                packed = tensor(f"{layer}.weight_zero_point")
                zero = unpack(packed.T, scheme.bits, rows).T.contiguous()
        else:
            codes = _unsigned(tensor(f"{layer}.weight"), scheme, f"layer {layer}: weight")
            if not scheme.symmetric:
                zero = _unsigned(tensor(f"{layer}.weight_zero_point"), scheme, f"layer {layer}: weight_zero_point")
        name = f"{layer}.weight_g_idx"
        g_idx = tensor(name).to(torch.int32) if name in self.checkpoint else None
        if g_idx is not None and int(g_idx.min()) < 0:
            g_idx = None  # written but unused: −1 everywhere
        weight = QuantizedWeight(codes, scale.reshape(len(codes), -1), zero, scheme, g_idx)
        weight.check(layer)
        return weight


def _unsigned(stored: Tensor, scheme: QuantScheme, what: str) -> Tensor:
    """Signed integers of `scheme.bits` bits, one a byte → unsigned codes uint8.

    Raises:
        QtoolError: another dtype than int8 (float8 among them), or a value beyond the scheme's bits.
    """
    if stored.dtype != torch.int8:
        raise QtoolError(f"{what} is {str(stored.dtype).removeprefix('torch.')}, expected int8 for {scheme.name}")
    codes = stored.to(torch.int16) + scheme.midpoint
    if codes.numel() and not (0 <= int(codes.min()) and int(codes.max()) <= scheme.max_code):
        raise QtoolError(f"{what} holds values beyond {scheme.bits} bits")
    return codes.to(torch.uint8)


# --- writing ---------------------------------------------------------------------------------------------------------


def check_plan(plan: QuantPlan, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Any plan can be written, but for quantized activations over anything else than W8 per channel, symmetric."""
    for layer, scheme in plan.layers.items():
        if scheme is not None and scheme.act_bits and scheme != QuantScheme(8, PER_CHANNEL, True, scheme.act_bits):
            raise QtoolError(f"layer {layer}: {scheme.name} cannot be written: with 8-bit activations use w8a8")


def tensors(layer: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors under which one layer is stored."""
    scheme = weight.scheme
    if _storage(scheme) == INT8:
        return {f"{layer}.weight": (weight.codes ^ 0x80).view(torch.int8), f"{layer}.weight_scale": weight.scale}
    stored = {
        f"{layer}.weight_packed": pack(weight.codes, scheme.bits),
        f"{layer}.weight_scale": weight.scale,
        f"{layer}.weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }
    if weight.zero is not None:
        stored[f"{layer}.weight_zero_point"] = pack(weight.zero.T.contiguous(), scheme.bits).T.contiguous()
    return stored


def layer_patterns(layers: Iterable[str], total_blocks: Mapping[str, set[int]]) -> list[str]:
    """Anchored patterns that match exactly `layers`: modules that occur in the same blocks share one.

    `total_blocks`: prefix → the indices of all its blocks, so that "every block" can be written short.
    """
    blocks: dict[tuple[str, str], set[int]] = {}
    exact: list[str] = []
    for layer in layers:
        match = _INDEXED.match(layer)
        if match is None:
            exact.append(layer)
        else:
            blocks.setdefault((match[1], match[3]), set()).add(int(match[2]))
    modules: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for (prefix, module), indices in blocks.items():
        modules.setdefault((prefix, tuple(sorted(indices))), []).append(module)
    patterns = []
    for (prefix, indices_), names in modules.items():
        every = set(indices_) == total_blocks.get(prefix)
        index = r"\d+" if every else f"({'|'.join(map(str, indices_))})"
        patterns.append(rf"re:^{re.escape(prefix)}\.{index}\.({'|'.join(re.escape(n) for n in names)})$")
    return exact + patterns


def _config_group(scheme: QuantScheme, targets: list[str]) -> dict[str, Any]:
    per_channel = scheme.group_size == PER_CHANNEL
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if per_channel else "group",
        "group_size": None if per_channel else scheme.group_size,
        "dynamic": False,
    }
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": inputs if scheme.act_bits else None,
        "output_activations": None,
        "format": _storage(scheme),
    }


# The keys and values of an attention in int8, with its static `k_scale` and `v_scale` [1] beside the weights. vLLM
# takes these scales for its float8 cache: their codes reach to 127, well within its 448.
KV_CACHE_INT8 = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "tensor",
    "group_size": None,
    "dynamic": False,
}


def quantization_config(plan: QuantPlan, head: str) -> dict[str, Any]:
    """The `quantization_config` of config.json for `plan`.

    `head` is the output projection, which stays in 16 bits where the plan does not name it.
    """
    schemes = plan.schemes()
    total: dict[str, set[int]] = {}
    for layer in plan:
        if match := _INDEXED.match(layer):
            total.setdefault(match[1], set()).add(int(match[2]))
    groups = {}
    for i, scheme in enumerate(schemes):
        members = [name for name, other in plan.layers.items() if other == scheme]
        targets = ["Linear"] if plan.is_uniform() else layer_patterns(members, total)
        groups[f"group_{i}"] = _config_group(scheme, targets)
    storages = {_storage(s) for s in schemes}
    kept = [n for n, s in plan.layers.items() if s is None]
    if head not in plan.layers:
        kept.insert(0, head)
    return {
        "quant_method": NAME,
        "format": storages.pop() if len(storages) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": layer_patterns(kept, total),
        "kv_cache_scheme": None,
    }
