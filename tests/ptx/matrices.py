"""Matrix instructions of whole warps. Registers of W warps are uint32 [W, 32]; matrices [W, rows, columns].

A lane 4 g + t holds of a product's rows g and g + 8 the columns 2 t and 2 t + 1 (of bytes: 4 t to 4 t + 3).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ptx.memory import SharedMemory, Words
from ptx.numbers import halves, joined, values


def numbers(words: Words, kind: str) -> Words:
    """uint32 [...] as numbers of `kind` (f16, bf16, s8): [..., 2 or 4], float64 or int64."""
    if kind == "s8":
        return np.ascontiguousarray(words).view(np.int8).reshape(*words.shape, 4).astype(np.int64)
    return values(halves(words), kind)


def left(registers: Sequence[Words], kind: str) -> Words:
    """The A operand: [W, 16, 16], of bytes [W, 16, 32]."""
    a = np.stack([numbers(r, kind) for r in registers], axis=1)  # [W, register, lane, e]
    warps, _, _, e = a.shape
    a = a.reshape(warps, 2, 2, 8, 4, e)  # [W, columns' half, rows' half, g, t, e]
    return a.transpose(0, 2, 3, 1, 4, 5).reshape(warps, 16, 8 * e)


def right(registers: Sequence[Words], kind: str) -> Words:
    """The B operand: [W, 16, 8], of bytes [W, 32, 8]."""
    b = np.stack([numbers(r, kind) for r in registers], axis=1)
    warps, _, _, e = b.shape
    b = b.reshape(warps, 2, 8, 4, e)  # [W, half, g, t, e]
    return b.transpose(0, 1, 3, 4, 2).reshape(warps, 8 * e, 8)


def sums(registers: Sequence[Words], exact: bool) -> Words:
    """The accumulators: [W, 16, 2 n] of n registers."""
    c = np.stack([r.view(np.int32 if exact else np.float32) for r in registers], axis=1)
    warps, n, _ = c.shape
    c = c.reshape(warps, n // 4, 2, 2, 8, 4)  # [W, 8 columns, rows' half, e, g, t]
    return c.transpose(0, 2, 4, 1, 5, 3).reshape(warps, 16, 2 * n)


def registers_of(c: Words) -> list[Words]:
    """What `sums` reads, of int32 or float32 [W, 16, columns]."""
    warps, _, columns = c.shape
    c = c.reshape(warps, 2, 8, columns // 8, 4, 2).transpose(0, 3, 1, 5, 2, 4)
    c = np.ascontiguousarray(c).view(np.uint32).reshape(warps, columns // 2, 32)
    return [c[:, r] for r in range(columns // 2)]


def add_product(c: Words, a: Words, b: Words) -> Words:
    """c + a b, rounded once: float32; exact: int32."""
    total = a @ b + c
    return (total & 0xFFFFFFFF).astype(np.uint32).view(np.int32) if c.dtype == np.int32 else total.astype(np.float32)


def places(descriptor: int, columns: int, kind: str, turned: bool) -> Words:
    """Addresses in shared memory of the B operand [K, columns] that a descriptor of wgmma names, K being 32 bytes.

    In 128-byte swizzle, K contiguous in rows of a column each, or `turned`, columns contiguous in rows of 64.
    """
    begin, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    assert descriptor >> 62 == 1, "128-byte swizzle"
    size = 1 if kind == "s8" else 2
    k, n = np.arange(32 // size)[:, None], np.arange(columns)[None, :]
    if turned:
        at = begin + n // 64 * leading + k // 8 * stride + k % 8 * 128 + n % 64 * size
    else:
        at = begin + n // 8 * stride + n % 8 * 128 + k * size
    return at ^ (at >> 7 & 7) << 4


def stored(shared: SharedMemory, block: int, at: Words, kind: str) -> Words:
    """The numbers that lie there."""
    bits = shared.load(np.full(at.shape, block), at, 1 if kind == "s8" else 2)
    return bits.view(np.int8).astype(np.int64) if kind == "s8" else values(bits, kind)


def transposed(register: Words) -> Words:
    """An 8 x 8 matrix of 16-bit numbers as ldmatrix gives it, transposed: movmatrix."""
    matrix = halves(register.reshape(-1, 8, 4)).reshape(-1, 8, 8)
    return joined(np.ascontiguousarray(matrix.transpose(0, 2, 1)).reshape(-1, 8, 4, 2)).reshape(-1, 32)
