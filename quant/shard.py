"""Writing a safetensors file tensor by tensor: the library's own writer needs all of a file in memory, twice."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# the format's names; 16-bit floats, the integers of our formats, and what else a model folder may hold
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

_PIECE = 1 << 22  # bytes copied at once


@dataclass(frozen=True)
class _Entry:
    """One tensor: where its bytes lie in the data file, and what the header says of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int


class ShardWriter:
    """One safetensors file at `path`: each tensor's bytes are written when it is added, the header at the end.

    Until then they lie in `path`.data. In the file the largest element types come first, then names in order, so that
    every tensor is aligned: the same tensors give the same bytes, in whatever order they came.

    Raises:
        OSError: the disk is full, or the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data_path = path.with_name(f"{path.name}.data")
        self._data = self._data_path.open("w+b")
        self._entries: dict[str, _Entry] = {}
        self.num_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, from whatever device."""
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        content = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
        self._data.write(content.numpy().data)
        self._entries[name] = _Entry(tensor.dtype, tuple(tensor.shape), self.num_bytes, content.numel())
        self.num_bytes += content.numel()

    def finish(self) -> list[str]:
        """Write the file proper and remove the data file; the names of its tensors in the order of their coming."""
        order = sorted(self._entries, key=lambda n: (-self._entries[n].dtype.itemsize, n))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in order:
            entry = self._entries[name]
            place = [offset, offset + entry.size]
            header[name] = {"dtype": _DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": place}
            offset += entry.size
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        with self.path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                entry = self._entries[name]
                self._data.seek(entry.start)
                for done in range(0, entry.size, _PIECE):
                    file.write(self._data.read(min(_PIECE, entry.size - done)))
        self.close()
        self._data_path.unlink()
        return list(self._entries)

    def close(self) -> None:
        """Let go of the data file; what was written is not a safetensors file unless finish() came before."""
        with suppress(OSError):  # a full disk is told by the write that met it
            self._data.close()
