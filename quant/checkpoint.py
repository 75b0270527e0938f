"""A Hugging Face model folder, opened lazily: its config, and its tensors one at a time. Nothing is loaded up front."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from qtool.quant.errors import QtoolError
from qtool.quant.textfile import read_json

INDEX = "model.safetensors.index.json"


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder. Raises QtoolError where the folder or the file is missing or no JSON object."""
    if not folder.is_dir():
        raise QtoolError(f"{folder}: no such folder")
    path = folder / "config.json"
    if not path.is_file():
        raise QtoolError(f"{folder}: no config.json, so this is not a Hugging Face model folder")
    config = read_json(path)
    if not isinstance(config, dict):
        raise QtoolError(f"{path}: expected a JSON object, found {type(config).__name__}")
    return config


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(read_json(index)["weight_map"].values()))
        except (KeyError, AttributeError, TypeError):
            raise QtoolError(f"{index}: damaged, expected an object with a weight_map; fetch the model again") from None
        if missing := [n for n in names if not isinstance(n, str) or not (folder / n).is_file()]:
            raise QtoolError(f"{folder}: {INDEX} names {missing[0]}, which is missing; fetch the model again")
        return [folder / n for n in names]
    single = sorted(p for p in folder.glob("*.safetensors") if "reference_logits" not in p.name)
    if not single:
        has_bin = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        hint = (
            "only pickled .bin/.pt weights, which qtool does not load: save it as safetensors"
            if has_bin
            else ("no *.safetensors file: is the download complete?")
        )
        raise QtoolError(f"{folder}: {hint}")
    model = folder / "model.safetensors"
    if model in single:
        return [model]
    if len(single) > 1:
        raise QtoolError(
            f"{folder}: {len(single)} safetensors files but no {INDEX}: which ones belong together is unknown"
        )
    return single


class Weights(Protocol):
    """What a checkpoint and every view of one (quant/views.py) offer; Checkpoint says what each does."""

    @property
    def folder(self) -> Path: ...

    @property
    def config(self) -> dict[str, Any]: ...

    def __contains__(self, name: str) -> bool: ...

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> Tensor: ...

    def tensor_bytes(self, name: str) -> int: ...


class Checkpoint:
    """The tensors of a model folder by name, read on demand, each through a memory map of its own.

    A tensor's map goes with the tensor, so that what was read and let go no longer counts as this process's memory.

    Args:
        folder: a Hugging Face model folder with safetensors weights (one file, or shards with an index).

    Raises:
        QtoolError: folder, config or weights missing; a weight file truncated or damaged (found on opening);
            fewer tensors than blocks.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = read_config(self.folder)
        self._stack = ExitStack()
        self._home: dict[str, tuple[Path, Any]] = {}  # file, and the handle that answers for names and shapes
        self.files = _weight_files(self.folder)
        for path in self.files:
            try:
                handle = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError, ValueError) as error:
                self._stack.close()
                raise QtoolError(f"{path}: truncated or damaged safetensors file ({error}); fetch it again") from None
            for name in handle.keys():  # noqa: SIM118 - a safe_open handle is no mapping
                self._home[name] = (path, handle)
        blocks, tensors = self.config.get("num_hidden_layers"), len(self._home)
        if isinstance(blocks, int) and blocks > tensors:  # it may be absurd: nobody should go through them one by one
            self.close()
            raise QtoolError(
                f"{self.folder}: config.json says num_hidden_layers {blocks}, but there are only {tensors} tensors; is "
                "the download complete?"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def names(self) -> list[str]:
        return sorted(self._home)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it. Raises QtoolError where there is none of that name."""
        return tuple(self._find(name)[1].get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """One tensor on the CPU. Raises QtoolError where there is none of that name."""
        with safe_open(self._find(name)[0], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def tensor_bytes(self, name: str) -> int:
        """Bytes of one tensor, which is not read. Raises QtoolError where there is none of that name."""
        return self.tensor(name).nbytes

    def num_bytes(self) -> int:
        """Bytes of the weight files on disk."""
        return sum(p.stat().st_size for p in self.files)

    def _find(self, name: str) -> tuple[Path, Any]:
        try:
            return self._home[name]
        except KeyError:
            raise QtoolError(f"{self.folder}: no tensor named {name!r} in the checkpoint") from None

    def close(self) -> None:
        self._stack.close()
        self._home.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
