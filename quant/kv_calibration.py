"""What int8 keys and values cost a block's attention, and the static scales that are stored, from its inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qtool.quant.calibration import Block, Reached
from qtool.quant.kv_numerics import MAX_CODE, SCALE_DTYPE, from_codes, to_codes, token_scales

ERROR_TOKENS = 4096  # as many are enough to compare two grids
ERROR_LIMIT = 0.1  # of a block's attention output; above it the run says so

Change = Callable[[Tensor], Tensor]
"""Keys (rotated) or values [b, num_kv_heads, seq, head_dim] → what attention reads in their place."""


@dataclass(frozen=True)
class KVRecord:
    """Keys and values of one block over the calibration inputs.

    Attributes:
        key_max, value_max: largest magnitude for each KV head.
        dynamic_error: relative error ‖A' − A‖/‖A‖ of the attention's output (before its projection), the cache in int8
            with a scale for each token and head.
        static_error: the same with the one scale for all keys, and one for all values, that is stored.
    """

    key_max: tuple[float, ...]
    value_max: tuple[float, ...]
    dynamic_error: float
    static_error: float

    @property
    def scales(self) -> tuple[float, float]:
        """The static scales of all keys and of all values."""
        smallest = torch.finfo(SCALE_DTYPE).tiny
        return max(max(self.key_max) / MAX_CODE, smallest), max(max(self.value_max) / MAX_CODE, smallest)


class _Tap:
    """Stands where attention expects its cache: sees the rotated keys and the values, and hands back changed ones."""

    def __init__(self, keys: Change, values: Change) -> None:
        self._keys, self._values = keys, values

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._keys(keys), self._values(values)


@contextmanager
def _tapped(attention: nn.Module, tap: _Tap, on_output: Callable[[Tensor], None]) -> Iterator[None]:
    """Runs of the block give `attention` the `tap`, and end with its output [b, seq, heads * head_dim] in hand."""
    # transformers has renamed the argument
    name = "cache" if "cache" in inspect.signature(attention.forward).parameters else "past_key_values"

    def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, name: tap}

    def leave(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        on_output(args[0])
        raise Reached

    handles = [
        attention.register_forward_pre_hook(enter, with_kwargs=True),
        attention.get_submodule("o_proj").register_forward_pre_hook(leave),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _attend(block: Block, inputs: Tensor, keys: Change, values: Change) -> Tensor:
    """What attention gives for the block's `inputs` when its keys and values are changed."""
    found: list[Tensor] = []
    attention = block.module.get_submodule("self_attn")
    with torch.no_grad(), _tapped(attention, _Tap(keys, values), found.append):
        block.run_until(inputs)
    (output,) = found
    return output.float()


def _dynamic(kv: Tensor) -> Tensor:
    scales = token_scales(kv)
    return from_codes(to_codes(kv, scales), scales, kv.dtype)


def _static(scale: float) -> Change:
    def change(kv: Tensor) -> Tensor:
        scales = torch.tensor(scale, dtype=SCALE_DTYPE, device=kv.device)
        return from_codes(to_codes(kv, scales), scales, kv.dtype)

    return change


def calibrate_kv(block: Block) -> KVRecord:
    """Measure `block`, with the weights that are in it, on its inputs; the errors on the first ERROR_TOKENS tokens."""
    largest: dict[str, Tensor] = {}

    def watch(name: str) -> Change:
        def change(kv: Tensor) -> Tensor:
            found = kv.abs().amax(dim=(0, 2, 3)).float()  # [num_kv_heads]
            largest[name] = torch.maximum(largest[name], found) if name in largest else found
            return kv

        return change

    for inputs in block.inputs:
        _attend(block, inputs, watch("keys"), watch("values"))
    bare = KVRecord(tuple(largest["keys"].tolist()), tuple(largest["values"].tolist()), 0.0, 0.0)
    key_scale, value_scale = bare.scales
    norm = dynamic = static = 0.0
    seen = 0
    for inputs in block.inputs:
        exact = _attend(block, inputs, lambda kv: kv, lambda kv: kv)
        norm += float(exact.square().sum())
        dynamic += float((_attend(block, inputs, _dynamic, _dynamic) - exact).square().sum())
        static += float((_attend(block, inputs, _static(key_scale), _static(value_scale)) - exact).square().sum())
        seen += inputs.shape[0] * inputs.shape[1]
        if seen >= ERROR_TOKENS:
            break
    norm = norm or 1.0
    return KVRecord(bare.key_max, bare.value_max, (dynamic / norm) ** 0.5, (static / norm) ** 0.5)


def kv_tensors(attention: str, record: KVRecord) -> dict[str, Tensor]:
    """The static scales of one attention as compressed-tensors names them, [1] float32 each."""
    names = (f"{attention}.k_scale", f"{attention}.v_scale")
    return {name: torch.tensor([scale], dtype=torch.float32) for name, scale in zip(names, record.scales)}


def kv_notes(records: Sequence[KVRecord]) -> tuple[str, ...]:
    """A warning where the static scales are too coarse for some block."""
    coarse = [i for i, record in enumerate(records) if record.static_error > ERROR_LIMIT]
    if not coarse:
        return ()
    worst = max(coarse, key=lambda i: records[i].static_error)
    return (
        f"KV cache in int8: with the stored scales the attention of {len(coarse)} blocks is off by more than "
        f"{ERROR_LIMIT:.0%} (block {worst} by {records[worst].static_error:.1%}); served with --kv-cache-dtype int8, a "
        f"scale for each token and head, that block's is off by {records[worst].dynamic_error:.1%}",
    )
