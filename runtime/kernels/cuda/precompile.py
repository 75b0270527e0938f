"""Compile what a model's products will need, on all cores at once, before the first step asks for it."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from qtool.runtime.kernels.cuda import gemm, gemm16, skinny, stream, wide
from qtool.runtime.kernels.cuda.choice import Choice, buckets_of, choose
from qtool.runtime.kernels.cuda.driver import arch_of, source
from qtool.runtime.kernels.cuda.gemm import GemmConfig
from qtool.runtime.kernels.cuda.gemm16 import Gemm16Config
from qtool.runtime.kernels.cuda.layout import PackedWeight
from qtool.runtime.kernels.cuda.linear import NAME
from qtool.runtime.kernels.cuda.nvrtc import Macros, compile_cuda
from qtool.runtime.kernels.cuda.skinny import SkinnyConfig
from qtool.runtime.kernels.cuda.stream import StreamConfig
from qtool.runtime.kernels.cuda.wide import WideConfig
from qtool.runtime.kernels.interface import LinearSpec, QuantLinear

Job = tuple[str, tuple[tuple[str, int], ...]]
"""A kernel to compile: its source file, and its macros in order."""


def job_of(
    spec: LinearSpec, scale_dtype: torch.dtype, chunks: int, tokens: int, choice: Choice, *, gated: bool = False
) -> Job | None:
    """The kernel by which `choice` multiplies `tokens` activations; None where it is none of ours.

    `gated`: with silu(gate) * up at its end, where it can.
    """
    file: str
    macros: Macros
    if isinstance(choice, SkinnyConfig):
        gated = gated and skinny.gates(spec, tokens, choice)
        file, macros = "skinny.cu", skinny.macros(spec, scale_dtype, chunks, tokens, choice, gated=gated)
    elif isinstance(choice, StreamConfig):
        gated = gated and stream.gates(spec, tokens, choice)
        file, macros = "stream.cu", stream.macros(spec, scale_dtype, tokens, choice, gated=gated)
    elif isinstance(choice, WideConfig):
        file, macros = "wide.cu", wide.macros(spec, scale_dtype, choice)
    elif isinstance(choice, GemmConfig):
        file, macros = "gemm.cu", gemm.macros(spec, scale_dtype, choice)
    elif isinstance(choice, Gemm16Config):
        gated = gated and gemm16.gates(spec)
        file, macros = "gemm16.cu", gemm16.macros(spec, scale_dtype, choice, gated=gated)
    else:
        return None
    return file, tuple(sorted(macros.items()))


def compile_job(arch: str, job: Job) -> None:
    """Bring its machine code into the cache on disk. Raises QtoolError where it does not compile."""
    file, macros = job
    compile_cuda(source(file), arch, dict(macros), name=file.removesuffix(".cu"))


def _job(linear: QuantLinear, tokens: int, choice: Choice, gated: bool) -> Job | None:
    """job_of a linear; None, too, where the kernel cannot multiply by it."""
    spec, packed = linear.spec, PackedWeight(*linear.packed)
    if isinstance(choice, WideConfig) and not wide.supports(packed, spec):
        return None
    if isinstance(choice, GemmConfig) and not gemm.supports(packed, spec):
        return None
    gated = gated and linear.bias is None
    return job_of(spec, packed.scales.dtype, packed.chunks, tokens, choice, gated=gated)


def _choices(linear: QuantLinear, device: torch.device) -> list[tuple[int, Choice]]:
    """Numbers of tokens and what multiplies them, each kernel at least once."""
    buckets = buckets_of(linear.spec)
    few = [(tokens, choose(linear.spec, tokens, device)) for tokens in buckets]
    beyond = buckets[-1] + 1
    many = choose(linear.spec, beyond, device)
    if isinstance(many, GemmConfig):
        return [*few, *((beyond, config) for config in gemm.configs(linear.spec, exact=False))]
    return [*few, (beyond, many)]


def precompile(linears: Iterable[object], gated: Container[int], device: torch.device) -> None:
    """Bring the machine code of all products by `linears` (those that are ours) into the cache on disk; those whose
    id is among `gated` are gate and up.

    Raises:
        QtoolError: a kernel does not compile.
    """
    arch = arch_of(torch.cuda.current_device() if device.index is None else device.index)
    found = (
        _job(linear, tokens, choice, id(linear) in gated)
        for linear in linears
        if isinstance(linear, QuantLinear) and linear.kernel.name == NAME
        for tokens, choice in _choices(linear, device)
    )
    jobs = dict.fromkeys(job for job in found if job is not None)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the compiler does not hold Python's lock
        list(pool.map(partial(compile_job, arch), jobs))
