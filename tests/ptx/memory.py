"""Memory of an emulated device: every access is checked for its bounds and its alignment."""

from __future__ import annotations

import bisect
import ctypes
from typing import Any

import numpy as np

Words = np.ndarray[Any, Any]


class FaultError(RuntimeError):
    """What a device would stop for, or would do in a way that nobody can rely on."""


def check_alignment(addresses: Words, size: int) -> None:
    wrong = addresses % np.uint64(size) != 0
    if wrong.any():
        raise FaultError(f"an access of {size} bytes at {int(addresses[wrong][0]):#x}")


class Region:
    """Bytes that may be accessed, as words of every size."""

    def __init__(self, begin: int, data: Words) -> None:
        self.begin, self.end = begin, begin + data.nbytes
        self.stored = np.zeros(data.nbytes, bool)  # which bytes this kernel has stored
        self._views = {n: data[: data.nbytes // n * n].view(f"u{n}") for n in (1, 2, 4, 8)}

    def words(self, size: int) -> Words:
        return self._views[size]


class GlobalMemory:
    """The host's own memory, of which a kernel sees what was added."""

    def __init__(self) -> None:
        self._regions: dict[int, Region] = {}
        self._begins: list[int] = []

    def add(self, begin: int, size: int) -> None:
        if size == 0 or (begin in self._regions and self._regions[begin].end >= begin + size):
            return
        data = np.frombuffer((ctypes.c_uint8 * size).from_address(begin), np.uint8)
        self._regions[begin] = Region(begin, data)
        self._begins = sorted(self._regions)

    def _region(self, address: int) -> Region:
        at = bisect.bisect_right(self._begins, address) - 1
        # a tensor may begin within another: the last that holds the address counts
        while at >= 0 and self._regions[self._begins[at]].end <= address:
            at -= 1
        if at < 0:
            raise FaultError(f"no memory at {address:#x}")
        return self._regions[self._begins[at]]

    def stored(self) -> list[tuple[int, Words]]:
        """(where it begins, which bytes were stored) for each region in which any was."""
        return [(begin, region.stored) for begin, region in self._regions.items() if region.stored.any()]

    def _parts(self, addresses: Words, size: int) -> list[tuple[Any, Region, Words]]:
        """(which addresses, their region, words before them there) for each region."""
        check_alignment(addresses, size)
        parts: list[tuple[Any, Region, Words]] = []
        left = np.arange(len(addresses))
        while len(left):
            region = self._region(int(addresses[left[0]]))
            inside = (addresses[left] >= region.begin) & (addresses[left] + size <= region.end)
            if not inside[0]:
                raise FaultError(f"{size} bytes at {int(addresses[left[0]]):#x}: beyond the end of a tensor")
            if region.begin % size:
                raise FaultError(f"a tensor at {region.begin:#x} is read by {size} bytes")
            at = left[inside]
            parts.append((at, region, ((addresses[at] - region.begin) // size).astype(np.int64)))
            left = left[~inside]
        return parts

    def load(self, addresses: Words, size: int) -> Words:
        """Words of `size` bytes at addresses [n] (uint64)."""
        out = np.empty(len(addresses), f"u{size}")
        for which, region, places in self._parts(addresses, size):
            out[which] = region.words(size)[places]
        return out

    def store(self, addresses: Words, values: Words) -> None:
        size = values.dtype.itemsize
        for which, region, places in self._parts(addresses, size):
            region.words(size)[places] = values[which]
            region.stored[places[:, None] * size + np.arange(size)] = True

    def bytes_at(self, begin: int, size: int) -> Words:
        """`size` bytes from `begin` on."""
        region = self._region(begin)
        if begin + size > region.end:
            raise FaultError(f"{size} bytes at {begin:#x}: beyond the end of a tensor")
        return region.words(1)[begin - region.begin : begin - region.begin + size]


class SharedMemory:
    """That of every block: [blocks, size]. It begins as NaN in every type, and as addresses beyond its end.

    From the moment that a copy to it is asked for until it lands nobody may read what it brings; and while products of
    a warpgroup read it nobody may write it.
    """

    def __init__(self, blocks: int, size: int) -> None:
        self.size = size
        data = np.full((blocks, -(-size // 16) * 16), 0xFF, np.uint8)
        self.bytes = data
        self._coming, self._used = np.zeros(data.shape, np.uint8), np.zeros(data.shape, np.uint16)
        self._views = {n: data.view(f"u{n}") for n in (1, 2, 4, 8)}

    def _check(self, addresses: Words, size: int) -> None:
        wrong = (addresses % size != 0) | (addresses < 0) | (addresses + size > self.size)
        if wrong.any():
            raise FaultError(f"{size} bytes at {int(addresses[wrong][0])} of {self.size} bytes of shared memory")

    def load(self, blocks: Words, addresses: Words, size: int) -> Words:
        addresses = addresses.astype(np.int64)
        self._check(addresses, size)
        if self._coming[blocks, addresses].any():
            raise FaultError("shared memory is read while a copy to it is under way")
        return self._views[size][blocks, addresses // size]

    def store(self, blocks: Words, addresses: Words, values: Words) -> None:
        addresses, size = addresses.astype(np.int64), values.dtype.itemsize
        self._check(addresses, size)
        if self._used[blocks, addresses].any():
            raise FaultError("shared memory is written while products read it")
        self._views[size][blocks, addresses // size] = values

    def expect(self, block: int, begin: int, size: int) -> None:
        """A copy to these bytes is under way."""
        if begin + size > self.size:
            raise FaultError(f"a copy of {size} bytes to {begin} of {self.size} bytes of shared memory")
        if self._used[block, begin : begin + size].any():
            raise FaultError("a copy to shared memory that products read")
        self._coming[block, begin : begin + size] += 1

    def land(self, block: int, begin: int, data: Words, swizzle: bool) -> None:
        """That copy has come."""
        self._coming[block, begin : begin + data.size] -= 1
        at = begin + np.arange(0, data.size, 16)
        if swizzle:
            at = at ^ (at >> 7 & 7) << 4
        self.bytes[block, at[:, None] + np.arange(16)] = data.reshape(-1, 16)

    def use(self, block: int, addresses: Words, count: int) -> None:
        """`count` 1: products read these bytes from now on; -1: no longer."""
        self._used[block, addresses] += np.uint16(count & 0xFFFF)
