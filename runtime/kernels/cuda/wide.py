"""Launch of wide.cu: the product for tens to hundreds of tokens, on Hopper's warpgroup tensor cores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.runtime.kernels.cuda.driver import Kernel, load_kernel
from qtool.runtime.kernels.cuda.layout import CHUNK_COLS, PackedWeight
from qtool.runtime.kernels.cuda.nvrtc import Macros
from qtool.runtime.kernels.cuda.rows import quantize_rows
from qtool.runtime.kernels.cuda.skinny import weight_macros
from qtool.runtime.kernels.interface import LinearSpec

_ARRANGE_THREADS = 128  # of a block, as in arrange.cu


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

    def shared_bytes(self, act_bits: int) -> int:
        """Dynamic shared memory: the stages of activations, later the block's float32 sums."""
        return max(self.stages * self.tokens * 16 * act_bits, self.tokens * (self.rows + 4) * 4)


def supports(packed: PackedWeight, spec: LinearSpec) -> bool:
    """Whether wide.cu multiplies by this weight: whole steps of 128 columns; int8 activations: symmetric codes."""
    return packed.chunks % 2 == 0 and (not spec.scheme.act_bits or spec.scheme.symmetric)


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
    return load_kernel(device, "wide.cu", "wide", chosen, shared_limit=config.shared_bytes(spec.scheme.act_bits or 16))


def arrange(x: Tensor, tokens: int) -> Tensor:
    """x [M, K] in the order in which wide.cu reads it, K a multiple of 64. [blocks of `tokens`, K / 64, tokens, 64]"""
    chunks = x.shape[1] // CHUNK_COLS
    blocks = -(-x.shape[0] // tokens)
    out = torch.empty(blocks, chunks, tokens, CHUNK_COLS, dtype=x.dtype, device=x.device)
    constants = {"TOKENS": tokens, "BF16": 0, "WEIGHT_BITS": 4}
    load_kernel(x.device, "arrange.cu", "arrange", constants).launch(
        (-(-chunks * 8 // _ARRANGE_THREADS), blocks * tokens, 1),  # a thread for every 16 bytes
        _ARRANGE_THREADS,
        (x, out, x.shape[0], chunks),
        overlap=True,
    )
    return out


def prepare(x: Tensor, spec: LinearSpec, tokens: int) -> tuple[Tensor, Tensor]:
    """x [M, K] in the order of wide.cu and gemm.cu for tiles of so many tokens, and its scales [M] float32, which are
    not read with 16-bit activations."""
    if spec.scheme.act_bits:
        rows = quantize_rows(x, tokens)
        return rows.codes, rows.scales
    arranged = arrange(x, tokens)
    return arranged, arranged


def multiply(
    x: Tensor, x_scales: Tensor, packed: PackedWeight, spec: LinearSpec, config: WideConfig, out: Tensor
) -> None:
    """out [M, N] = x @ weight.T.

    Args:
        x, x_scales: from prepare.
        packed: a weight for which `supports` holds.
        out: [M, N] in spec.dtype, contiguous.
    """
    kernel(x.device, packed, spec, config).launch(
        (config.split, x.shape[0], -(-spec.rows // config.rows)),
        config.warpgroups * 128,
        (packed.codes, packed.scales, packed.zeros, x, x_scales, out, len(out), spec.rows, packed.chunks),
        shared_bytes=config.shared_bytes(spec.scheme.act_bits or 16),
        cluster=(config.split, 1, 1) if config.split > 1 else None,
        overlap=True,
    )
