"""CUDA C++ kernels, compiled at first use: int4 and int8 weights, 16-bit and int8 activations."""

from __future__ import annotations

from qtool.runtime.kernels.cuda.linear import cuda_kernel
from qtool.runtime.kernels.interface import LinearKernel


def kernels() -> list[LinearKernel]:
    """The kernels of this folder, the preferred one first; each says itself what it supports on which device."""
    return [cuda_kernel()]
