"""Hidden states of all calibration samples: in memory, or on disk where they would take too much of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from qtool.quant.errors import QtoolError


class HiddenStates(Sequence[Tensor]):
    """Batches [b, seq, hidden] of one dtype and device, to be read and replaced one at a time.

    Past `memory` bytes in all they lie in a file without a name, which the system removes when this object goes or the
    process ends, in whatever way. What is read from there is a copy: a batch once read does not change.

    Args:
        batches: the first contents; taken one at a time, so that they need never be in memory together.
        num_bytes: of all batches together.
        memory: how many bytes may stay in memory.
        folder: where the file is made.

    Raises:
        QtoolError: the folder's disk is full, or cannot be written to.
    """

    def __init__(self, batches: Iterable[Tensor], num_bytes: int, *, memory: int, folder: Path) -> None:
        self._folder = folder
        self._kept: list[Tensor] = []
        # offset in the file, and what is there
        self._places: list[tuple[int, torch.Size, torch.dtype, torch.device]] = []
        self._file = None
        if num_bytes <= memory:
            self._kept = list(batches)
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - lives as long as this object
        except OSError as error:
            raise self._disk_error(error) from None
        offset = 0
        for batch in batches:
            self._places.append((offset, batch.shape, batch.dtype, batch.device))
            self._write(offset, batch)
            offset += batch.numel() * batch.element_size()

    @property
    def on_disk(self) -> bool:
        return self._file is not None

    def __len__(self) -> int:
        return len(self._kept) + len(self._places)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        if self._file is None:
            return self._kept[index]
        offset, shape, dtype, device = self._places[index]
        batch = torch.empty(shape, dtype=dtype)
        self._file.seek(offset)
        self._file.readinto(_memory(batch))
        return batch.to(device)

    def __setitem__(self, index: int, batch: Tensor) -> None:
        """Replace a batch by one of the same shape and dtype."""
        if self._file is None:
            self._kept[index] = batch
        else:
            self._write(self._places[index][0], batch)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def copy(self) -> HiddenStates:
        """The same batches, held apart: replacing one here leaves the other."""
        memory, num_bytes = (0, 1) if self.on_disk else (1, 0)
        return HiddenStates(self, num_bytes, memory=memory, folder=self._folder)

    def _write(self, offset: int, batch: Tensor) -> None:
        assert self._file is not None
        try:
            self._file.seek(offset)
            self._file.write(_memory(batch.detach().cpu().contiguous()))
            self._file.flush()
        except OSError as error:
            raise self._disk_error(error) from None

    def _disk_error(self, error: OSError) -> QtoolError:
        return QtoolError(
            f"{self._folder}: the activations of the calibration samples do not fit there "
            f"({error.strerror or error}); free space, or allow more of them in memory (--activation-memory)"
        )


def draw(batches: Sequence[Tensor], samples: Tensor) -> Tensor:
    """[n, seq, hidden]: the given samples ([n] int64), counted through `batches`, all of one size but the last."""
    rows = len(batches[0])
    return torch.stack([batches[i // rows][i % rows] for i in samples.tolist()])


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data
