"""Launch of wide.cu: the product for tens to hundreds of tokens, on Hopper's warpgroup tensor cores."""

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
        tokens: of a block: 32, 64 or 128.
        warpgroups: of a block (WG), 128 threads each.
        tiles: 64-row tiles of a warpgroup (NT).
        split: blocks of a cluster, each with a share of K (SK).
        prefetch: chunks of 64 columns in flight (PF).
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
    def shared_bytes(self) -> int:
        """Dynamic shared memory: two stages of activations, later the block's float32 sums."""
        return max(2 * self.tokens * 128, self.tokens * (self.rows + 4) * 4)


def macros(spec: LinearSpec, scale_dtype: torch.dtype, config: WideConfig) -> Macros:
    """All macros of wide.cu for one product."""
    return weight_macros(spec, scale_dtype) | {
        "TOKENS": config.tokens,
        "WG": config.warpgroups,
        "NT": config.tiles,
        "SK": config.split,
        "PF": config.prefetch,
        "MINB": config.min_blocks,
    }


def kernel(device: torch.device, packed: PackedWeight, spec: LinearSpec, config: WideConfig) -> Kernel:
    """The compiled kernel. Raises QtoolError as load_kernel does."""
    chosen = macros(spec, packed.scales.dtype, config)
    return load_kernel(device, "wide.cu", "wide", chosen, shared_limit=config.shared_bytes)


def multiply(x: Tensor, packed: PackedWeight, spec: LinearSpec, config: WideConfig, out: Tensor) -> None:
    """out [M, N] = x [M, 64 packed.chunks] @ weight.T, both in spec.dtype and contiguous; 16-bit activations."""
    tokens = x.shape[0]
    blocks = -(-spec.rows // config.rows)
    kernel(x.device, packed, spec, config).launch(
        (config.split, -(-tokens // config.tokens), blocks),
        config.warpgroups * 128,
        (packed.codes, packed.scales, packed.zeros, x, out, tokens, spec.rows, packed.chunks),
        shared_bytes=config.shared_bytes,
        cluster=(config.split, 1, 1) if config.split > 1 else None,
        overlap=True,
    )
