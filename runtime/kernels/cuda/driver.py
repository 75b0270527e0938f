"""Load machine code and launch it on torch's current stream, through the CUDA driver that is already in the process."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qtool.quant.errors import QtoolError
from qtool.runtime.kernels.cuda.nvrtc import Macros, compile_cuda

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PREFERRED_SHARED, _ALL_PERCENT = 9, 100  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_NUM_REGISTERS = 4  # CU_FUNC_ATTRIBUTE_NUM_REGS
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_RELAXED_CAPTURE = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_MOST_ARGUMENTS = 64  # of a kernel
_DEFAULT_SHARED = 48 * 1024  # bytes a block may use without asking
_MAP_BYTES = 128  # of a CUtensorMap; its address is a multiple of 64
_MAP_UINT16, _MAP_UINT32, _MAP_SWIZZLE_128, _MAP_L2_256 = 1, 2, 3, 3  # CU_TENSOR_MAP_...
_MOST_STRUCTURE = 4 * _MAP_BYTES  # of a kernel's last argument

Argument = torch.Tensor | int | float | bytes
"""A kernel argument: a tensor's address, a 32-bit int, a 32-bit float, or as the last one a structure's bytes."""


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig; grid and block one number a field, so that all are set at once."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


@functools.cache
def _attributes(cluster: tuple[int, int, int] | None, overlap: bool) -> tuple[Any, int, int]:
    """The launch attributes of such a launch, their address and number; the same ones serve every launch."""
    found = (_Attribute * 2)()
    count = 0
    if cluster is not None:
        found[count].id = _CLUSTER_DIMENSION
        found[count].value[0:3] = cluster
        count += 1
    if overlap:
        found[count].id = _PROGRAMMATIC_SERIALIZATION
        found[count].value[0] = 1
        count += 1
    return found, ctypes.addressof(found), count


class _Room(threading.local):
    """Where a thread's launches lay out their arguments: the driver copies them before it returns."""

    def __init__(self) -> None:
        self.slots = ctypes.create_string_buffer(8 * _MOST_ARGUMENTS + _MOST_STRUCTURE)
        base = ctypes.addressof(self.slots)
        self.pointers = (ctypes.c_void_p * _MOST_ARGUMENTS)(*range(base, base + 8 * _MOST_ARGUMENTS, 8))


_room = _Room()


@functools.cache
def _layout(kinds: tuple[type, ...]) -> struct.Struct:
    """Arguments of these types, 8 bytes each, a structure more."""
    if len(kinds) > _MOST_ARGUMENTS:
        raise ValueError(f"a kernel takes at most {_MOST_ARGUMENTS} arguments, got {len(kinds)}")
    if bytes in kinds[:-1]:
        raise ValueError("a structure is a kernel's last argument")
    codes = {float: "f4x", bytes: f"{_MOST_STRUCTURE}s"}
    return struct.Struct("=" + "".join("i4x" if issubclass(k, int) else codes.get(k, "Q") for k in kinds))


def pack_arguments(args: Sequence[Argument]) -> Any:
    """Lay out kernel arguments for a launch by this thread; returns the array of their addresses that the driver takes.

    It is good until the thread's next call.
    """
    values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
    _layout(tuple(map(type, args))).pack_into(_room.slots, 0, *values)
    return _room.pointers


@functools.cache
def _cuda() -> ctypes.CDLL:
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise QtoolError("the CUDA driver (libcuda.so.1) was not found: install the NVIDIA driver")


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _cuda().cuGetErrorString(status, ctypes.byref(text))
        reason = text.value.decode() if text.value else "unknown error"
        raise QtoolError(f"{what}: CUDA error {status} ({reason})")


def _make_context_current(device_index: int) -> None:
    """Bind torch's context (the device's primary one) to the calling thread."""
    cuda = _cuda()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _check(cuda.cuInit(0), "the CUDA driver cannot start")
    _check(cuda.cuDeviceGet(ctypes.byref(device), device_index), f"CUDA device {device_index}")
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"context of CUDA device {device_index}")
    _check(cuda.cuCtxSetCurrent(context), f"context of CUDA device {device_index}")


@dataclass(frozen=True)
class Kernel:
    """One loaded kernel on one device."""

    name: str
    device_index: int
    function: ctypes.c_void_p
    registers: int

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        args: Sequence[Argument],
        *,
        shared_bytes: int = 0,
        cluster: tuple[int, int, int] | None = None,
        overlap: bool = False,
    ) -> None:
        """Enqueue on the current stream of the kernel's device, the current one; can be captured into a CUDA graph.

        Args:
            grid: blocks.
            threads: of a block.
            args: in the kernel's order.
            shared_bytes: dynamic shared memory of a block.
            cluster: blocks of a cluster (Hopper and later).
            overlap: programmatic dependent launch: may start before the kernel ahead of it has finished, and waits for
                it itself (Hopper and later).
        """
        _, attributes, count = _attributes(cluster, overlap)
        stream = torch._C._cuda_getCurrentRawStream(self.device_index)
        config = _LaunchConfig(*grid, threads, 1, 1, shared_bytes, stream, attributes, count)
        pointers = pack_arguments(args)
        status = _cuda().cuLaunchKernelEx(ctypes.byref(config), self.function, pointers, None)
        if status == _INVALID_CONTEXT:  # the first CUDA call of this thread
            _make_context_current(torch.cuda.current_device())
            status = _cuda().cuLaunchKernelEx(ctypes.byref(config), self.function, pointers, None)
        if status:
            shape = f"grid {grid}, {threads} threads, {shared_bytes} B shared memory"
            _check(status, f"launch of kernel {self.name} ({shape})")


@functools.lru_cache(maxsize=4096)
def tensor_map(
    address: int, rows: int, columns: int, box_rows: int, box_columns: int, bytes_each: int, *, swizzle: bool = False
) -> bytes:
    """A description of a matrix for the tensor copy engine (CUtensorMap; Hopper and later), to pass to a kernel.

    Args:
        address: of [rows, columns] numbers of 2 or 4 bytes, contiguous, 16-byte aligned; a row is 16 n bytes.
        box_rows, box_columns: what one copy brings, at most 256 each, zeros beyond the matrix.
        bytes_each: 2 or 4.
        swizzle: shared memory takes the box in the 128-byte swizzle (rows of 128 bytes), else row by row.

    Raises:
        QtoolError: the driver refuses.
    """
    room = ctypes.create_string_buffer(_MAP_BYTES + 64)
    at = -(-ctypes.addressof(room) // 64) * 64
    sizes, pitch = (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(columns * bytes_each)
    box, every = (ctypes.c_uint32 * 2)(box_columns, box_rows), (ctypes.c_uint32 * 2)(1, 1)
    kind = _MAP_UINT16 if bytes_each == 2 else _MAP_UINT32
    what = (kind, 2, ctypes.c_void_p(address), sizes, pitch, box, every, 0, _MAP_SWIZZLE_128 * swizzle, _MAP_L2_256, 0)
    status = _cuda().cuTensorMapEncodeTiled(ctypes.c_void_p(at), *what)
    _check(status, f"description of a matrix [{rows}, {columns}]")
    return ctypes.string_at(at, _MAP_BYTES)


@functools.cache
def arch_of(device_index: int) -> str:
    """`sm_90a` for Hopper (its own instructions come with the suffix), else like `sm_80`."""
    major, minor = torch.cuda.get_device_capability(device_index)
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


_HEADERS = {  # common.cuh alone for every other file
    "gemm.cu": ("common.cuh", "copies.cuh", "hopper.cuh", "gated.cuh"),
    "flash.cu": ("common.cuh", "copies.cuh", "hopper.cuh", "exp2.cuh"),
    "rotate.cu": ("common.cuh", "rotate.cuh"),
    "decode_attention.cu": ("common.cuh", "rotate.cuh", "exp2.cuh"),
    "quantize.cu": ("common.cuh", "rows.cuh"),
    "norm.cu": ("common.cuh", "rows.cuh"),
    "silu.cu": ("common.cuh", "rows.cuh", "gated.cuh"),
    "skinny.cu": ("common.cuh", "gated.cuh"),
    "stream.cu": ("common.cuh", "copies.cuh", "gated.cuh"),
}


@functools.cache
def source(file: str) -> str:
    """The text of one kernel file of this folder, its headers before it."""
    here = Path(__file__).resolve().parent
    files = (*_HEADERS.get(file, ("common.cuh",)), file)
    return "\n".join(f'#line 1 "{f}"\n{(here / f).read_text()}' for f in files)


@functools.cache
def _load(
    device_index: int, file: str, entry: str, macros: tuple[tuple[str, int], ...], shared_limit: int, little_l1: bool
) -> Kernel:
    image = compile_cuda(source(file), arch_of(device_index), dict(macros), name=entry)
    cuda = _cuda()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device_index):
        _make_context_current(device_index)
        mode = ctypes.c_int(_RELAXED_CAPTURE)  # loading during another stream's or our own capture is harmless
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            _check(cuda.cuModuleLoadData(ctypes.byref(module), image), f"kernel {entry} cannot be loaded")
            _check(cuda.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()), f"kernel {entry}")
            if shared_limit > _DEFAULT_SHARED:
                status = cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_limit)
                _check(status, f"kernel {entry} cannot use {shared_limit} B of shared memory a block")
            if little_l1:
                _check(cuda.cuFuncSetAttribute(function, _PREFERRED_SHARED, _ALL_PERCENT), f"kernel {entry}")
            registers = ctypes.c_int()
            cuda.cuFuncGetAttribute(ctypes.byref(registers), _NUM_REGISTERS, function)
        finally:
            cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    return Kernel(entry, device_index, function, registers.value)


def load_kernel(
    device: torch.device, file: str, entry: str, macros: Macros, *, shared_limit: int = 0, little_l1: bool = False
) -> Kernel:
    """The kernel `entry` of `file`, compiled with `macros` and loaded on `device`; loaded once a process.

    Args:
        device: a CUDA device.
        file: in this folder; common.cuh is put before it.
        entry: the kernel's extern "C" name.
        macros: compile-time constants.
        shared_limit: bytes of dynamic shared memory that a launch may ask for.
        little_l1: leave the L1 cache as little of a multiprocessor's memory as it can have. Kernels that divide it
            alike can be there at once; else the next one waits for the last block of the one before.

    Raises:
        QtoolError: no NVRTC or driver, the source does not compile, or the device refuses the shared memory.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return _load(index, file, entry, tuple(sorted(macros.items())), shared_limit, little_l1)


@functools.cache
def has_clusters(device_index: int) -> bool:
    """Whether the device knows thread-block clusters and programmatic dependent launch (Hopper and later)."""
    return torch.cuda.get_device_capability(device_index) >= (9, 0)


@functools.cache
def num_sms(device_index: int) -> int:
    """Streaming multiprocessors of a device."""
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)
