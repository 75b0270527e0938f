"""The one table of kernels: which of them multiplies by a quantized weight, given its spec and the device; and which
table of operations serves a decoder block there."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache

import torch

from qtool.runtime.kernels.cpu import CPU_KERNELS
from qtool.runtime.kernels.interface import LinearKernel, LinearSpec
from qtool.runtime.kernels.layer_ops import TORCH_OPS, AttentionShape, LayerOps
from qtool.runtime.kernels.reference import REFERENCE

log = logging.getLogger(__name__)


@cache
def _cuda_kernels() -> tuple[LinearKernel, ...]:
    from qtool.runtime.kernels import cuda  # compiles at first use: not before a CUDA device is asked for

    return tuple(cuda.kernels())


def candidates(device: torch.device) -> tuple[LinearKernel, ...]:
    """The kernels of a device, the fastest first; the portable one closes the list."""
    own = CPU_KERNELS if device.type == "cpu" else _cuda_kernels() if device.type == "cuda" else ()
    return (*own, REFERENCE)


@cache
def _say_once(message: str) -> None:
    log.info("%s", message)


def choose(spec: LinearSpec, device: torch.device) -> tuple[LinearKernel, LinearSpec]:
    """The first kernel that runs `spec` on `device`, and the spec to call it with.

    Where none of the device's own quantizes activations (`act_bits`), its weight-only product of the same weights is
    taken; it is more exact. That, and every use of the portable kernel, is logged once.
    """
    kernels = candidates(device)
    weight_only = replace(spec, scheme=replace(spec.scheme, act_bits=None))
    for wanted in dict.fromkeys((spec, weight_only)):
        for kernel in kernels[:-1]:
            if kernel.supports(wanted, device) is None:
                if wanted != spec:
                    name = spec.scheme.name
                    _say_once(
                        f"{name} on {device.type}: no kernel quantizes activations here, they stay in {spec.dtype}"
                    )
                return kernel, wanted
    reasons = "; ".join(f"{k.name}: {k.supports(spec, device)}" for k in kernels[:-1])
    _say_once(
        f"{spec.scheme.name} in {spec.dtype} on {device.type} runs on the portable kernel"
        + (f" ({reasons})" if reasons else "")
    )
    return REFERENCE, spec


def layer_ops(
    shape: AttentionShape, hidden_size: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> LayerOps:
    """The operations of a decoder block on `device`: its own, or torch's where they cannot run (logged once)."""
    if device.type != "cuda":
        return TORCH_OPS
    from qtool.runtime.kernels.cuda import layer_ops as cuda

    with torch.cuda.device(device):
        reason = cuda.unsupported(shape, hidden_size, block_size, dtype)
    if reason is None:
        return cuda.CUDA_OPS
    _say_once(f"attention and norms run in torch, without CUDA graphs: {reason}")
    return TORCH_OPS
