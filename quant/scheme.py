"""How a linear layer is stored (QuantScheme), and which layer is stored how (QuantPlan)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from qtool.quant.errors import QtoolError

SUPPORTED_BITS = (4, 8)
SUPPORTED_GROUPS = (128, 64, 32)
PER_CHANNEL = -1
WORD_BITS = 32  # codes and zero points are packed into int32 words

_NAME = re.compile(r"w(\d+)(?:g(\d+))?(a\d+)?(-asym)?$")


def _words(elements: int, bits: int) -> int:
    return -(-elements * bits // WORD_BITS)


@dataclass(frozen=True, order=True)
class QuantScheme:
    """How one linear layer is stored: `bits` per weight, one scale per `group_size` inputs (-1: per output channel).

    `act_bits` = 8 says that the layer's input is quantized too, per token and at run time (W8A8, W4A8).

    Raises:
        QtoolError: bits, group size or activation bits that no kernel knows.
    """

    bits: int
    group_size: int = PER_CHANNEL
    symmetric: bool = True
    act_bits: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in SUPPORTED_BITS:
            raise QtoolError(f"{self.bits} bits per weight is not supported: use one of {list(SUPPORTED_BITS)}")
        if self.group_size != PER_CHANNEL and (self.group_size <= 0 or self.group_size % 8):
            raise QtoolError(
                f"group size {self.group_size} is not supported: use 128, 64, 32, or -1 (one scale per output channel)"
            )
        if self.act_bits not in (None, 8):
            raise QtoolError(f"{self.act_bits}-bit activations are not supported: use 8, or leave them in 16 bits")

    @property
    def name(self) -> str:
        """Short name: `w4g64`, `w8`, `w4g128-asym`, `w8a8`."""
        group = "" if self.group_size == PER_CHANNEL else f"g{self.group_size}"
        act = f"a{self.act_bits}" if self.act_bits else ""
        return f"w{self.bits}{group}{act}{'' if self.symmetric else '-asym'}"

    @classmethod
    def parse(cls, name: str) -> QuantScheme:
        """The scheme with this short name. Raises QtoolError for a name that is none."""
        match = _NAME.match(name.strip().lower())
        if match is None:
            raise QtoolError(f"unknown scheme {name!r}: write it like w4g64, w4g128-asym, w8, w8a8 or fp16")
        bits, group, act, asym = match.groups()
        return cls(
            bits=int(bits),
            group_size=int(group) if group else PER_CHANNEL,
            symmetric=asym is None,
            act_bits=int(act[1:]) if act else None,
        )

    @property
    def midpoint(self) -> int:
        """The code that stands for zero in a symmetric scheme: 8 at 4 bits, 128 at 8."""
        return 1 << (self.bits - 1)

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1

    def num_groups(self, cols: int) -> int:
        """Groups along an input of `cols`. Raises QtoolError where the group does not divide it."""
        if self.group_size == PER_CHANNEL:
            return 1
        if cols % self.group_size:
            raise QtoolError(f"group size {self.group_size} does not divide an input of {cols}")
        return cols // self.group_size

    def num_bytes(self, rows: int, cols: int) -> int:
        """True size of a [rows, cols] weight on disk and in memory: codes, 16-bit scales and packed zero points."""
        groups = self.num_groups(cols)
        codes = rows * _words(cols, self.bits) * 4
        scales = rows * groups * 2
        zeros = 0 if self.symmetric else _words(rows, self.bits) * 4 * groups
        return codes + scales + zeros

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class KVCacheScheme:
    """How a checkpoint says that keys and values are to be cached.

    Attributes:
        name: type and bits: `int8`, `float8`.
        scales: one static scale for each tensor of a layer, or for each of its heads (`attn_head`).
        supported: static symmetric int8, which the runtime serves with the checkpoint's own scales.
    """

    name: str
    scales: str = "tensor"
    supported: bool = True


FLOAT = "fp16"  # the name under which plans and tables list a layer that keeps its 16 bits


def scheme_name(scheme: QuantScheme | None) -> str:
    return FLOAT if scheme is None else scheme.name


def parse_scheme(name: str) -> QuantScheme | None:
    """`fp16` (or `bf16`) → None, any other name as in QuantScheme.parse."""
    return None if name.strip().lower() in (FLOAT, "bf16") else QuantScheme.parse(name)


def layer_bytes(scheme: QuantScheme | None, rows: int, cols: int, float_bytes: int = 2) -> int:
    """True bytes of a [rows, cols] linear under `scheme`; None: it stays as it is, at `float_bytes` a weight."""
    return rows * cols * float_bytes if scheme is None else scheme.num_bytes(rows, cols)


def fit_group(scheme: QuantScheme, cols: int) -> QuantScheme:
    """`scheme` itself where its group divides `cols`, else with the largest of 128, 64, 32 below it that does.

    Raises:
        QtoolError: none of them divides `cols`.
    """
    if scheme.group_size == PER_CHANNEL or cols % scheme.group_size == 0:
        return scheme
    for group in SUPPORTED_GROUPS:
        if group < scheme.group_size and cols % group == 0:
            return QuantScheme(scheme.bits, group, scheme.symmetric, scheme.act_bits)
    raise QtoolError(
        f"no group size of {list(SUPPORTED_GROUPS)} up to {scheme.group_size} divides an input of {cols}: "
        "use --group -1 (one scale per output channel)"
    )


@dataclass(frozen=True)
class QuantPlan:
    """Layer name → scheme, for every linear layer of the blocks (and the head, where it is listed); None: 16-bit."""

    layers: Mapping[str, QuantScheme | None]

    def __getitem__(self, layer: str) -> QuantScheme | None:
        return self.layers[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def schemes(self) -> list[QuantScheme]:
        """The distinct schemes, sorted; 16-bit left out."""
        return sorted({s for s in self.layers.values() if s is not None}, key=lambda s: s.name)

    def is_uniform(self) -> bool:
        return len(set(self.layers.values())) <= 1

    def num_bytes(self, shapes: Mapping[str, tuple[int, int]]) -> int:
        """True bytes of the planned linears, given layer → (rows, cols)."""
        return sum(layer_bytes(s, *shapes[name]) for name, s in self.layers.items())

    def average_bits(self, shapes: Mapping[str, tuple[int, int]]) -> float:
        """Bits per weight over the planned linears, scales and zero points counted."""
        weights = sum(shapes[n][0] * shapes[n][1] for n in self.layers)
        return 8.0 * self.num_bytes(shapes) / weights

    def to_json(self) -> str:
        return json.dumps({n: scheme_name(s) for n, s in self.layers.items()}, indent=1)

    @classmethod
    def from_names(cls, names: Mapping[str, str]) -> QuantPlan:
        return cls({layer: parse_scheme(name) for layer, name in names.items()})


def uniform_plan(shapes: Mapping[str, tuple[int, int]], scheme: QuantScheme) -> tuple[QuantPlan, dict[str, str]]:
    """One scheme for every layer, the group made smaller where it does not divide the layer's input.

    Returns the plan and layer → note, for the layers whose group had to change.
    """
    plan: dict[str, QuantScheme | None] = {}
    notes: dict[str, str] = {}
    for name, (_, cols) in shapes.items():
        try:
            fitted = fit_group(scheme, cols)
        except QtoolError as error:
            raise QtoolError(f"layer {name}: {error}") from None
        plan[name] = fitted
        if fitted != scheme:
            notes[name] = f"group {fitted.group_size} instead of {scheme.group_size}: input size is {cols}"
    return QuantPlan(plan), notes


def check_covers(plan: QuantPlan, layers: Iterable[str]) -> None:
    """Refuse a plan that names layers the model lacks, or misses some that it has. Raises QtoolError."""
    have, want = set(layers), set(plan.layers)
    if unknown := sorted(want - have):
        raise QtoolError(f"the plan names {len(unknown)} layers that the model lacks, first {unknown[0]!r}")
    if missing := sorted(have - want):
        raise QtoolError(f"the plan says nothing of {len(missing)} layers, first {missing[0]!r}")
