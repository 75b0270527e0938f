"""Launch of wide.cu: the product with int8 activations for tens to hundreds of tokens, on Hopper."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.runtime.kernels.cuda.driver import Kernel, load_kernel
from qtool.runtime.kernels.cuda.layout import PackedWeight
from qtool.runtime.kernels.cuda.nvrtc import Macros
from qtool.runtime.kernels.cuda.skinny import weight_macros
from qtool.runtime.kernels.interface import LinearSpec


@dataclass(frozen=True)
class WideConfig:
    """How the work is cut.

    Attributes:
        tokens: of a block: 16, 32, 64 or 128.
        warpgroups: of a block (WG), 128 threads each.
        tiles: 64-row tiles of a warpgroup (NT).
        split: blocks of a cluster, each with a share of K (SK).
        prefetch: steps of 128 columns whose weights are in flight (PF), even.
        min_blocks: blocks an SM must be able to hold; bounds the registers (MINB).
    """

    tokens: int
    warpgroups: int
    tiles: int = 1
    split: int = 1
    prefetch: int = 2
    min_blocks: int = 1

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups * self.tiles

    @property
    def stages(self) -> int:
        """Steps of activations in shared memory (STAGES)."""
        return 8 if self.tokens <= 32 else 4

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the stages of activations, later the block's float32 sums."""
        return max(self.stages * self.tokens * 128, self.tokens * (self.rows + 4) * 4)


def supports(packed: PackedWeight, spec: LinearSpec) -> bool:
    """Whether wide.cu multiplies by this weight: int8 activations, whole steps of 128 columns, symmetric codes."""
    return spec.scheme.act_bits is not None and packed.chunks % 2 == 0 and spec.scheme.symmetric


def macros(spec: LinearSpec, scale_dtype: torch.dtype, config: WideConfig) -> Macros:
    """All macros of wide.cu for one product."""
    return weight_macros(spec, scale_dtype) | {
        "TOKENS": config.tokens,
        "WG": config.warpgroups,
        "NT": config.tiles,
        "SK": config.split,
        "PF": config.prefetch,
        "STAGES": config.stages,
        "MINB": config.min_blocks,
    }


def kernel(device: torch.device, packed: PackedWeight, spec: LinearSpec, config: WideConfig) -> Kernel:
    """The compiled kernel. Raises QtoolError as load_kernel does."""
    chosen = macros(spec, packed.scales.dtype, config)
    return load_kernel(device, "wide.cu", "wide", chosen, shared_limit=config.shared_bytes)


def multiply(
    x: Tensor, x_scales: Tensor, packed: PackedWeight, spec: LinearSpec, config: WideConfig, out: Tensor
) -> None:
    """out [M, N] = x @ weight.T.

    Args:
        x, x_scales: as from rows.quantize_rows in the order config.tokens.
        packed: a weight for which `supports` holds.
        out: [M, N] in spec.dtype, contiguous.
    """
    kernel(x.device, packed, spec, config).launch(
        (config.split, x.shape[0], -(-spec.rows // config.rows)),
        config.warpgroups * 128,
        (packed.codes, packed.scales, packed.zeros, x, x_scales, out, len(out), spec.rows, packed.chunks),
        shared_bytes=config.shared_bytes,
        cluster=(config.split, 1, 1) if config.split > 1 else None,
        overlap=True,
    )
