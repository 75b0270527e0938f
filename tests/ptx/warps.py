"""Instructions that the lanes of a warp run together: name -> a function of whole warps' threads."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx import matrices
from ptx.instructions import Make, Run
from ptx.memory import Words, check_alignment
from ptx.program import WARP, Instruction

if TYPE_CHECKING:
    from ptx.machine import Machine


def _lanes(machine: Machine, text: str, kind: Any = np.uint32) -> Run:
    """The operand of whole warps: [W, 32]."""
    read = machine.reader(text, kind)
    return lambda idx: np.ascontiguousarray(np.broadcast_to(read(idx), len(idx))).reshape(-1, WARP)


def _nothing(machine: Machine, instruction: Instruction) -> Run:
    return lambda idx: None


def _meet(machine: Machine, instruction: Instruction) -> Run:
    def meet(idx: Words) -> None:
        for at in range(0, len(idx), WARP):
            machine.follow(idx[at : at + WARP], machine.have_waited(idx[at : at + WARP]))

    return meet


def _shuffle(machine: Machine, instruction: Instruction) -> Run:
    *results, value, by, bounds, _ = instruction.operands
    writes = [machine.writer(r) for r in results]
    words, other, limit = _lanes(machine, value), _lanes(machine, by), _lanes(machine, bounds)
    way = instruction.op.split(".")[2]
    assert way in ("bfly", "idx"), instruction.text

    def run(idx: Words) -> None:
        assert np.all(limit(idx) == WARP - 1), "shuffles within parts of a warp"
        source = other(idx) % WARP if way == "idx" else np.arange(WARP) ^ other(idx) % WARP
        found = np.take_along_axis(words(idx), source.astype(np.int64), axis=1).reshape(-1)
        for write, result in zip(writes, (found, np.ones(len(idx), bool))):
            write(idx, result)

    return run


def _vote(machine: Machine, instruction: Instruction) -> Run:
    assert instruction.op == "vote.sync.any.pred", instruction.text
    write, value = machine.writer(instruction.operands[0]), _lanes(machine, instruction.operands[1], bool)
    return lambda idx: write(idx, np.repeat(value(idx).any(axis=1), WARP))


def _reduce(machine: Machine, instruction: Instruction) -> Run:
    assert instruction.op == "redux.sync.max.u32", instruction.text
    write, value = machine.writer(instruction.operands[0]), _lanes(machine, instruction.operands[1])
    return lambda idx: write(idx, np.repeat(value(idx).max(axis=1), WARP))


def _multiply(machine: Machine, instruction: Instruction) -> Run:
    """mma.sync: d = a b + c."""
    found = re.fullmatch(r"mma\.sync\.aligned\.m16n8k\d+\.row\.col\.(f32|s32)\.(\w+)\.\2\.\1", instruction.op)
    assert found, instruction.text
    exact, kind = found[1] == "s32", found[2]
    to, *sources = map(machine.vector, instruction.operands)
    writes = [machine.writer(r) for r in to]
    reads = [[_lanes(machine, r) for r in group] for group in sources]

    def run(idx: Words) -> None:
        left, right, start = ([r(idx) for r in group] for group in reads)
        product = matrices.left(left, kind), matrices.right(right, kind)
        total = matrices.add_product(matrices.sums(start, exact), *product)
        for write, value in zip(writes, matrices.registers_of(total)):
            write(idx, value.reshape(-1))

    return run


def _load_matrices(machine: Machine, instruction: Instruction) -> Run:
    found = re.fullmatch(r"ldmatrix\.sync\.aligned\.m8n8\.x4(\.trans)?\.shared\.b16", instruction.op)
    assert found, instruction.text
    writes = [machine.writer(r) for r in machine.vector(instruction.operands[0])]
    at = machine.address(instruction.operands[1])

    def run(idx: Words) -> None:
        addresses, block = at(idx), machine.block[idx]
        check_alignment(addresses, 16)
        words = [machine.shared.load(block, addresses + np.uint64(4 * i), 4) for i in range(4)]
        rows = np.stack(words, axis=-1).reshape(-1, 4, WARP)  # lane 8 m + i named row i of matrix m
        for m, write in enumerate(writes):
            write(idx, (matrices.transposed(rows[:, m]) if found[1] else rows[:, m]).reshape(-1))

    return run


def _store_matrices(machine: Machine, instruction: Instruction) -> Run:
    found = re.fullmatch(r"stmatrix\.sync\.aligned\.m8n8\.x[24](\.trans)?\.shared\.b16", instruction.op)
    assert found, instruction.text
    to = machine.address(instruction.operands[0])
    reads = [_lanes(machine, r) for r in machine.vector(instruction.operands[1])]

    def run(idx: Words) -> None:
        naming = idx[idx % WARP < 8 * len(reads)]  # lane 8 m + i names row i of matrix m
        addresses, block = to(naming), machine.block[naming]
        check_alignment(addresses, 16)
        rows = [matrices.transposed(r(idx)) if found[1] else r(idx) for r in reads]
        words = np.stack(rows, axis=1).reshape(-1, 4)  # of every row of every matrix
        for i in range(4):
            machine.shared.store(block, addresses + np.uint64(4 * i), words[:, i])

    return run


def _transpose(machine: Machine, instruction: Instruction) -> Run:
    assert instruction.op == "movmatrix.sync.aligned.m8n8.trans.b16", instruction.text
    write, value = machine.writer(instruction.operands[0]), _lanes(machine, instruction.operands[1])
    return lambda idx: write(idx, matrices.transposed(value(idx)).reshape(-1))


def _warpgroup(machine: Machine, instruction: Instruction) -> Run:
    """wgmma: each warp's 16 rows for themselves."""
    way = instruction.op.split(".")[1]
    makes = {"fence": _nothing, "commit_group": _commit, "wait_group": _wait, "mma_async": _multiply_later}
    return makes[way](machine, instruction)


def _commit(machine: Machine, instruction: Instruction) -> Run:
    return lambda idx: [machine.products[int(w)].append([]) for w in idx[::WARP] // WARP]


def _wait(machine: Machine, instruction: Instruction) -> Run:
    allowed = int(instruction.operands[0])

    def wait(idx: Words) -> None:
        for warp in idx[::WARP] // WARP:
            groups = machine.products[int(warp)]
            while len(groups) > allowed + 1:  # the last one is not committed
                for product in groups.pop(0):
                    product()

    return wait


def _multiply_later(machine: Machine, instruction: Instruction) -> Run:
    """Operands are read now, those in shared memory may not change before the wait; sums are read and written then."""
    shape = r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k\d+\.(f32|s32)\.(\w+)\.\3"
    found = re.fullmatch(shape, instruction.op)
    assert found, instruction.text
    columns, exact, kind = int(found[1]), found[2] == "s32", found[3]
    sums = [machine.register(r) for r in machine.vector(instruction.operands[0])]
    left = [_lanes(machine, r) for r in machine.vector(instruction.operands[1])]
    assert len(left) == 4, "the left operand in registers"
    descriptor, adds = machine.reader(instruction.operands[2], np.uint64), machine.reader(instruction.operands[3], bool)
    assert exact or instruction.operands[4:6] == ("1", "1"), instruction.text
    turned = not exact and instruction.operands[6] == "1"

    def run(idx: Words) -> None:
        parts = matrices.left([r(idx) for r in left], kind)
        named, more = np.broadcast_to(descriptor(idx), len(idx)), np.broadcast_to(adds(idx), len(idx))
        for i, first in enumerate(int(t) for t in idx[::WARP]):
            at, block = matrices.places(int(named[i * WARP]), columns, kind, turned), int(machine.block[first])
            b, add = matrices.stored(machine.shared, block, at, kind), bool(more[i * WARP])
            machine.shared.use(block, at, 1)

            def product(
                first: int = first,
                a: Words = parts[i],
                b: Words = b,
                at: Words = at,
                block: int = block,
                add: bool = add,
            ) -> None:
                machine.shared.use(block, at, -1)
                lanes = slice(first, first + WARP)
                c = matrices.sums([r[None, lanes] for r in sums], exact)
                total = matrices.add_product(c if add else np.zeros_like(c), a, b)
                for register, value in zip(sums, matrices.registers_of(total)):
                    register[lanes] = value[0]

            machine.products[first // WARP][-1].append(product)

    return run


TOGETHER: dict[str, Make] = {
    "bar": _meet,  # bar.warp.sync
    "shfl": _shuffle,
    "vote": _vote,
    "redux": _reduce,
    "mma": _multiply,
    "ldmatrix": _load_matrices,
    "stmatrix": _store_matrices,
    "movmatrix": _transpose,
    "wgmma": _warpgroup,
    "setmaxnreg": _nothing,
}
