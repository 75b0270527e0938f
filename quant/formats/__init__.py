"""On-disk formats of quantized checkpoints: one module each reads it into QuantizedWeight and writes it from there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.formats import awq, compressed_tensors, gptq
from qtool.quant.scheme import KVCacheScheme, QuantPlan, QuantScheme
from qtool.quant.textfile import read_json
from qtool.quant.weight import QuantizedWeight

FormatName = Literal["compressed-tensors", "gptq", "awq"]

DAMAGE = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, re.error)
"""What reading raises somewhere in torch where a part has a rank, size or type that its format does not know."""


class QuantReader(Protocol):
    """Reads the quantized linears of one checkpoint."""

    @property
    def format(self) -> str:
        """compressed-tensors, gptq or awq."""

    def scheme(self, layer: str) -> QuantScheme | None:
        """How the layer is stored; None: in 16 bits. Raises QtoolError where that cannot be told."""

    def read(self, layer: str) -> QuantizedWeight:
        """The layer's weight. Raises QtoolError where a tensor is missing or its parts do not fit together."""


@dataclass(frozen=True)
class _NamingReader:
    """A format's reader; whatever is wrong with a layer is one line that names it."""

    reader: QuantReader
    folder: Path

    @property
    def format(self) -> str:
        return self.reader.format

    def scheme(self, layer: str) -> QuantScheme | None:
        with self._said_of(layer):
            return self.reader.scheme(layer)

    def read(self, layer: str) -> QuantizedWeight:
        with self._said_of(layer):
            return self.reader.read(layer)

    @contextmanager
    def _said_of(self, layer: str) -> Iterator[None]:
        try:
            yield
        except QtoolError as error:
            if layer in str(error):
                raise
            raise QtoolError(f"{self.folder}: layer {layer}: {error}") from None
        except DAMAGE as error:
            what = _first_line(error)
            raise QtoolError(f"{self.folder}: quantized layer {layer} is damaged ({what}); fetch it again") from None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


@dataclass(frozen=True)
class QuantWriter:
    """How one format stores a plan.

    Attributes:
        check_plan: (plan, layer → shape); raises QtoolError for a plan that the format cannot hold.
        tensors: (layer, weight) → tensors by the name under which they are stored.
        quantization_config: (plan, name of the output projection) → that section of config.json.
    """

    check_plan: Callable[[QuantPlan, Mapping[str, tuple[int, int]]], None]
    tensors: Callable[[str, QuantizedWeight], dict[str, Tensor]]
    quantization_config: Callable[[QuantPlan, str], dict[str, Any]]


def writer(name: str) -> QuantWriter:
    """The writer of a format. Raises QtoolError for an unknown name."""
    modules = {m.NAME: m for m in (compressed_tensors, gptq, awq)}
    if name not in modules:
        raise QtoolError(f"unknown format {name!r}: use one of {', '.join(modules)}")
    module = modules[name]
    return QuantWriter(module.check_plan, module.tensors, module.quantization_config)


def read_quantization_config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The quantization section of config.json, or quantize_config.json of older GPTQ folders; None: there is none."""
    config = checkpoint.config.get("quantization_config")
    legacy = checkpoint.folder / "quantize_config.json"
    if config is None and legacy.is_file():
        try:
            config = {"quant_method": gptq.NAME, **read_json(legacy)}
        except TypeError:
            raise QtoolError(f"{legacy}: not a JSON object") from None
    if config is not None and not isinstance(config, dict):
        raise QtoolError(f"{checkpoint.folder}: quantization_config of config.json is no JSON object")
    return config


def read_kv_cache_scheme(checkpoint: Checkpoint) -> KVCacheScheme | None:
    """How the checkpoint wants keys and values cached; None: it says nothing of it.

    Raises:
        QtoolError: its kv_cache_scheme is damaged.
    """
    config = read_quantization_config(checkpoint)
    if config is None or config.get("quant_method") != compressed_tensors.NAME:
        return None
    return compressed_tensors.kv_cache_scheme(config, f"{checkpoint.folder}: quantization_config.kv_cache_scheme")


def open_reader(checkpoint: Checkpoint) -> QuantReader | None:
    """The reader for a checkpoint's format; None for a plain 16-bit checkpoint.

    Raises:
        QtoolError: a quantization_config of a kind that qtool does not read, or one that is damaged.
    """
    config = read_quantization_config(checkpoint)
    if config is None:
        return None
    try:
        return _NamingReader(_reader(checkpoint, config), checkpoint.folder)
    except DAMAGE as error:
        raise QtoolError(
            f"{checkpoint.folder}: the quantization_config of config.json is damaged ({_first_line(error)})"
        ) from None


def _reader(checkpoint: Checkpoint, config: Mapping[str, Any]) -> QuantReader:
    match config.get("quant_method"):
        case compressed_tensors.NAME:
            return compressed_tensors.CompressedTensorsReader.open(checkpoint, config)
        case gptq.NAME:
            return gptq.GPTQReader.open(checkpoint, config)
        case awq.NAME:
            return awq.AWQReader.open(checkpoint, config)
        case other:
            raise QtoolError(
                f"{checkpoint.folder}: quantization method {other!r} is not supported: "
                "qtool reads compressed-tensors, gptq and awq"
            )
