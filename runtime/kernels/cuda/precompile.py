"""Compile what a model's products will need, on all cores at once, before the first step asks for it."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from qtool.runtime.kernels.cuda import gemm, skinny, stream
from qtool.runtime.kernels.cuda.choice import BUCKETS, Choice, choose
from qtool.runtime.kernels.cuda.driver import arch_of, source
from qtool.runtime.kernels.cuda.gemm import GemmConfig
from qtool.runtime.kernels.cuda.layout import PackedWeight
from qtool.runtime.kernels.cuda.linear import NAME
from qtool.runtime.kernels.cuda.nvrtc import Macros, compile_cuda
from qtool.runtime.kernels.cuda.skinny import SkinnyConfig
from qtool.runtime.kernels.cuda.stream import StreamConfig
from qtool.runtime.kernels.interface import LinearSpec, QuantLinear

Job = tuple[str, tuple[tuple[str, int], ...]]
"""A kernel to compile: its source file, and its macros in order."""


def job_of(
    spec: LinearSpec,
    scale_dtype: torch.dtype,
    chunks: int,
    tokens: int,
    choice: Choice,
    *,
    gated: bool = False,
    powers: bool = True,
) -> Job | None:
    """The kernel by which `choice` multiplies `tokens` activations; None where it is none of ours.

    `gated`: with silu(gate) * up at its end, where it can; `powers`: see gemm.macros.
    """
    file: str
    macros: Macros
    if isinstance(choice, SkinnyConfig):
        gated = gated and skinny.gates(spec, tokens, choice)
        file, macros = "skinny.cu", skinny.macros(spec, scale_dtype, chunks, tokens, choice, gated=gated)
    elif isinstance(choice, StreamConfig):
        gated = gated and stream.gates(spec, tokens, choice)
        file, macros = "stream.cu", stream.macros(spec, scale_dtype, tokens, choice, gated=gated)
    elif isinstance(choice, GemmConfig):
        gated = gated and gemm.gates(spec)
        file, macros = "gemm.cu", gemm.macros(spec, scale_dtype, choice, gated=gated, powers=powers)
    else:
        return None
    return file, tuple(sorted(macros.items()))


def compile_job(arch: str, job: Job) -> None:
    """Bring its machine code into the cache on disk. Raises QtoolError where it does not compile."""
    file, macros = job
    compile_cuda(source(file), arch, dict(macros), name=file.removesuffix(".cu"))


def _job(linear: QuantLinear, tokens: int, choice: Choice, gated: bool) -> Job | None:
    packed = PackedWeight(*linear.packed)
    gated = gated and linear.bias is None
    powers = len(packed.powers) > 0
    return job_of(linear.spec, packed.scales.dtype, packed.chunks, tokens, choice, gated=gated, powers=powers)


def precompile(linears: Iterable[object], gated: Container[int], device: torch.device) -> None:
    """Bring the machine code of all products by `linears` (those that are ours) into the cache on disk; those whose
    id is among `gated` are gate and up.

    Raises:
        QtoolError: a kernel does not compile.
    """
    arch = arch_of(torch.cuda.current_device() if device.index is None else device.index)
    found = (
        _job(linear, tokens, choose(linear.spec, tokens, device), id(linear) in gated)
        for linear in linears
        if isinstance(linear, QuantLinear) and linear.kernel.name == NAME
        for tokens in BUCKETS
    )
    jobs = dict.fromkeys(job for job in found if job is not None)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the compiler does not hold Python's lock
        list(pool.map(partial(compile_job, arch), jobs))
