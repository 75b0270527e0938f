"""Tensors that are not needed for a while: in memory, or on disk where they would take too much of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from qtool.quant.hidden_states import HiddenStates


@dataclass(frozen=True)
class Spill:
    """Where tensors go past a limit.

    Attributes:
        folder: where files without a name are made; they are gone with what was held, or with the process.
        memory: bytes that each set of tensors held may take in memory; None: any number.
    """

    folder: Path
    memory: int | None = None

    def hold(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The same tensors by name: themselves, or copies read from the disk at each access.

        Raises:
            QtoolError: the folder's disk is full, or cannot be written to.
        """
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        memory = num_bytes if self.memory is None else self.memory
        return _Held(tensors, HiddenStates(tensors.values(), num_bytes, memory=memory, folder=self.folder))


class _Held(Mapping[str, Tensor]):
    def __init__(self, names: Iterable[str], tensors: HiddenStates) -> None:
        self._places = {name: i for i, name in enumerate(names)}
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._places[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
