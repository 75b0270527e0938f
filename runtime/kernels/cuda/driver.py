"""Load machine code and launch it on torch's current stream, through the CUDA driver that is already in the process."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qtool.quant.errors import QtoolError
from qtool.runtime.kernels.cuda.nvrtc import Macros, compile_cuda

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_NUM_REGISTERS = 4  # CU_FUNC_ATTRIBUTE_NUM_REGS
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_RELAXED_CAPTURE = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_DEFAULT_SHARED = 48 * 1024  # bytes a block may use without asking

Argument = torch.Tensor | int | float
"""A kernel argument: a tensor's address, a 32-bit int or a 32-bit float."""


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


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
        """Enqueue on the current stream of the current device; can be captured into a CUDA graph.

        Args:
            grid: blocks.
            threads: of a block.
            args: in the kernel's order.
            shared_bytes: dynamic shared memory of a block.
            cluster: blocks of a cluster (Hopper and later).
            overlap: programmatic dependent launch: may start before the kernel ahead of it has finished, and waits for
                it itself (Hopper and later).
        """
        attributes = (_Attribute * 2)()
        count = 0
        if cluster is not None:
            attributes[count].id = _CLUSTER_DIMENSION
            attributes[count].value[0:3] = cluster
            count += 1
        if overlap:
            attributes[count].id = _PROGRAMMATIC_SERIALIZATION
            attributes[count].value[0] = 1
            count += 1
        config = _LaunchConfig()
        config.grid[:] = grid
        config.block[:] = (threads, 1, 1)
        config.shared_bytes = shared_bytes
        config.stream = torch.cuda.current_stream().cuda_stream
        config.attributes = ctypes.cast(attributes, ctypes.POINTER(_Attribute))
        config.num_attributes = count
        values: list[Any] = [
            ctypes.c_int(a)
            if isinstance(a, int)
            else ctypes.c_float(a)
            if isinstance(a, float)
            else ctypes.c_void_p(a.data_ptr() or None)
            for a in args
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        status = _cuda().cuLaunchKernelEx(ctypes.byref(config), self.function, pointers, None)
        if status == _INVALID_CONTEXT:  # the first CUDA call of this thread
            _make_context_current(torch.cuda.current_device())
            status = _cuda().cuLaunchKernelEx(ctypes.byref(config), self.function, pointers, None)
        _check(status, f"launch of kernel {self.name} (grid {grid}, {threads} threads, {shared_bytes} B shared memory)")


@functools.cache
def arch_of(device_index: int) -> str:
    """`sm_90a` for Hopper (its own instructions come with the suffix), else like `sm_80`."""
    major, minor = torch.cuda.get_device_capability(device_index)
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


_HEADERS = {  # common.cuh alone for every other file
    "wide.cu": ("common.cuh", "hopper.cuh"),
    "rotate.cu": ("common.cuh", "rotate.cuh"),
    "decode_attention.cu": ("common.cuh", "rotate.cuh"),
    "quantize.cu": ("common.cuh", "rows.cuh"),
    "norm.cu": ("common.cuh", "rows.cuh"),
    "silu.cu": ("common.cuh", "rows.cuh"),
}


@functools.cache
def source(file: str) -> str:
    """The text of one kernel file of this folder, its headers before it."""
    here = Path(__file__).resolve().parent
    files = (*_HEADERS.get(file, ("common.cuh",)), file)
    return "\n".join(f'#line 1 "{f}"\n{(here / f).read_text()}' for f in files)


@functools.cache
def _load(device_index: int, file: str, entry: str, macros: tuple[tuple[str, int], ...], shared_limit: int) -> Kernel:
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
            registers = ctypes.c_int()
            cuda.cuFuncGetAttribute(ctypes.byref(registers), _NUM_REGISTERS, function)
        finally:
            cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    return Kernel(entry, function, registers.value)


def load_kernel(device: torch.device, file: str, entry: str, macros: Macros, *, shared_limit: int = 0) -> Kernel:
    """The kernel `entry` of `file`, compiled with `macros` and loaded on `device`; loaded once a process.

    Args:
        device: a CUDA device.
        file: in this folder; common.cuh is put before it.
        entry: the kernel's extern "C" name.
        macros: compile-time constants.
        shared_limit: bytes of dynamic shared memory that a launch may ask for.

    Raises:
        QtoolError: no NVRTC or driver, the source does not compile, or the device refuses the shared memory.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return _load(index, file, entry, tuple(sorted(macros.items())), shared_limit)


@functools.cache
def has_clusters(device_index: int) -> bool:
    """Whether the device knows thread-block clusters and programmatic dependent launch (Hopper and later)."""
    return torch.cuda.get_device_capability(device_index) >= (9, 0)
