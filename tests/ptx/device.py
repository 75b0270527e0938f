"""The kernels' own launches, on tensors of the CPU, through the emulator instead of a driver."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ptx.copies import Matrix
from ptx.machine import Machine, Order
from ptx.memory import FaultError, GlobalMemory
from ptx.program import Program, parse
from qtool.quant.errors import QtoolError
from qtool.runtime.kernels.cuda import attention, choice, driver, nvrtc

MULTIPROCESSORS = 3
HOPPER = (9, 0)
_UNASKED = 48 * 1024  # bytes of shared memory of a block
_MOST_SHARED = {(8, 0): 163 * 1024, (8, 9): 99 * 1024, HOPPER: 227 * 1024}  # by compute capability


@dataclass(eq=False)
class EmulatedKernel:
    """As driver.Kernel; its own global memory lives as long as it does."""

    name: str
    program: Program
    shared_limit: int
    device: Device
    variables: dict[str, Any]

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        args: Sequence[driver.Argument],
        *,
        shared_bytes: int = 0,
        cluster: tuple[int, int, int] | None = None,
        overlap: bool = False,
    ) -> None:
        most = _MOST_SHARED[self.device.capability]
        if shared_bytes > max(self.shared_limit, _UNASKED) or shared_bytes + self.program.shared_bytes > most:
            raise FaultError(f"{self.name}: {shared_bytes} bytes of shared memory, {self.shared_limit} asked for")
        if threads > self.program.threads:
            raise FaultError(f"{self.name}: {threads} threads, compiled for {self.program.threads}")
        if (cluster or overlap) and self.device.capability < HOPPER:
            raise FaultError(f"{self.name}: clusters and dependent launches came with Hopper")
        memory = GlobalMemory()
        for argument in args:
            if isinstance(argument, torch.Tensor):
                storage = argument.untyped_storage()
                memory.add(storage.data_ptr(), storage.nbytes())
            elif isinstance(argument, bytes):
                for matrix in Matrix.read_all(argument):
                    memory.add(matrix.address, matrix.size)
        for array in self.variables.values():
            memory.add(array.ctypes.data, array.nbytes)
        Machine(
            self.program,
            memory,
            self._laid_out(args),
            grid=grid,
            threads=threads,
            dynamic=shared_bytes,
            cluster=cluster or (1, 1, 1),
            variables={name: array.ctypes.data for name, array in self.variables.items()},
            early=self.device.early if overlap else None,
            order=self.device.order,
        ).run()
        self.device.recent.append((memory.stored(), args))

    def _laid_out(self, args: Sequence[driver.Argument]) -> bytes:
        """What the driver makes of the pointers that a launch hands it."""
        pointers, places = driver.pack_arguments(args), list(self.program.parameters.values())
        if len(places) != len(args):
            raise FaultError(f"{self.name} takes {len(places)} arguments, got {len(args)}")
        room = bytearray(max(begin + size for begin, size in places))
        for i, (begin, size) in enumerate(places):
            room[begin : begin + size] = ctypes.string_at(pointers[i], size)
        return bytes(room)


class Device:
    """What stands in for the driver; for launches from now on, `order`: of the threads, as Machine takes it;
    `capability`: of the device."""

    def __init__(self) -> None:
        self.order: Order = None
        self.capability = HOPPER
        # What launches may find unfinished when they overlap: what was stored, and the tensors, so that they stay
        self.recent: deque[tuple[list[tuple[int, Any]], Any]] = deque(maxlen=2)
        self._kernels: dict[Any, EmulatedKernel] = {}

    @property
    def early(self) -> list[tuple[int, Any]]:
        return [part for stored, _ in self.recent for part in stored]

    def load(
        self,
        index: int,
        file: str,
        entry: str,
        macros: tuple[tuple[str, int], ...],
        shared_limit: int,
        little_l1: bool,
    ) -> EmulatedKernel:
        key = file, macros, shared_limit, self.capability
        if key not in self._kernels:
            arch = driver.arch_of(index).replace("sm_", "compute_")
            program = parse(nvrtc.compile_ptx(driver.source(file), arch, dict(macros), name=entry))
            assert program.name == entry
            variables = {name: np.zeros(size // 8 + 1, np.uint64) for name, size in program.variables.items()}
            self._kernels[key] = EmulatedKernel(entry, program, shared_limit, self, variables)
        return self._kernels[key]

    def describe(
        self,
        address: int,
        rows: int,
        columns: int,
        box_rows: int,
        box_columns: int,
        bytes_each: int,
        *,
        swizzle: bool = False,
    ) -> bytes:
        """As driver.tensor_map, with the driver's own refusals."""
        row, pitch = box_columns * bytes_each, columns * bytes_each
        if address % 16 or pitch % 16 or row % 16 or max(box_rows, box_columns) > 256 or (swizzle and row > 128):
            raise QtoolError(f"description of a matrix [{rows}, {columns}]: refused")
        return Matrix(address, rows, columns, box_rows, box_columns, bytes_each, swizzle).written()


_EMPTY = (torch.empty, torch.empty_like, torch.Tensor.new_empty)


class _CudaIsCpu(TorchFunctionMode):
    """What is asked for on "cuda" is made on the CPU; memory that nobody has written is full of ones, NaN in floats."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()})
        if func in _EMPTY and made.device.type == "cpu" and made.is_contiguous():
            made.view(-1).view(torch.uint8).fill_(255)
        return made


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value


DEVICE = Device()  # the one, since launchers keep the kernels that they were given


class _Generator(torch.Generator):
    """One of "cuda" is the CPU's."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, _on_cpu(device))


@contextmanager
def emulated(capability: tuple[int, int] = HOPPER) -> Iterator[Device]:
    """Launches run in the emulator, as on a device with few multiprocessors; tensors on "cuda" are the CPU's.

    Args:
        capability: of the device: (8, 0), (8, 9) or HOPPER.

    Raises:
        QtoolError: NVRTC, which makes the PTX, is not on this machine.
    """
    nvrtc.library()
    DEVICE.recent.clear()
    major, minor = capability
    properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS, name="emulated", major=major, minor=minor)
    answers: dict[str, Any] = {
        "torch.cuda.is_available": True,
        "torch.cuda.current_device": 0,
        "torch.cuda.get_device_capability": capability,
        "torch.cuda.get_device_properties": properties,
        "torch.cuda.synchronize": None,
    }
    caches = driver.num_sms, driver.has_clusters, driver.arch_of, attention.num_sms, choice._choose
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, return_value=answer))
        for what, instead in (
            ("torch.cuda.device", lambda device: nullcontext()),
            ("torch.Generator", _Generator),
            ("qtool.runtime.kernels.cuda.driver._load", DEVICE.load),
            ("qtool.runtime.kernels.cuda.maps.tensor_map", DEVICE.describe),
        ):
            stack.enter_context(mock.patch(what, instead))
        stack.enter_context(mock.patch.object(DEVICE, "order", None))
        stack.enter_context(mock.patch.object(DEVICE, "capability", capability))
        stack.enter_context(_CudaIsCpu())
        for cached in caches:
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        yield DEVICE
