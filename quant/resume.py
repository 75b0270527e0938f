"""Finished blocks of a run that was cut short, kept for its target folder until the same run has used them."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qtool.quant.blockwise import BlockResult, LayerRecord
from qtool.quant.calibration import Block
from qtool.quant.errors import QtoolError
from qtool.quant.hub import cache_folder
from qtool.quant.scheme import QuantScheme
from qtool.quant.textfile import read_json, write_text
from qtool.quant.weight import QuantizedWeight

log = logging.getLogger(__name__)

_KEEP_DAYS = 30
_CHANGED = "changed"
_FACTS = "facts.json"


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What two nested JSON objects do not agree in, one phrase each: `calibration seed 0, now 1`."""
    found = []
    for key in sorted({*before, *now}):
        old, new, name = before.get(key), now.get(key), f"{prefix}{key}"
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            inner = differences(old, new, f"{name} ")
            found += inner[:1] if len(inner) < 2 else [f"{inner[0]} and {len(inner) - 1} more of {name}"]
        elif old != new:
            found.append(f"{name} {_short(old)}, now {_short(new)}")
    return found


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}…"


class BlockStore:
    """The blocks of the run to one target folder: a file each under `$QTOOL_CACHE/resume`, written beside and renamed.

    With them lies what they depend on. What a month has not asked for is removed.

    Args:
        target: the artifact's folder.
        facts: a JSON object of everything that the blocks depend on: two runs that agree in it quantize every block
            alike.
        fresh: forget the blocks that are there.
        reserve: bytes that writing the artifact takes: where it goes to the same disk, no block is kept at its cost.

    Raises:
        QtoolError: there are blocks that a run with other facts has left, says what differs; or they cannot be removed.
    """

    def __init__(self, target: Path, facts: Mapping[str, Any], *, fresh: bool = False, reserve: int = 0) -> None:
        root = cache_folder() / "resume"
        self.folder = root / hashlib.sha256(str(target.resolve()).encode()).hexdigest()[:32]
        self._target, self._reserve = target.resolve(), reserve
        for old in root.glob("*"):
            with suppress(OSError):  # its own run may just have removed it
                if time.time() - old.stat().st_mtime > _KEEP_DAYS * 86400:
                    shutil.rmtree(old, ignore_errors=True)
        now = json.loads(json.dumps(facts, default=str))
        before = None if fresh else self._facts()
        if before is not None and len(self) and (what := differences(before, now)):
            raise QtoolError(
                f"{target}: {len(self)} blocks are kept of a run that was cut short, and that differs from this one in "
                f"{'; '.join(what)}. Give its settings again to go on after them, or pass --fresh to start over"
            )
        if before is None or not len(self):
            self.clear()
            if len(self):
                raise QtoolError(f"{self.folder}: holds blocks of another run that cannot be removed; remove it first")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(self.folder / _FACTS, json.dumps(now, indent=1) + "\n")
        except (OSError, QtoolError) as error:
            log.warning("%s: cannot be written (%s): a run that is cut short starts over", self.folder, error)

    def _facts(self) -> dict[str, Any] | None:
        """What the kept blocks depend on; None where that is not known, so that they cannot be used."""
        try:
            facts = read_json(self.folder / _FACTS)
        except (OSError, QtoolError):
            return None
        return facts if isinstance(facts, dict) else None

    def _path(self, index: int) -> Path:
        return self.folder / f"block-{index:05}.safetensors"

    def __len__(self) -> int:
        return len(list(self.folder.glob("block-*.safetensors")))

    def save(self, index: int, result: BlockResult) -> None:
        """Keep one block; a cache that cannot be written to costs the chance to resume, never the run."""
        tensors: dict[str, Tensor] = {}
        for layer, weight in result.weights.items():
            parts = {"codes": weight.codes, "scale": weight.scale, "zero": weight.zero}
            tensors |= {f"{layer}|{part}": tensor for part, tensor in parts.items() if tensor is not None}
        tensors |= {f"{name}|{_CHANGED}": tensor for name, tensor in result.changed.items()}
        facts = {
            "schemes": {layer: weight.scheme.to_dict() for layer, weight in result.weights.items()},
            "records": {layer: asdict(record) for layer, record in result.records.items()},
            "notes": result.notes,
        }
        partial = self._path(index).with_suffix(".partial")
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._check_room(sum(tensor.nbytes for tensor in contiguous.values()))
            save_file(contiguous, partial, metadata={"facts": json.dumps(facts)})
            partial.rename(self._path(index))
        except (OSError, SafetensorError) as error:
            log.warning("%s: block %d cannot be kept for a later run (%s)", self.folder, index, error)
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def _check_room(self, size: int) -> None:
        """Raise OSError where `size` bytes more would leave too little for the artifact."""
        shared = self.folder.stat().st_dev == self._target.parent.stat().st_dev
        if shared and shutil.disk_usage(self.folder).free < size + self._reserve:
            raise OSError(errno.ENOSPC, "the artifact needs the space")

    def load(self, index: int, device: torch.device) -> BlockResult | None:
        """One block as it was saved, on `device`; None where there is none, or a damaged one (then removed)."""
        path = self._path(index)
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                facts = json.loads(file.metadata()["facts"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            result = BlockResult(notes=facts["notes"])
            for layer, scheme in facts["schemes"].items():
                result.weights[layer] = QuantizedWeight(
                    codes=tensors[f"{layer}|codes"],
                    scale=tensors[f"{layer}|scale"],
                    zero=tensors.get(f"{layer}|zero"),
                    scheme=QuantScheme(**scheme),
                )
                result.weights[layer].check(layer)
            result.records.update({layer: LayerRecord(**record) for layer, record in facts["records"].items()})
        except (SafetensorError, QtoolError, OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s: damaged (%s), its block is quantized again", path, error)
            path.unlink(missing_ok=True)
            return None
        suffix = f"|{_CHANGED}"
        result.changed = {n.removesuffix(suffix): tensor for n, tensor in tensors.items() if n.endswith(suffix)}
        return result

    def tell(self, num_blocks: int) -> None:
        """Say what an interrupted run has left here."""
        if len(self):
            log.info("%d of %d blocks are kept: the same command goes on after them", len(self), num_blocks)

    def clear(self) -> None:
        """Forget the run: its artifact is complete."""
        shutil.rmtree(self.folder, ignore_errors=True)


def restore(block: Block, result: BlockResult) -> None:
    """Leave in `block` the weights that quantizing it left there, so that the walk goes on as it did."""
    for layer, weight in result.weights.items():
        block.linears[layer].weight.data = weight.dequantize()
    for name, stored in result.changed.items():
        parameter = block.module.get_parameter(name.removeprefix(f"{block.name}."))
        parameter.data = stored.to(parameter.dtype)
