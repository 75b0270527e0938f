"""Launch of skinny.cu: the product for few tokens, bound by reading the weights once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.runtime.kernels.cuda.driver import Kernel, has_clusters, load_kernel
from qtool.runtime.kernels.cuda.layout import TILE_ROWS, PackedWeight, kernel_group
from qtool.runtime.kernels.cuda.nvrtc import Macros
from qtool.runtime.kernels.interface import LinearSpec

MAX_TOKENS = 64
_GATED_WARPS = 20  # that an SM holds at least: at most 102 registers, of which 71 to 80 are used


@dataclass(frozen=True)
class SkinnyConfig:
    """How the work is cut.

    Attributes:
        tiles: 16-row tiles of a block (NT).
        warps: of a block, each with a share of K (KW).
        split: blocks of a cluster, each with a share of K (SK); 1 before Hopper.
        prefetch: steps whose weights are in flight (PF).
        prefetch_x: whether their activations are too (XPF).
        min_blocks: blocks an SM must be able to hold; bounds the registers (MINB).
    """

    tiles: int
    warps: int
    split: int = 1
    prefetch: int = 2
    prefetch_x: bool = False
    min_blocks: int = 1

    def shared_bytes(self, tokens: int) -> int:
        """Dynamic shared memory: one partial sum a warp, one more to share within a cluster."""
        return (self.warps + (self.split > 1)) * tokens * self.tiles * 16 * 4


def token_tiles(tokens: int) -> int:
    """8-token tiles of the kernel that serves `tokens`: 1, 2, 4 or 8."""
    return next(m for m in (1, 2, 4, 8) if tokens <= 8 * m)


def weight_macros(spec: LinearSpec, scale_dtype: torch.dtype) -> dict[str, int]:
    """The macros that say what the weight is, common to all kernels that read it."""
    return {
        "WEIGHT_BITS": spec.scheme.bits,
        "ACT_BITS": spec.scheme.act_bits or 16,
        "BF16": int(spec.dtype == torch.bfloat16),
        "SCALE_BF16": int(scale_dtype == torch.bfloat16),
        "GROUP": kernel_group(spec.scheme) or 0,
        "ASYM": int(not spec.scheme.symmetric),
    }


def gates(spec: LinearSpec, tokens: int, config: SkinnyConfig) -> bool:
    """Whether the kernel leaves silu(gate) * up of a weight that is gate and up one below the other.

    That spares a kernel where what follows takes 16 bits; for int8 some kernel has to see the whole row anyway.
    """
    whole = spec.rows % (2 * TILE_ROWS) == 0 and config.tiles == 2
    return whole and tokens <= 8 and not spec.scheme.act_bits


def macros(
    spec: LinearSpec, scale_dtype: torch.dtype, chunks: int, tokens: int, config: SkinnyConfig, *, gated: bool = False
) -> Macros:
    """All macros of skinny.cu for one product."""
    return weight_macros(spec, scale_dtype) | {
        "CH": 2 if chunks % 2 == 0 else 1,
        "MT": token_tiles(tokens),
        "NT": config.tiles,
        "KW": config.warps,
        "SK": config.split,
        "PF": config.prefetch,
        "XPF": int(config.prefetch_x),
        # with the last step behind the loop the compiler would take registers that leave room for fewer blocks
        "MINB": max(config.min_blocks, -(-_GATED_WARPS // config.warps)) if gated else config.min_blocks,
        "GATED": int(gated),
    }


def kernel(
    device: torch.device,
    packed: PackedWeight,
    spec: LinearSpec,
    tokens: int,
    config: SkinnyConfig,
    *,
    gated: bool = False,
) -> Kernel:
    """The compiled kernel for `tokens` activations of this weight. Raises QtoolError as load_kernel does."""
    limit = config.shared_bytes(8 * token_tiles(tokens))
    chosen = macros(spec, packed.scales.dtype, packed.chunks, tokens, config, gated=gated)
    overlaps = has_clusters(torch.cuda.current_device() if device.index is None else device.index)
    # A 7B model at one request makes 718 tokens a second in w4a8 with little L1 and 692 without, but 432 and 448 in
    # w8a8; and activations of more tokens are read from there (8B down, 8 tokens, w4a8: 9.1 and 8.7 microseconds).
    little = overlaps and tokens == 1 and spec.scheme.bits == 4
    return load_kernel(device, "skinny.cu", "skinny", chosen, shared_limit=limit, little_l1=little)


def multiply(
    x: Tensor,
    x_scales: Tensor | None,
    packed: PackedWeight,
    spec: LinearSpec,
    config: SkinnyConfig,
    out: Tensor,
    *,
    gated: bool = False,
) -> None:
    """out [M, N] = x [M, K'] @ weight.T for 1 <= M <= 64.

    Args:
        x: in spec.dtype with x_scales None, or int8 and x_scales [M] as from rows.quantize_rows.
        packed: the weight; K' = 64 packed.chunks.
        out: [M, N] in spec.dtype, contiguous; [M, N / 2] where `gated`.
        gated: the weight, for which `gates` holds, is gate and up, and out = silu(gate) * up.
    """
    tokens = x.shape[0]
    steps = packed.chunks // (2 if packed.chunks % 2 == 0 else 1)
    blocks = -(-packed.tiles // config.tiles)
    kernel(x.device, packed, spec, tokens, config, gated=gated).launch(
        (blocks, config.split, 1),
        config.warps * 32,
        (
            packed.codes,
            packed.scales,
            packed.zeros,
            x,
            x if x_scales is None else x_scales,
            out,
            tokens,
            spec.rows,
            steps,
        ),
        shared_bytes=config.shared_bytes(tokens),
        cluster=(1, config.split, 1) if config.split > 1 else None,
        overlap=has_clusters(x.device.index),
    )
