"""Writing a model folder: tensors streamed into shards beside the target, renamed into place when all is there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from qtool.quant.checkpoint import INDEX
from qtool.quant.errors import QtoolError

SHARD_BYTES = 1 << 30
RECORD = "qtool.json"
# what travels with the weights: tokenizer, chat template, generation settings, custom code, licence
_COMPANIONS = ("*.json", "*.jinja", "*.model", "*.txt", "*.py", "*.tiktoken", "LICENSE*", "NOTICE*", "README*")
_REPLACED = ("config.json", INDEX, RECORD, "quantize_config.json", "recipe.yaml", "qtool_run.json")


def companion_files(folder: Path) -> list[Path]:
    """The files of a model folder that an artifact takes over as they are, in name order."""
    found = {p for pattern in _COMPANIONS for p in folder.glob(pattern) if p.is_file() and p.name not in _REPLACED}
    return sorted(found)


def read_record(folder: Path) -> dict[str, Any]:
    """qtool.json of an artifact; empty where there is none that can be read."""
    try:
        document = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def check_target(out: Path, *, overwrite: bool) -> None:
    """Raise QtoolError where `out` cannot become the artifact: it exists, or its parent is missing or not writable."""
    if (out.exists() or out.is_symlink()) and not overwrite:
        raise QtoolError(f"{out}: exists already; choose another --out, or pass --force to replace it")
    if out.exists() and not out.is_dir():
        raise QtoolError(f"{out}: is a file, not a folder")
    parent = out.absolute().parent
    existing = next(p for p in (parent, *parent.parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise QtoolError(f"{existing}: not a folder that can be written to")


def check_space(out: Path, need: int) -> None:
    """Raise QtoolError where the file system of `out` has fewer than `need` bytes free."""
    parent = next(p for p in out.absolute().parents if p.exists())
    free = shutil.disk_usage(parent).free
    if free < need:
        raise QtoolError(f"{parent}: {free / 1e6:,.0f} MB free, the artifact needs {need / 1e6:,.0f} MB")


class ArtifactWriter:
    """A context that writes a model folder; on leaving without an error it appears at `out`, else nothing is left.

    Tensors are held until a shard is full (1 GiB), so memory stays bounded. The same tensors in the same order give the
    same bytes.
    """

    def __init__(self, out: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        self.out = out.absolute()
        self._folder = self.out.with_name(f".{self.out.name}.{os.getpid()}.partial")
        self._shard_bytes = shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total = 0

    def __enter__(self) -> ArtifactWriter:
        self._folder.mkdir(parents=True)
        return self

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Take in tensors by name; they are written when the shard is full."""
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            if self._pending and self._pending_bytes + size > self._shard_bytes:
                self._flush()
            self._pending[name] = tensor.detach().cpu().contiguous()
            self._pending_bytes += size

    def _flush(self) -> None:
        path = self._folder / f"shard-{len(self._shards)}"
        save_file(self._pending, path, metadata={"format": "pt"})
        path.chmod(self._folder.stat().st_mode & 0o666)  # safetensors makes files for their owner alone
        self._shards.append(list(self._pending))
        self._total += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _name_shards(self) -> None:
        count = len(self._shards)
        if count == 1:
            (self._folder / "shard-0").rename(self._folder / "model.safetensors")
            return
        home: dict[str, str] = {}
        for i, names in enumerate(self._shards):
            final = f"model-{i + 1:05}-of-{count:05}.safetensors"
            (self._folder / f"shard-{i}").rename(self._folder / final)
            home.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(home.items()))}
        self.write_json(INDEX, index)

    def write_json(self, name: str, document: Any) -> None:
        (self._folder / name).write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def copy(self, files: list[Path]) -> None:
        for path in files:
            shutil.copyfile(path, self._folder / path.name)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                if self._pending:
                    self._flush()
                self._name_shards()
                self._publish()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _publish(self) -> None:
        """Put the finished folder in place; one that stands there (--force) goes only when the new one is whole."""
        old = self.out.with_name(f".{self.out.name}.{os.getpid()}.old")
        if self.out.exists():
            self.out.rename(old)
        try:
            self._folder.rename(self.out)
        except OSError:
            if old.exists():
                old.rename(self.out)
            raise
        shutil.rmtree(old, ignore_errors=True)
