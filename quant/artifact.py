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

from torch import Tensor

from qtool.quant.checkpoint import INDEX
from qtool.quant.errors import QtoolError
from qtool.quant.shard import ShardWriter
from qtool.quant.textfile import check_folder, read_json, write_text

SHARD_BYTES = 1 << 30
RECORD = "qtool.json"
RUN_RECORD = "qtool_run.json"  # what differs from run to run: times and memory
# what travels with the weights: tokenizer, chat template, generation settings, custom code, licence
_COMPANIONS = ("*.json", "*.jinja", "*.model", "*.txt", "*.py", "*.tiktoken", "LICENSE*", "NOTICE*", "README*")
_REPLACED = ("config.json", INDEX, RECORD, "quantize_config.json", "recipe.yaml", RUN_RECORD)


def companion_files(folder: Path) -> list[Path]:
    """The files of a model folder that an artifact takes over as they are, in name order."""
    found = {p for pattern in _COMPANIONS for p in folder.glob(pattern) if p.is_file() and p.name not in _REPLACED}
    return sorted(found)


def read_record(folder: Path, name: str = RECORD) -> dict[str, Any]:
    """qtool.json of an artifact, or another record beside it; empty where there is none that can be read."""
    try:
        document = read_json(folder / name)
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


def bytes_while_written(size: int) -> int:
    """Disk that an artifact of `size` bytes takes at most: a shard lies there twice while it is put in order."""
    return size + min(size, SHARD_BYTES)


def check_space(out: Path, size: int) -> None:
    """Raise QtoolError where the file system of `out` has too little room for writing an artifact of `size` bytes."""
    parent = next(p for p in out.absolute().parents if p.exists())
    free = shutil.disk_usage(parent).free
    need = bytes_while_written(size)
    if free < need:
        raise QtoolError(f"{parent}: {free / 1e6:,.1f} MB free, the artifact needs {need / 1e6:,.1f} MB")


class ArtifactWriter:
    """A context that writes a model folder; on leaving without an error it appears at `out`, else nothing is left.

    Tensors go to the disk as they come, into shards of 1 GiB. The same tensors in the same order give the same bytes.
    With `overwrite` an `out` that exists is replaced.

    Raises:
        QtoolError: another run is writing `out`, or has just written it (on entering); `out` appeared meanwhile, or
            the disk is full.
    """

    def __init__(self, out: Path, *, overwrite: bool = False, shard_bytes: int = SHARD_BYTES) -> None:
        self.out = out.resolve()
        self._overwrite = overwrite
        self._folder = self.out.with_name(f".{self.out.name}.partial")
        self._lock = -1
        self._shard_bytes = shard_bytes
        self._open: ShardWriter | None = None
        self._shards: list[list[str]] = []
        self._total = 0

    def __enter__(self) -> ArtifactWriter:
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _claim(self._folder, self.out)
        if self.out.exists() and not self._overwrite:
            self._let_go()
            raise _appeared_error(self.out)
        return self

    def _let_go(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors by name; a shard that one would overfill is ended before it."""
        try:
            for name, tensor in tensors.items():
                size = tensor.numel() * tensor.element_size()
                if self._open is not None and self._open.num_bytes + size > self._shard_bytes:
                    self._end_shard()
                if self._open is None:
                    self._open = ShardWriter(self._folder / f"shard-{len(self._shards)}")
                self._open.add(name, tensor)
        except OSError as error:
            raise self._disk_error(error) from None

    def _end_shard(self) -> None:
        if self._open is not None:
            self._shards.append(self._open.finish())
            self._total += self._open.num_bytes
            self._open = None

    def _disk_error(self, error: OSError) -> QtoolError:
        reason = error.strerror or error
        return QtoolError(f"{self.out.parent}: the artifact cannot be written ({reason}); is the disk full?")

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
        try:
            for path in files:
                shutil.copyfile(path, self._folder / path.name)
        except OSError as error:
            raise self._disk_error(error) from None

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                try:
                    self._end_shard()
                except OSError as error:
                    raise self._disk_error(error) from None
                self._name_shards()
                self._publish()
        finally:
            if self._open is not None:
                self._open.close()
            self._let_go()

    def _publish(self) -> None:
        publish(self._folder, self.out, overwrite=self._overwrite)


def publish(folder: Path, out: Path, *, overwrite: bool) -> None:
    """Put a finished folder in place; one that stands there goes (with `overwrite`) only when the new one is whole.

    Raises:
        QtoolError: `out` exists, without `overwrite`.
    """
    old = out.with_name(f".{out.name}.old")
    if out.exists():
        if not overwrite:
            raise _appeared_error(out)
        shutil.rmtree(old, ignore_errors=True)  # a run was killed when it had just replaced it
        out.rename(old)
    try:
        folder.rename(out)
    except OSError:
        if old.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _appeared_error(out: Path) -> QtoolError:
    return QtoolError(f"{out}: appeared while this run was at work, and is left as it is")


def _claim(folder: Path, out: Path) -> int:
    """Make `folder`, lock it, and empty it of what a killed run left; returns the handle that holds the lock.

    Raises:
        QtoolError: a run that is alive holds the lock.
    """
    while True:
        folder.mkdir(exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # what a link leads to is not emptied
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
