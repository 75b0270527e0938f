"""Loads and stores: name -> what makes of (machine, instruction) a function of the threads that run it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx.copies import send
from ptx.instructions import Make, Run
from ptx.memory import Words, check_alignment
from ptx.program import PARAMETERS_AT, Instruction

if TYPE_CHECKING:
    from ptx.machine import Machine

_SPACES = ("global", "shared", "param", "shared::cluster", "shared::cta")
BLOCK_BITS = 24  # of an address of another block's shared memory: above them, one more than its rank


def _parts(instruction: Instruction) -> tuple[str, int, np.dtype[Any]]:
    """(space, how many numbers a thread, their type)."""
    parts = instruction.op.split(".")
    size = int(re.sub(r"\D", "", parts[-1])) // 8
    number = np.dtype({"s": "i", "f": "f"}.get(parts[-1][0], "u") + str(size))
    many = next((int(p[1:]) for p in parts if re.fullmatch(r"v\d", p)), 1)
    return next(p for p in parts if p in _SPACES), many, number


def _load(machine: Machine, instruction: Instruction) -> Run:
    space, many, number = _parts(instruction)
    writes = [machine.writer(r) for r in machine.vector(instruction.operands[0])]
    at, size = machine.address(instruction.operands[1]), number.itemsize

    def load(idx: Words) -> None:
        addresses = at(idx)
        check_alignment(addresses, many * size)
        for i, write in enumerate(writes):
            write(idx, _read(machine, space, idx, addresses + np.uint64(i * size), size).view(number))

    return load


def _read(machine: Machine, space: str, idx: Words, addresses: Words, size: int) -> Words:
    if space == "global":
        machine.check_read(idx, addresses, size)
        return machine.memory.load(addresses, size)
    if space == "param":
        places = (addresses - np.uint64(PARAMETERS_AT)).astype(np.int64)
        words = np.frombuffer(machine.arguments, np.uint8)
        return np.ascontiguousarray(words[places[:, None] + np.arange(size)]).view(f"u{size}")[:, 0]
    if space == "shared::cluster":
        blocks, addresses = _in_cluster(machine, idx, addresses)
        return machine.shared.load(blocks, addresses, size)
    return machine.shared.load(machine.block[idx], addresses, size)


def _in_cluster(machine: Machine, idx: Words, addresses: Words) -> tuple[Words, Words]:
    """(block, address in its shared memory) of what mapa gave threads idx."""
    clusters = machine.cluster_of[machine.block[idx]]
    ranks = (addresses >> np.uint64(BLOCK_BITS)).astype(np.int64) - 1
    blocks = np.array([machine.block_by_rank[int(c), int(r)] for c, r in zip(clusters, ranks)])
    for block in np.unique(blocks):
        machine.check_alive(int(block))
    return blocks, addresses & np.uint64((1 << BLOCK_BITS) - 1)


def _store(machine: Machine, instruction: Instruction) -> Run:
    if instruction.op.startswith("st.async."):
        return _store_later(machine, instruction)
    space, many, number = _parts(instruction)
    reads = [machine.reader(r, number) for r in machine.vector(instruction.operands[1])]
    to, size = machine.address(instruction.operands[0]), number.itemsize

    def store(idx: Words) -> None:
        addresses = to(idx)
        check_alignment(addresses, many * size)
        for i, read in enumerate(reads):
            values = np.broadcast_to(read(idx), len(idx)).view(f"u{size}")
            if space == "global":
                machine.check_store(idx)
                machine.memory.store(addresses + np.uint64(i * size), values)
            else:
                machine.shared.store(machine.block[idx], addresses + np.uint64(i * size), values)

    return store


def _store_later(machine: Machine, instruction: Instruction) -> Run:
    """st.async: into another block's shared memory, where a barrier counts the bytes."""
    assert instruction.op == "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32", instruction.text
    reads = [machine.reader(r, np.uint32) for r in machine.vector(instruction.operands[1])]
    to, by = machine.address(instruction.operands[0]), machine.address(instruction.operands[2])

    def store(idx: Words) -> None:
        blocks, addresses = _in_cluster(machine, idx, to(idx))
        others, barriers = _in_cluster(machine, idx, by(idx))
        assert np.array_equal(blocks, others), instruction.text
        check_alignment(addresses, 16)
        values = np.stack([np.broadcast_to(read(idx), len(idx)) for read in reads], axis=1).view(np.uint8)
        for one in np.unique(np.stack((blocks, barriers.astype(np.int64))), axis=1).T:
            here = (blocks == one[0]) & (barriers == np.uint64(one[1]))
            send(machine, int(one[0]), int(one[1]), addresses[here], values[here])

    return store


def _atomic(machine: Machine, instruction: Instruction) -> Run:
    assert instruction.op.startswith("atom.global.add."), instruction.text
    _, _, number = _parts(instruction)
    write, at = machine.writer(instruction.operands[0]), machine.address(instruction.operands[1])
    read = machine.reader(instruction.operands[2], number)

    def run(idx: Words) -> None:
        machine.check_store(idx)
        addresses, values = at(idx), np.broadcast_to(read(idx), len(idx))
        for i in range(len(idx)):
            one = addresses[i : i + 1]
            old = machine.memory.load(one, number.itemsize).view(number)
            write(idx[i : i + 1], old)
            machine.memory.store(one, (old + values[i]).view(f"u{number.itemsize}"))

    return run


def _remote(machine: Machine, instruction: Instruction) -> Run:
    """mapa: an address of another block's shared memory, which only shared::cluster takes."""
    assert instruction.op == "mapa.shared::cluster.u32", instruction.text
    write = machine.writer(instruction.operands[0])
    at, rank = (machine.reader(o, np.uint32) for o in instruction.operands[1:])
    return lambda idx: write(idx, at(idx) | (rank(idx) + np.uint32(1)) << np.uint32(BLOCK_BITS))


ACCESSES: dict[str, Make] = {"ld": _load, "st": _store, "atom": _atomic, "mapa": _remote}
