"""Writing a model folder: tensors streamed into shards beside the target, renamed into place when all is there."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from qtool.quant.checkpoint import INDEX
from qtool.quant.errors import QtoolError
from qtool.quant.textfile import check_folder, read_json, write_text

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
        document = read_json(folder / RECORD)
    except (OSError, QtoolError):
        return {}
    return document if isinstance(document, dict) else {}


def check_target(out: Path, *, overwrite: bool) -> None:
    """Raise QtoolError where `out` cannot become the artifact: it exists (with `overwrite`: and is neither empty nor a
    model folder), or its parent is missing or not writable.
    """
    if (out.exists() or out.is_symlink()) and not overwrite:
        raise QtoolError(f"{out}: exists already; choose another --out, or pass --force to replace it")
    if out.is_symlink():
        raise QtoolError(
            f"{out}: is a symbolic link, which is not replaced; name the folder itself, or remove the link"
        )
    check_folder(out.parent)
    if out.exists() and not out.is_dir():
        raise QtoolError(f"{out}: is a file, not a folder")
    if out.exists() and any(out.iterdir()) and not (out / "config.json").is_file():
        raise QtoolError(
            f"{out}: holds other things than a model, so --force does not replace it; choose another --out"
        )


def check_apart(out: Path, source: Path) -> None:
    """Raise QtoolError where replacing `out` would remove the model `source` itself."""
    if source.resolve().is_relative_to(out.resolve()):
        raise QtoolError(f"{out}: holds the model that is read ({source}), and would replace it; choose another --out")


def check_space(out: Path, need: int) -> None:
    """Raise QtoolError where the file system of `out` has fewer than `need` bytes free."""
    parent = next(p for p in out.absolute().parents if p.exists())
    free = shutil.disk_usage(parent).free
    if free < need:
        raise QtoolError(f"{parent}: {free / 1e6:,.1f} MB free, the artifact needs {need / 1e6:,.1f} MB")


class ArtifactWriter:
    """A context that writes a model folder; on leaving without an error it appears at `out`, else nothing is left.

    Tensors are held until a shard is full (1 GiB), so memory stays bounded. The same tensors in the same order give the
    same bytes. With `overwrite` an `out` that exists is replaced.

    Raises:
        QtoolError: another run is writing `out` (on entering), `out` appeared meanwhile, or the disk is full.
    """

    def __init__(self, out: Path, *, overwrite: bool = False, shard_bytes: int = SHARD_BYTES) -> None:
        self.out = out.resolve()
        self._overwrite = overwrite
        self._folder = self.out.with_name(f".{self.out.name}.partial")
        self._old = self.out.with_name(f".{self.out.name}.old")
        self._lock = -1
        self._shard_bytes = shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total = 0

    def __enter__(self) -> ArtifactWriter:
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _claim(self._folder, self.out)
        if self.out.exists():
            shutil.rmtree(self._old, ignore_errors=True)  # a run was killed when it had just replaced it
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
        try:
            save_file(self._pending, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise QtoolError(f"{self.out.parent}: the weights cannot be written ({error}); is the disk full?") from None
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
        write_text(self._folder / name, json.dumps(document, indent=2, ensure_ascii=False) + "\n")

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
            os.close(self._lock)

    def _publish(self) -> None:
        """Put the finished folder in place; one that stands there (--force) goes only when the new one is whole."""
        if self.out.exists():
            if not self._overwrite:
                raise QtoolError(f"{self.out}: appeared while this run was at work, and is left as it is")
            self.out.rename(self._old)
        try:
            self._folder.rename(self.out)
        except OSError:
            if self._old.exists():
                self._old.rename(self.out)
            raise
        shutil.rmtree(self._old, ignore_errors=True)


def _claim(folder: Path, out: Path) -> int:
    """Make `folder`, lock it, and empty it of what a killed run left; returns the handle that holds the lock.

    Raises:
        QtoolError: a run that is alive holds the lock.
    """
    while True:
        folder.mkdir(exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise QtoolError(f"{out}: another run is writing it; wait for its end, or choose another --out") from None
        # between making and locking, the run that held it may have renamed or removed it
        if folder.exists() and os.path.samestat(os.fstat(handle), folder.stat()):
            break
        os.close(handle)
    for left in folder.iterdir():
        left.unlink()
    return handle
