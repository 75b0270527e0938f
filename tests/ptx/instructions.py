"""Instructions of single threads: name -> what makes of (machine, instruction) a function of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx.memory import Words
from ptx.numbers import halves, joined, rounded, values
from ptx.program import Instruction

if TYPE_CHECKING:
    from ptx.machine import Machine

Run = Callable[[Words], Any]
Make = Callable[["Machine", Instruction], Run]

TYPES: dict[str, Any] = {
    f"{k}{n}": np.dtype(f"{t}{n // 8}") for k, t in (("s", "i"), ("u", "u"), ("b", "u")) for n in (8, 16, 32, 64)
}
TYPES |= {"f32": np.dtype(np.float32), "pred": np.dtype(bool)}


def _kind(instruction: Instruction) -> str:
    return instruction.op.split(".")[-1]


def _apply(machine: Machine, instruction: Instruction, function: Callable[..., Words], *kinds: str) -> Run:
    """function of the operands after the first, as numbers of `kinds`, to the first."""
    write = machine.writer(instruction.operands[0])
    reads = [machine.reader(o, TYPES[k]) for o, k in zip(instruction.operands[1:], kinds, strict=True)]
    if len(reads) == 1:
        one = reads[0]
        return lambda idx: write(idx, function(one(idx)))
    if len(reads) == 2:
        first, second = reads
        return lambda idx: write(idx, function(first(idx), second(idx)))
    return lambda idx: write(idx, function(*(r(idx) for r in reads)))


def _same(function: Callable[..., Words]) -> Make:
    """All operands and the result are of the instruction's type; packed 16-bit numbers by `_packed`."""

    def make(machine: Machine, instruction: Instruction) -> Run:
        kind = _kind(instruction)
        if kind.endswith("x2"):
            return _packed(function)(machine, instruction)
        return _apply(machine, instruction, function, *[kind] * (len(instruction.operands) - 1))

    return make


def _packed(function: Callable[..., Words]) -> Make:
    """Two 16-bit numbers a word: exact in float64, rounded once."""

    def make(machine: Machine, instruction: Instruction) -> Run:
        kind = _kind(instruction).removesuffix("x2")
        assert ".rn." in instruction.op, instruction.text

        def run(*words: Words) -> Words:
            return joined(rounded(function(*(values(halves(w), kind) for w in words)), kind))

        return _apply(machine, instruction, run, *["b32"] * (len(instruction.operands) - 1))

    return make


def _shift(left: bool) -> Make:
    """Counts beyond the width shift everything out, or leave the sign."""

    def make(machine: Machine, instruction: Instruction) -> Run:
        kind = _kind(instruction)
        width = 8 * TYPES[kind].itemsize

        def run(a: Words, n: Words) -> Words:
            n = n.astype(TYPES[kind])
            if left or kind[0] != "s":
                inside = np.minimum(n.view(f"u{width // 8}"), width - 1).astype(TYPES[kind])
                moved = a << inside if left else a >> inside
                return np.where(n.view(f"u{width // 8}") < width, moved, TYPES[kind].type(0))
            return a >> np.minimum(n.view(f"u{width // 8}"), width - 1).astype(TYPES[kind])

        return _apply(machine, instruction, run, kind, "u32")

    return make


def _divide(remainder: bool) -> Make:
    """Towards zero."""

    def make(machine: Machine, instruction: Instruction) -> Run:
        kind = _kind(instruction)

        def run(a: Words, b: Words) -> Words:
            if np.any(b == 0):
                raise ZeroDivisionError(instruction.text)
            a, b = np.broadcast_arrays(a, b)
            quotient = np.abs(a) // np.abs(b)
            quotient = (
                np.where((a < 0) != (b < 0), -quotient, quotient).astype(TYPES[kind]) if kind[0] == "s" else a // b
            )
            return a - quotient * b if remainder else quotient

        if kind == "f32":
            return _apply(machine, instruction, lambda a, b: a / b, kind, kind)
        return _apply(machine, instruction, run, kind, kind)

    return make


def _wide(kind: str) -> tuple[str, Any]:
    return kind, np.dtype(f"{TYPES[kind].kind}{2 * TYPES[kind].itemsize}")


def _multiply(machine: Machine, instruction: Instruction) -> Run:
    kind, way = _kind(instruction), instruction.op.split(".")[1]
    if kind.endswith("x2"):
        return _packed(lambda a, b: a * b)(machine, instruction)
    if kind == "f32" or way == "lo":
        return _apply(machine, instruction, lambda a, b: a * b, kind, kind)
    _, wide = _wide(kind)
    if way == "wide":
        return _apply(machine, instruction, lambda a, b: a.astype(wide) * b.astype(wide), kind, kind)
    assert way == "hi", instruction.text
    bits = 8 * TYPES[kind].itemsize
    return _apply(
        machine,
        instruction,
        lambda a, b: (a.astype(wide) * b.astype(wide) >> wide.type(bits)).astype(TYPES[kind]),
        kind,
        kind,
    )


def _multiply_add(machine: Machine, instruction: Instruction) -> Run:
    kind = _kind(instruction)
    if kind.endswith("x2"):
        return _packed(lambda a, b, c: a * b + c)(machine, instruction)
    if kind == "f32":
        return _apply(
            machine, instruction, lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32), kind, kind, kind
        )
    way = instruction.op.split(".")[1]
    if way == "wide":
        _, wide = _wide(kind)
        write = machine.writer(instruction.operands[0])
        a, b = (machine.reader(o, TYPES[kind]) for o in instruction.operands[1:3])
        c = machine.reader(instruction.operands[3], wide)
        return lambda idx: write(idx, a(idx).astype(wide) * b(idx).astype(wide) + c(idx))
    assert way == "lo", instruction.text
    return _apply(machine, instruction, lambda a, b, c: a * b + c, kind, kind, kind)


def _compare(machine: Machine, instruction: Instruction) -> Run:
    kind, way = _kind(instruction), instruction.op.split(".")[1]
    assert instruction.op.count(".") == 2 or ".ftz" in instruction.op, instruction.text
    unordered = len(way) == 3 and way.endswith("u")
    compare = {
        "eq": np.equal, "ne": np.not_equal,
        "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    }[way[:2]]  # fmt: skip

    def run(a: Words, b: Words) -> Words:
        found = compare(a, b)
        if kind == "f32":
            nan = np.isnan(a) | np.isnan(b)
            return (found | nan) if unordered else (found & ~nan)
        return found

    return _apply(machine, instruction, run, kind, kind)


def _select(machine: Machine, instruction: Instruction) -> Run:
    kind = _kind(instruction)
    return _apply(machine, instruction, lambda a, b, p: np.where(p, a, b), kind, kind, "pred")


def _logic(machine: Machine, instruction: Instruction) -> Run:
    """lop3: bit i of the result is bit (a_i b_i c_i) of the table."""
    table = int(instruction.operands[4], 0)

    def run(a: Words, b: Words, c: Words) -> Words:
        out = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
        for case in range(8):
            if table >> case & 1:
                out |= (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
        return out

    cut = Instruction(instruction.op, instruction.operands[:4])
    return _apply(machine, cut, run, "b32", "b32", "b32")


def _permute(machine: Machine, instruction: Instruction) -> Run:
    """prmt: each byte of the result is one of eight, or its sign eight times."""

    def run(a: Words, b: Words, selectors: Words) -> Words:
        both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        out = np.zeros(np.broadcast_shapes(a.shape, b.shape, selectors.shape), np.uint64)
        for i in range(4):
            which = (selectors >> np.uint32(4 * i)).astype(np.uint64)
            byte = both >> (which & np.uint64(7)) * np.uint64(8) & np.uint64(255)
            signs = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            out |= np.where(which & np.uint64(8), signs, byte) << np.uint64(8 * i)
        return out.astype(np.uint32)

    return _apply(machine, instruction, run, "b32", "b32", "b32")


def _insert(machine: Machine, instruction: Instruction) -> Run:
    """bfi: the lowest bits of a at a place in b."""
    kind = TYPES[_kind(instruction)]

    def run(a: Words, b: Words, place: Words, length: Words) -> Words:
        mask = ((1 << int(length[0])) - 1) << int(place[0])
        moved = (a.astype(np.uint64) << np.uint64(int(place[0]))).astype(kind) & kind.type(
            mask & (1 << 8 * kind.itemsize) - 1
        )
        return moved | b & kind.type(~mask & (1 << 8 * kind.itemsize) - 1)

    assert all(machine.constant(o) is not None for o in instruction.operands[3:]), instruction.text
    name = _kind(instruction)
    return _apply(machine, instruction, run, name, name, "u32", "u32")


def _extract(machine: Machine, instruction: Instruction) -> Run:
    """bfe, unsigned."""
    name = _kind(instruction)
    assert name[0] == "u", instruction.text
    assert all(machine.constant(o) is not None for o in instruction.operands[2:]), instruction.text
    kind = TYPES[name]
    return _apply(
        machine,
        instruction,
        lambda a, place, length: a >> kind.type(int(place[0])) & kind.type((1 << int(length[0])) - 1),
        name,
        "u32",
        "u32",
    )


def _convert(machine: Machine, instruction: Instruction) -> Run:
    *mode, to, of = instruction.op.split(".")[1:]
    write = machine.writer(instruction.operands[0])
    sources = instruction.operands[1:]
    if to.endswith("x2"):  # the second operand is the low half
        high, low = (machine.reader(o, np.float32) for o in sources)
        kind = to.removesuffix("x2")
        return lambda idx: write(
            idx, joined(np.stack(np.broadcast_arrays(rounded(low(idx), kind), rounded(high(idx), kind)), axis=-1))
        )
    if of in ("f16", "bf16"):
        read = machine.reader(sources[0], np.uint16)
        assert to == "f32"
        return lambda idx: write(idx, values(read(idx), of).astype(np.float32))
    if of == "f32":
        read = machine.reader(sources[0], np.float32)
        if to in ("f16", "bf16"):
            return lambda idx: write(idx, rounded(read(idx), to))
        kind = TYPES[to]
        turn = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[
            next(m for m in mode if m.endswith("i"))
        ]
        least, most = np.iinfo(kind).min, np.iinfo(kind).max
        return lambda idx: write(
            idx, np.clip(np.nan_to_num(turn(read(idx).astype(np.float64))), least, most).astype(kind)
        )
    read = machine.reader(sources[0], TYPES[of])
    if "sat" in mode:
        least, most = np.iinfo(TYPES[to]).min, np.iinfo(TYPES[to]).max
        return lambda idx: write(idx, np.clip(read(idx).astype(np.int64), least, most).astype(TYPES[to]))
    return lambda idx: write(idx, read(idx).astype(TYPES[to]))


def _move(machine: Machine, instruction: Instruction) -> Run:
    to, source = instruction.operands
    kind = _kind(instruction)
    if to.startswith("{"):
        writes = [machine.writer(r) for r in machine.vector(to)]
        size = TYPES[kind].itemsize // len(writes)
        read = machine.reader(source, TYPES[kind])

        def unpack(idx: Words) -> None:
            word = np.broadcast_to(read(idx), len(idx))
            parts = np.ascontiguousarray(word).view(f"u{size}").reshape(len(idx), -1)
            for i, write in enumerate(writes):
                write(idx, np.ascontiguousarray(parts[:, i]))

        return unpack
    write = machine.writer(to)
    if source.startswith("{"):
        names = machine.vector(source)
        size = TYPES[kind].itemsize // len(names)
        reads = [machine.reader(r, f"u{size}") for r in names]

        def pack(idx: Words) -> None:
            parts = np.stack([np.broadcast_to(r(idx), len(idx)) for r in reads], axis=-1)
            write(idx, np.ascontiguousarray(parts).view(TYPES[kind])[:, 0])

        return pack
    read = machine.reader(source, TYPES[kind])
    return lambda idx: write(idx, read(idx))


def _address(machine: Machine, instruction: Instruction) -> Run:
    """cvta: spaces share one range of addresses here (shared memory is read by its own)."""
    assert "shared" not in instruction.op, instruction.text
    return _apply(machine, instruction, lambda a: a, "u64")


def _float(function: Callable[[Words], Words]) -> Make:
    def make(machine: Machine, instruction: Instruction) -> Run:
        assert _kind(instruction) == "f32", instruction.text
        return _apply(machine, instruction, lambda a: function(a.astype(np.float64)).astype(np.float32), "f32")

    return make


def _extreme(integers: Any, floats: Any) -> Make:
    def make(machine: Machine, instruction: Instruction) -> Run:
        kind = _kind(instruction)
        if kind.endswith("x2"):
            return _packed(floats)(machine, instruction)
        return _apply(
            machine, instruction, floats if kind == "f32" else integers, *[kind] * (len(instruction.operands) - 1)
        )

    return make


OPERATIONS: dict[str, Make] = {
    "add": _same(lambda a, b: a + b),
    "sub": _same(lambda a, b: a - b),
    "mul": _multiply,
    "mad": _multiply_add,
    "fma": _multiply_add,
    "div": _divide(False),
    "rem": _divide(True),
    "neg": _same(lambda a: -a),
    "abs": _same(np.abs),
    "min": _extreme(np.minimum, np.fmin),
    "max": _extreme(np.maximum, np.fmax),
    "and": _same(lambda a, b: a & b),
    "or": _same(lambda a, b: a | b),
    "xor": _same(lambda a, b: a ^ b),
    "not": _same(lambda a: ~a),
    "shl": _shift(True),
    "shr": _shift(False),
    "lop3": _logic,
    "prmt": _permute,
    "bfi": _insert,
    "bfe": _extract,
    "setp": _compare,
    "selp": _select,
    "cvt": _convert,
    "cvta": _address,
    "mov": _move,
    "ex2": _float(np.exp2),
    "lg2": _float(np.log2),
    "rcp": _float(lambda a: 1 / a),
    "sqrt": _float(np.sqrt),
    "rsqrt": _float(lambda a: 1 / np.sqrt(a)),
    "tanh": _float(np.tanh),
}
