"""How a launch hands its arguments to the driver."""

from __future__ import annotations

import ctypes
import struct
import threading

import pytest
import torch

from qtool.runtime.kernels.cuda.driver import pack_arguments


def read(pointers: object, index: int, kind: type) -> object:
    return ctypes.cast(pointers[index], ctypes.POINTER(kind)).contents.value  # type: ignore[index]


def test_every_argument_lies_where_its_pointer_says() -> None:
    x, none = torch.arange(6.0), torch.empty(0)
    pointers = pack_arguments((x, -5, 1e-5, x[2:], 1 << 30, True, none, 3.0))
    assert read(pointers, 0, ctypes.c_uint64) == x.data_ptr()
    assert read(pointers, 1, ctypes.c_int) == -5
    assert read(pointers, 2, ctypes.c_float) == struct.unpack("f", struct.pack("f", 1e-5))[0]
    assert read(pointers, 3, ctypes.c_uint64) == x.data_ptr() + 8
    assert read(pointers, 4, ctypes.c_int) == 1 << 30
    assert read(pointers, 5, ctypes.c_int) == 1
    assert read(pointers, 6, ctypes.c_uint64) == 0
    assert read(pointers, 7, ctypes.c_float) == 3.0


def test_a_structure_lies_behind_the_other_arguments() -> None:
    text = bytes(range(256)) * 2
    pointers = pack_arguments((7, text))
    assert read(pointers, 0, ctypes.c_int) == 7
    assert ctypes.string_at(pointers[1], len(text)) == text
    with pytest.raises(ValueError, match="last argument"):
        pack_arguments((text, 7))


def test_threads_do_not_share_the_room() -> None:
    mine = pack_arguments((1,))
    other = threading.Thread(target=lambda: pack_arguments((2,)))
    other.start()
    other.join()
    assert read(mine, 0, ctypes.c_int) == 1


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(struct.error):
        pack_arguments((1 << 40,))
    with pytest.raises(ValueError, match="at most 64 arguments, got 65"):
        pack_arguments([0] * 65)
