"""Hopper's copies to shared memory and the barriers there that they signal (mbarrier, cp.async.bulk)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ptx.instructions import Make, Run
from ptx.memory import FaultError, GlobalMemory, Words
from ptx.program import PARAMETERS_AT, Instruction

if TYPE_CHECKING:
    from ptx.machine import Machine

_MATRIX_BYTES = 128  # of a description
_MARK = np.uint64(0x5AFEBA221E55ED00)  # where a barrier lies


@dataclass
class Barrier:
    """One in shared memory: a phase ends with its last arrival and the last byte that it expects."""

    count: int
    pending: int
    bytes: int = 0
    phases: int = 0  # that have ended
    waiting: list[Words] = field(default_factory=list)  # threads
    waited: bool = False  # one that arrived, for the kernels before this one

    def arrive(self, expected: int, waited: bool) -> list[Words]:
        """→ the threads that need wait no longer"""
        self.waited |= waited
        self.bytes += expected
        self.pending -= 1
        if self.pending < 0:
            raise FaultError("more arrived at a barrier than it counts")
        return self._settle()

    def receive(self, size: int) -> list[Words]:
        """→ the threads that need wait no longer"""
        self.bytes -= size
        return self._settle()

    def _settle(self) -> list[Words]:
        if self.pending or self.bytes:
            return []
        self.phases += 1
        self.pending = self.count
        woken, self.waiting = self.waiting, []
        return woken


@dataclass(frozen=True)
class Matrix:
    """What a description for the tensor copy engine says; 128 bytes, as the emulated driver writes them."""

    address: int
    rows: int
    columns: int
    box_rows: int
    box_columns: int
    bytes_each: int
    swizzle: bool

    @property
    def size(self) -> int:
        """In bytes."""
        return self.rows * self.columns * self.bytes_each

    @property
    def box_size(self) -> int:
        """In bytes."""
        return self.box_rows * self.box_columns * self.bytes_each

    def written(self) -> bytes:
        sizes = self.rows, self.columns, self.box_rows, self.box_columns, self.bytes_each
        return np.array((self.address, *sizes, self.swizzle), np.uint64).tobytes().ljust(_MATRIX_BYTES, b"\0")

    @staticmethod
    def read(text: bytes) -> Matrix:
        numbers = [int(n) for n in np.frombuffer(text, np.uint64)[:7]]
        if not numbers[0]:
            raise FaultError("a copy by no description")
        return Matrix(*numbers[:6], bool(numbers[6]))

    @staticmethod
    def read_all(text: bytes) -> list[Matrix]:
        """Of descriptions one after another, of which some may be empty."""
        parts = [text[at : at + _MATRIX_BYTES] for at in range(0, len(text), _MATRIX_BYTES)]
        return [Matrix.read(part) for part in parts if any(part)]

    def box(self, memory: GlobalMemory, row: int, column: int) -> Words:
        """The box that begins there: bytes, zeros beyond the matrix."""
        matrix = memory.bytes_at(self.address, self.size).reshape(self.rows, self.columns, self.bytes_each)
        rows, columns = row + np.arange(self.box_rows), column + np.arange(self.box_columns)
        inside = ((rows >= 0) & (rows < self.rows))[:, None] & ((columns >= 0) & (columns < self.columns))
        found = matrix[rows.clip(0, self.rows - 1)[:, None], columns.clip(0, self.columns - 1)]
        return np.where(inside[..., None], found, np.uint8(0)).reshape(-1)


def _init(machine: Machine, instruction: Instruction) -> Run:
    at, count = machine.address(instruction.operands[0]), machine.reader(instruction.operands[1], np.uint32)

    def init(idx: Words) -> None:
        machine.shared.store(machine.block[idx], at(idx), np.full(len(idx), _MARK))
        for i, address, n in zip(idx, at(idx), np.broadcast_to(count(idx), len(idx))):
            machine.barriers[int(machine.block[i]), int(address)] = Barrier(int(n), int(n))

    return init


def _arrive(machine: Machine, instruction: Instruction) -> Run:
    at = machine.address(instruction.operands[1])
    size = machine.reader(instruction.operands[2] if ".expect_tx" in instruction.op else "0", np.uint32)

    def arrive(idx: Words) -> None:
        for i, address, n in zip(idx, at(idx), np.broadcast_to(size(idx), len(idx))):
            machine.wake(_barrier(machine, machine.block[i], address).arrive(int(n), machine.have_waited(i)))

    return arrive


def _wait(machine: Machine, instruction: Instruction) -> Run:
    """Moves the threads whose phase has ended; the others once too, in vain, and then once it has."""
    write, at = machine.writer(instruction.operands[0]), machine.address(instruction.operands[1])
    parity = machine.reader(instruction.operands[2], np.uint32)
    tried = np.zeros(machine.count, bool)

    def wait(idx: Words) -> bool:
        wanted, blocks = np.broadcast_to(parity(idx), len(idx)), machine.block[idx].astype(np.uint64)
        kinds, which = np.unique(np.stack((blocks, at(idx), wanted)), axis=1, return_inverse=True)
        moved = False
        for kind, (_, address, phase) in enumerate(kinds.T):
            mine = idx[which.reshape(-1) == kind]
            barrier = _barrier(machine, machine.block[mine[0]], address)
            if phase > 1:
                raise FaultError(f"a wait for a phase of parity {phase}")
            ended = barrier.phases % 2 != phase
            if ended:
                machine.follow(mine, barrier.waited)
            else:
                again = mine[tried[mine]]
                barrier.waiting.append(again)
                machine.sleep(again)
                mine = mine[~tried[mine]]
            tried[mine] = not ended
            write(mine, np.full(len(mine), ended))
            machine.go_on(mine)
            moved |= len(mine) > 0
        return moved

    return wait


def _barrier(machine: Machine, block: int, address: int) -> Barrier:
    found = machine.barriers.get((int(block), int(address)))
    if found is None:
        raise FaultError(f"no barrier at {int(address)} of shared memory")
    if machine.shared.load(np.array([block]), np.array([address]), 8)[0] != _MARK:
        raise FaultError(f"the barrier at {int(address)} of shared memory was overwritten")
    return found


def make_barrier(machine: Machine, instruction: Instruction) -> Run:
    way = instruction.op.split(".")[1]
    return {"init": _init, "arrive": _arrive, "try_wait": _wait}[way](machine, instruction)


def _send(
    machine: Machine, thread: int, to: int, read: Callable[[], Words], size: int, barrier: int, swizzle: bool
) -> None:
    """A copy of `size` bytes by `thread`, which lands when the machine says so."""
    if to % 128:
        raise FaultError(f"a copy to {to} of shared memory, which is no multiple of 128")
    block = machine.block[thread]
    machine.shared.expect(block, to, size)

    def land() -> None:
        machine.shared.land(block, to, read(), swizzle)
        machine.wake(_barrier(machine, block, barrier).receive(size))

    machine.copies.append(land)


def send(machine: Machine, block: int, barrier: int, to: Words, data: Words) -> None:
    """16 bytes each to addresses `to` of a block's shared memory, data [n, 16]; they land when the machine says so."""
    _barrier(machine, block, barrier)
    for address in to:
        machine.shared.expect(block, int(address), 16)

    def land() -> None:
        for address, part in zip(to, data):
            machine.shared.land(block, int(address), part, False)
        machine.wake(_barrier(machine, block, barrier).receive(data.size))

    machine.copies.append(land)


def _tensor(machine: Machine, instruction: Instruction) -> Run:
    source, place = instruction.operands[1].strip("[]").split(",", 1)
    to, what, by = (machine.address(a) for a in (instruction.operands[0], source, instruction.operands[2]))
    column, row = (machine.reader(r, np.int32) for r in machine.vector(place.strip()))

    def copy(idx: Words) -> None:
        places = np.broadcast_to(row(idx), len(idx)), np.broadcast_to(column(idx), len(idx))
        for i, address, which, r, c, barrier in zip(idx, to(idx), what(idx), *places, by(idx)):
            begin = int(which) - PARAMETERS_AT
            matrix = Matrix.read(machine.arguments[begin : begin + _MATRIX_BYTES])
            machine.check_read(np.array([i]), np.array([matrix.address], np.uint64), matrix.size)

            def read(matrix: Matrix = matrix, r: int = int(r), c: int = int(c)) -> Words:
                return matrix.box(machine.memory, r, c)

            _send(machine, i, int(address), read, matrix.box_size, int(barrier), matrix.swizzle)

    return copy


def _bulk(machine: Machine, instruction: Instruction) -> Run:
    to, what, by = (machine.address(instruction.operands[i]) for i in (0, 1, 3))
    size = machine.reader(instruction.operands[2], np.uint32)

    def copy(idx: Words) -> None:
        sizes = np.broadcast_to(size(idx), len(idx))
        for i, address, source, n, barrier in zip(idx, to(idx), what(idx), sizes, by(idx)):
            if source % 16 or n % 16:
                raise FaultError(f"a copy of {n} bytes from {int(source):#x}: not by 16 bytes")
            machine.check_read(np.array([i]), np.array([source], np.uint64), int(n))

            def read(source: int = int(source), n: int = int(n)) -> Words:
                return machine.memory.bytes_at(source, n)

            _send(machine, i, int(address), read, int(n), int(barrier), False)

    return copy


_ROUTE = "shared::cluster.global.mbarrier::complete_tx::bytes"


def _copy(machine: Machine, instruction: Instruction) -> Run:
    make = {f"cp.async.bulk.tensor.2d.{_ROUTE}": _tensor, f"cp.async.bulk.{_ROUTE}": _bulk}[instruction.op]
    return make(machine, instruction)


COPIES: dict[str, Make] = {"cp": _copy}
