"""RMSNorm and a product as one kernel where a step has one token; tried against the two kernels before it is used."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from qtool.quant.errors import QtoolError
from qtool.quant.scheme import QuantScheme
from qtool.runtime.kernels.cuda.choice import choose
from qtool.runtime.kernels.cuda.layout import CHUNK_COLS, PackedWeight, pack_weight
from qtool.runtime.kernels.cuda.linear import NAME, apply_choice
from qtool.runtime.kernels.cuda.rows import add_norm
from qtool.runtime.kernels.cuda.skinny import SkinnyConfig, multiply_normed
from qtool.runtime.kernels.cuda.tuning import random_weight
from qtool.runtime.kernels.interface import LinearSpec, QuantLinear

log = logging.getLogger(__name__)

_MAX_COLS = 1 << 14  # of the token, which every block holds in shared memory
_TRIAL_ROWS, _TRIAL_COLS = 96, 1024


def norm_multiply(
    hidden: Tensor, delta: Tensor | None, gain: Tensor, eps: float, linear: object
) -> tuple[Tensor, Tensor] | None:
    """(linear of the norm of hidden + delta, hidden + delta) of one token [1, K]; None where no kernel does both."""
    if not isinstance(linear, QuantLinear) or linear.kernel.name != NAME:
        return None
    spec, packed = linear.spec, PackedWeight(*linear.packed)
    if packed.chunks * CHUNK_COLS != spec.cols or len(packed.columns) or spec.cols > _MAX_COLS:
        return None
    choice = choose(spec, 1, hidden.device)
    if not isinstance(choice, SkinnyConfig) or not _works(hidden.device, spec.scheme.name, spec.dtype, choice):
        return None
    out, total = multiply_normed(hidden, delta, gain, eps, packed, spec, choice)
    return (out if linear.bias is None else out + linear.bias), total


@functools.cache
def _works(device: torch.device, scheme_name: str, dtype: torch.dtype, config: SkinnyConfig) -> bool:
    """Run a small product both ways and compare. Not while capturing: a step is run before it is captured."""
    spec = LinearSpec(_TRIAL_ROWS, _TRIAL_COLS, QuantScheme.parse(scheme_name), dtype=dtype)
    packed = pack_weight(random_weight(spec), spec.scheme.act_bits or 16, device)
    hidden, delta = (torch.randn(1, _TRIAL_COLS, device=device).to(dtype) for _ in range(2))
    gain = (torch.rand(_TRIAL_COLS, device=device) + 0.5).to(dtype)
    try:
        for added in (None, delta):
            out, total = multiply_normed(hidden, added, gain, 1e-5, packed, spec, config)
            expected = hidden.clone()
            normed = add_norm(expected, added, gain, 1e-5, None)
            assert isinstance(normed, Tensor)
            want = apply_choice(normed, packed, spec, config).float()
            error = float((out.float() - want).norm() / want.norm())
            if not (error < 0.02 and torch.equal(total, expected)):
                raise QtoolError(f"relative error {error:.3g}")
    except QtoolError as problem:
        log.warning("the norm runs apart from the product of %s weights: the trial failed (%s)", scheme_name, problem)
        return False
    return True
