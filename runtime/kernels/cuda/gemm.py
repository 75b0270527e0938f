"""Launch of gemm.cu: the product with int8 activations for hundreds of tokens and more, bound by Hopper's tensor cores.

Int4 weights with scale groups and int8 activations have two ways. The exact one sums each group apart in int32 and adds
the sums in float32. The progressive one (GemmConfig.progressive; progressive group quantization, Lin et al. 2024, arXiv
2405.04532) rounds every weight anew to 8 bits of the largest one that its row could have, so that one int32 sum serves
the row. It takes two thirds of the time, and adds to each weight an error of at most half such a step. On the default
model's 210 layers that costs 0.5 to 1.0 % of the result (medians by kind), in each layer less than rounding the
activations to int8 does (1.4 to 6.5 %), where rounding the weights to int4 costs 8 to 18 %. `pick`, and with it every
product of more than 128 tokens, takes the progressive way where it is the faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.runtime.kernels.cuda.driver import Kernel, load_kernel, num_sms
from qtool.runtime.kernels.cuda.layout import PackedWeight
from qtool.runtime.kernels.cuda.nvrtc import Macros
from qtool.runtime.kernels.cuda.skinny import weight_macros
from qtool.runtime.kernels.interface import LinearSpec

_THREADS = 384  # two warpgroups that multiply, one that copies
_TILES = 8  # of 16 rows of the weight in a block's tile
_SHARED_BYTES = 227 * 1024 - 1024  # of a block, less what its barriers take
_OUT_BYTES = 2 * 64 * 128  # results on their way
_MOST_STAGES = 8
_TOKENS = (64, 128, 256)


@dataclass(frozen=True)
class GemmConfig:
    """How the work is cut, and for int4 weights in groups with int8 activations whether they are rounded to 8 bits.

    Attributes:
        tokens: of a tile, by 128 rows of the weight: 64, 128 or 256 (TOKENS).
        progressive: see above (PROGRESSIVE); False for every other scheme.
    """

    tokens: int
    progressive: bool = False


def has_groups(spec: LinearSpec) -> bool:
    """Whether integer sums have to be scaled group by group."""
    return spec.scheme.group_size > 0


def configs(spec: LinearSpec, *, exact: bool) -> list[GemmConfig]:
    """The tiles whose sums fit the registers; where not `exact`, a progressive one too if the scheme allows it: that of
    most tokens, which alone is faster."""
    if not has_groups(spec):
        return [GemmConfig(tokens) for tokens in _TOKENS]
    found = [GemmConfig(tokens) for tokens in _TOKENS[:2]]
    return found if exact or spec.scheme.bits != 4 else [*found, GemmConfig(_TOKENS[2], True)]


def supports(packed: PackedWeight, spec: LinearSpec) -> bool:
    """Whether gemm.cu multiplies by this weight: int8 activations, whole steps of 128 columns, codes less their zero
    points in 8 bits."""
    fits = packed.chunks % 2 == 0 and (spec.scheme.symmetric or spec.scheme.bits == 4)
    return spec.scheme.act_bits is not None and fits


# Nanoseconds of a step of K by tokens of a tile, measured on an H200.
_STEP_NS = {
    "one sum": {64: 295, 128: 405, 256: 750},
    "sums by group": {64: 390, 128: 590},
    "progressive": {64: 520, 128: 595, 256: 745},
}


def _kind(spec: LinearSpec, config: GemmConfig) -> str:
    return "progressive" if config.progressive else "sums by group" if has_groups(spec) else "one sum"


def pick(spec: LinearSpec, tokens: int, num_sms: int, *, exact: bool = False) -> GemmConfig:
    """The tile that takes the least time for `tokens` activations: rounds over the device by a tile's cost.

    `exact`: no progressive one.
    """
    row_blocks = -(-spec.rows // (16 * _TILES))

    def cost(config: GemmConfig) -> int:
        rounds = -(-row_blocks * -(-tokens // config.tokens) // num_sms)
        return rounds * _STEP_NS[_kind(spec, config)][config.tokens]

    return min(configs(spec, exact=exact), key=cost)


def _stage_bytes(spec: LinearSpec, config: GemmConfig) -> int:
    return config.tokens * 128 + _TILES * 2 * (spec.scheme.bits // 4) * 512


def stages(spec: LinearSpec, config: GemmConfig) -> int:
    """Steps of K in shared memory (STAGES)."""
    return min(_MOST_STAGES, (_SHARED_BYTES - _OUT_BYTES) // _stage_bytes(spec, config))


def shared_bytes(spec: LinearSpec, config: GemmConfig) -> int:
    """Dynamic shared memory of a block."""
    return stages(spec, config) * _stage_bytes(spec, config) + _OUT_BYTES


def macros(spec: LinearSpec, scale_dtype: torch.dtype, config: GemmConfig) -> Macros:
    """All macros of gemm.cu for one product."""
    return weight_macros(spec, scale_dtype) | {
        "PROGRESSIVE": int(config.progressive),
        "TOKENS": config.tokens,
        "STAGES": stages(spec, config),
    }


def kernel(device: torch.device, packed: PackedWeight, spec: LinearSpec, config: GemmConfig) -> Kernel:
    """The compiled kernel. Raises QtoolError as load_kernel does."""
    chosen = macros(spec, packed.scales.dtype, config)
    return load_kernel(device, "gemm.cu", "gemm", chosen, shared_limit=shared_bytes(spec, config))


def multiply(
    x: Tensor, x_scales: Tensor, packed: PackedWeight, spec: LinearSpec, config: GemmConfig, out: Tensor
) -> None:
    """out [M, N] = x @ weight.T.

    Args:
        x, x_scales: as from rows.quantize_rows in the order config.tokens.
        packed: a weight for which `supports` holds.
        out: [M, N] in spec.dtype, contiguous, 16-byte aligned.
    """
    blocks = -(-spec.rows // (16 * _TILES)) * x.shape[0]
    kernel(x.device, packed, spec, config).launch(
        (min(blocks, num_sms(x.device.index)), 1, 1),
        _THREADS,
        (packed.codes, packed.scales, packed.zeros, x, x_scales, out, len(out), spec.rows, packed.chunks),
        shared_bytes=shared_bytes(spec, config),
        overlap=True,
    )
