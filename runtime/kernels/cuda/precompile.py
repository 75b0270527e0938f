"""Compile what a model's products will need, on all cores at once, before the first step asks for it."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from concurrent.futures import ThreadPoolExecutor

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
from qtool.runtime.kernels.interface import QuantLinear


def _kernel(linear: QuantLinear, tokens: int, choice: Choice, gated: bool) -> tuple[str, Macros] | None:
    """Source file and macros of the kernel for `tokens` activations; None where it is none of ours."""
    spec, packed = linear.spec, PackedWeight(*linear.packed)
    if isinstance(choice, SkinnyConfig):
        gated = gated and linear.bias is None and skinny.gates(spec, tokens, choice)
        return "skinny", skinny.macros(spec, packed.scales.dtype, packed.chunks, tokens, choice, gated=gated)
    if isinstance(choice, StreamConfig):
        gated = gated and linear.bias is None and stream.gates(spec, tokens, choice)
        return "stream", stream.macros(spec, packed.scales.dtype, tokens, choice, gated=gated)
    if isinstance(choice, WideConfig) and wide.supports(packed, spec):
        return "wide", wide.macros(spec, packed.scales.dtype, choice)
    if isinstance(choice, GemmConfig) and gemm.supports(packed, spec):
        return "gemm", gemm.macros(spec, packed.scales.dtype, choice)
    if isinstance(choice, Gemm16Config):
        return "gemm16", gemm16.macros(spec, packed.scales.dtype, choice)
    return None


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
    jobs: dict[tuple[str, tuple[tuple[str, int], ...]], None] = {}
    for linear in linears:
        if isinstance(linear, QuantLinear) and linear.kernel.name == NAME:
            for tokens, choice in _choices(linear, device):
                if (found := _kernel(linear, tokens, choice, id(linear) in gated)) is not None:
                    jobs[found[0], tuple(sorted(found[1].items()))] = None
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the compiler does not hold Python's lock
        list(pool.map(lambda job: compile_cuda(source(f"{job[0]}.cu"), arch, dict(job[1]), name=job[0]), jobs))
