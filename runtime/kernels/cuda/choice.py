"""Which kernel, cut how, multiplies how many tokens: what was measured on this machine, else the table that ships for
the device, else a rule."""

from __future__ import annotations

import functools
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import astuple, replace
from pathlib import Path

import torch

from qtool.quant.errors import QtoolError
from qtool.quant.scheme import PER_CHANNEL, QuantScheme
from qtool.runtime.kernels.cuda import gemm, skinny, stream
from qtool.runtime.kernels.cuda.driver import num_sms
from qtool.runtime.kernels.cuda.gemm import GemmConfig
from qtool.runtime.kernels.cuda.nvrtc import cache_folder
from qtool.runtime.kernels.cuda.skinny import SkinnyConfig
from qtool.runtime.kernels.cuda.stream import StreamConfig
from qtool.runtime.kernels.interface import LinearSpec

BUCKETS: tuple[int, ...] = (
    *(1, 8), *range(16, 257, 16), *range(288, 513, 32), *range(576, 2049, 64)
)  # fmt: skip
"""Numbers of tokens for which a choice is made, by measurements or else by a rule; others take the next larger one, and
beyond all of them the kernel of the last one serves."""

Choice = SkinnyConfig | StreamConfig | GemmConfig | None
"""None: int8 rows (int8_matmul.py) where they serve, else dequantize a slab at a time and multiply in 16 bits."""

_KINDS = {SkinnyConfig: "skinny", StreamConfig: "stream", GemmConfig: "gemm"}


def bucket_of(tokens: int) -> int:
    """The bucket that serves `tokens`; beyond the largest, that."""
    return next((b for b in BUCKETS if tokens <= b), BUCKETS[-1])


def key(spec: LinearSpec, bucket: int) -> str:
    """Under which a choice is stored: scheme, shape, tokens, and bf16 where activations are bfloat16."""
    return f"{spec.scheme.name} {spec.rows}x{spec.cols} {bucket}" + (" bf16" if spec.dtype == torch.bfloat16 else "")


def kin(spec: LinearSpec) -> list[LinearSpec]:
    """Linears whose measurements serve where there are none of `spec` itself, the closest first: of the other type of
    activations, then of the groups that are measured most."""
    bits, act_bits = spec.scheme.bits, spec.scheme.act_bits
    schemes = (spec.scheme, QuantScheme(bits, 128 if bits == 4 else PER_CHANNEL, act_bits=act_bits))
    other = torch.float16 if spec.dtype == torch.bfloat16 else torch.bfloat16
    return [replace(spec, scheme=scheme, dtype=dtype) for scheme in schemes for dtype in (spec.dtype, other)][1:]


def encode(choice: Choice) -> list[str | int]:
    """A choice as a JSON list."""
    if choice is None:
        return ["dequantize"]
    return [_KINDS[type(choice)], *(int(v) for v in astuple(choice))]


def decode(entry: list[str | int]) -> Choice:
    """The inverse of encode. Raises QtoolError for an entry that is no choice."""
    kind, *values = entry
    numbers = [int(v) for v in values]
    if kind == "dequantize" and not numbers:
        return None
    if kind == "skinny" and len(numbers) == 6:
        tiles, warps, split, prefetch, prefetch_x, min_blocks = numbers
        return SkinnyConfig(tiles, warps, split, prefetch, bool(prefetch_x), min_blocks)
    if kind == "stream" and len(numbers) == 3:
        return StreamConfig(*numbers)
    if kind == "gemm" and len(numbers) == 4:
        tokens, warpgroups, split, progressive = numbers
        return GemmConfig(tokens, warpgroups, split, bool(progressive))
    raise QtoolError(f"the kernel table has an entry that is no choice: {entry}")


def _slug(device_name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def tuned_path(device_name: str) -> Path:
    """Where this machine's own measurements are kept."""
    return cache_folder().parent / "tuned" / f"{_slug(device_name)}.json"


def save_tuned(device_name: str, choices: Mapping[str, Choice]) -> Path:
    """Add `choices` (under their keys) to this machine's measurements; later look-ups of any process use them."""
    path = tuned_path(device_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    merged = _read(path) | {k: encode(c) for k, c in choices.items()}
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tuned-")
    with os.fdopen(handle, "w") as file:
        json.dump(merged, file, indent=1, sort_keys=True)
    os.replace(temporary, path)
    _table.cache_clear()
    _choose.cache_clear()
    return path


def _read(path: Path) -> dict[str, list[str | int]]:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise QtoolError(f"{path}: the kernel table cannot be read ({error}); delete it and tune again") from None


@functools.cache
def _table(device_name: str) -> dict[str, list[str | int]]:
    shipped = Path(__file__).resolve().parent / f"{_slug(device_name)}.json"
    return _read(shipped) | _read(tuned_path(device_name))


def rule(spec: LinearSpec, bucket: int, capability: tuple[int, int], num_sms: int) -> Choice:
    """A choice without measurements: enough warps in flight on every SM to cover the latency of memory.

    Args:
        spec: the linear.
        bucket: of BUCKETS.
        capability: of the device; Hopper (9, 0) has warpgroup tensor cores.
        num_sms: streaming multiprocessors of the device.
    """
    int8 = spec.scheme.act_bits is not None
    per_sm = -(-spec.rows // 16) / num_sms  # 16-row tiles
    if capability == (9, 0) and not int8:
        config = StreamConfig(2, 16) if per_sm < 3 else StreamConfig(2, 8) if per_sm <= 8 else StreamConfig(4, 4)
        if stream.fits(spec, bucket, config):
            return config
    if capability == (9, 0) and bucket > 16 and gemm.supports(spec):
        return gemm.candidates(spec, bucket, num_sms)[0]
    if bucket > 64:
        return None
    if bucket > 16:
        return SkinnyConfig(2, 4, prefetch=1) if per_sm > 4 and bucket <= 32 else SkinnyConfig(1, 8, prefetch=1)
    if per_sm < 3:  # few rows: many warps to a block, so that K is short for each
        return SkinnyConfig(2, 16, prefetch=2 if spec.scheme.bits == 4 and bucket <= 8 else 1)
    if per_sm > 8 and not int8:
        return SkinnyConfig(4 if bucket > 8 else 2, 4, prefetch=1)
    return SkinnyConfig(2, 4, prefetch=2) if bucket > 8 and not int8 else SkinnyConfig(2, 8, prefetch=1)


def choose(spec: LinearSpec, tokens: int, device: torch.device) -> Choice:
    """The kernel for `tokens` activations on `device`."""
    index = torch.cuda.current_device() if device.index is None else device.index
    choice = _choose(spec, bucket_of(tokens), index)
    if tokens > BUCKETS[-1] and isinstance(choice, GemmConfig):
        return gemm.for_more(spec, tokens, choice, num_sms(index))
    return choice


def serves(choice: Choice, spec: LinearSpec, bucket: int) -> bool:
    """Whether a choice is for such activations and fits: an earlier version may have made it, or it is of kin."""
    if isinstance(choice, StreamConfig):
        return min(astuple(choice)) > 0 and not spec.scheme.act_bits and stream.fits(spec, bucket, choice)
    if isinstance(choice, GemmConfig):
        return choice in gemm.ways(spec) and (bucket > gemm.EXACT_TOKENS or not choice.progressive)
    if isinstance(choice, SkinnyConfig):
        least = min(choice.tiles, choice.warps, choice.split, choice.prefetch, choice.min_blocks)
        return least > 0 and bucket <= skinny.MAX_TOKENS
    return True


def _read_choice(entry: list[str | int] | None, spec: LinearSpec, bucket: int) -> tuple[Choice] | None:
    """What a table says, if that serves; None, too, for what an earlier version wrote and this one does not know."""
    try:
        choice = decode(entry) if entry else None
    except (QtoolError, TypeError, ValueError):
        return None
    return (choice,) if entry and serves(choice, spec, bucket) else None


@functools.cache
def _choose(spec: LinearSpec, bucket: int, device_index: int) -> Choice:
    properties = torch.cuda.get_device_properties(device_index)
    table = _table(properties.name)
    for measured in (spec, *kin(spec)):
        found = _read_choice(table.get(key(measured, bucket)), spec, bucket)
        if found is not None:
            return found[0]
    return rule(spec, bucket, (properties.major, properties.minor), properties.multi_processor_count)
