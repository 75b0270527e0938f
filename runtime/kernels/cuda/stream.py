"""Launch of stream.cu: the product of few tokens of 16-bit activations on Hopper, bound by reading the weights once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.runtime.kernels.cuda.driver import Kernel, load_kernel
from qtool.runtime.kernels.cuda.layout import CHUNK_COLS, TILE_ROWS, PackedWeight, kernel_group
from qtool.runtime.kernels.cuda.maps import product_maps
from qtool.runtime.kernels.cuda.nvrtc import Macros
from qtool.runtime.kernels.cuda.skinny import token_tiles, weight_macros
from qtool.runtime.kernels.interface import LinearSpec

MAX_TOKENS = 16
STEP_COLUMNS = 128  # that a warp multiplies at a time
_CODE_WORDS = 256  # 32-bit, of a tile in one copy
# Of an SM:
_SHARED_BYTES = 228 * 1024
_SYSTEM_BYTES = 1024  # of them, for each block
_REGISTERS = 65536
_THREADS = 2048


def _round(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class StreamConfig:
    """How the work is cut.

    Attributes:
        tiles: 16-row tiles of a block (NT).
        warps: of a block, each with a share of K and a ring of its own (KW).
        prefetch: steps of 128 columns in a ring (PF).
    """

    tiles: int
    warps: int
    prefetch: int = 2

    @property
    def paired(self) -> StreamConfig:
        """With as many tiles of gate as of up."""
        return dataclasses.replace(self, tiles=self.tiles // 2 * 2)

    def shared_bytes(self, spec: LinearSpec, tokens: int, *, gated: bool = False) -> int:
        """Dynamic shared memory of a block: the rings and a barrier a slot; room enough for the sums that follow."""
        group, parts = kernel_group(spec.scheme), 2 if gated else 1
        pairs = self.tiles * 8 * (STEP_COLUMNS // group) if group else 0

        def room(size: int) -> int:
            return parts * _round(size // parts, 128)

        acts, codes = token_tiles(tokens) * 2048, self.tiles * spec.scheme.bits * 256
        zeros = 0 if spec.scheme.symmetric else room(pairs * 2)
        return self.warps * self.prefetch * (acts + codes + room(pairs * 4) + zeros + 8)

    def resident(self, spec: LinearSpec, tokens: int, *, gated: bool = False) -> int:
        """Blocks that an SM should hold at once; 0: it cannot hold one."""
        registers = _round((4 * self.tiles + 24) * token_tiles(tokens) + 46, 8)  # sums, activations, the rest
        threads = self.warps * 32
        by_shared = _SHARED_BYTES // (self.shared_bytes(spec, tokens, gated=gated) + _SYSTEM_BYTES)
        return min(by_shared, _REGISTERS // (registers * threads), _THREADS // threads)


# By number of tokens: cuts of which one, or one of skinny.cu, is within 3 % of the fastest of an exhaustive search (23
# to 72 cuts) on an H200, for each linear layer of a 7B and an 8B model in w4g128.
_CUTS = {
    8: ((2, 16, 2), (2, 8, 2), (2, 8, 3), (3, 8, 2), (3, 12, 2), (4, 8, 2), (4, 4, 3), (5, 4, 2)),
    16: ((2, 16, 2), (2, 12, 2), (2, 8, 2), (1, 8, 2), (2, 4, 3), (3, 8, 1), (3, 8, 2), (4, 4, 2), (5, 4, 2)),
}


def fits(spec: LinearSpec, tokens: int, config: StreamConfig) -> bool:
    """Whether an SM holds such a block, and the layer has steps enough for all its rings."""
    enough = config.warps * config.prefetch <= -(-spec.cols // STEP_COLUMNS)
    return tokens <= MAX_TOKENS and enough and config.resident(spec, tokens) > 0


def candidates(spec: LinearSpec, tokens: int) -> list[StreamConfig]:
    """Ways to cut the product; none for more than MAX_TOKENS."""
    cuts = next((cuts for most, cuts in _CUTS.items() if tokens <= most), ())
    return [config for cut in cuts if fits(spec, tokens, config := StreamConfig(*cut))]


def gates(spec: LinearSpec, tokens: int, config: StreamConfig) -> bool:
    """Whether the kernel leaves silu(gate) * up of a weight that is gate and up one below the other (skinny.gates)."""
    whole = spec.rows % (2 * TILE_ROWS) == 0 and config.tiles > 1
    return whole and tokens <= MAX_TOKENS and config.paired.resident(spec, tokens, gated=True) > 0


def macros(
    spec: LinearSpec, scale_dtype: torch.dtype, tokens: int, config: StreamConfig, *, gated: bool = False
) -> Macros:
    """All macros of stream.cu for one product."""
    config = config.paired if gated else config
    return weight_macros(spec, scale_dtype) | {
        "MT": token_tiles(tokens),
        "NT": config.tiles,
        "KW": config.warps,
        "PF": config.prefetch,
        "MINB": config.resident(spec, tokens, gated=gated),
        "GATED": int(gated),
    }


def kernel(
    device: torch.device,
    packed: PackedWeight,
    spec: LinearSpec,
    tokens: int,
    config: StreamConfig,
    *,
    gated: bool = False,
) -> Kernel:
    """The compiled kernel. Raises QtoolError as load_kernel does."""
    chosen = macros(spec, packed.scales.dtype, tokens, config, gated=gated)
    limit = config.shared_bytes(spec, tokens, gated=gated)
    return load_kernel(device, "stream.cu", "stream", chosen, shared_limit=limit)


def multiply(
    x: Tensor, packed: PackedWeight, spec: LinearSpec, config: StreamConfig, out: Tensor, *, gated: bool = False
) -> None:
    """out [M, N] = x [M, K'] @ weight.T for 1 <= M <= 16.

    Args:
        x: in spec.dtype, as layout.arrange_activations gives it; K' = 64 packed.chunks.
        packed: a weight for 16-bit activations.
        out: [M, N] in spec.dtype, contiguous; [M, N / 2] where `gated`.
        gated: the weight, for which `gates` holds, is gate and up, and out = silu(gate) * up.
    """
    if gated:
        config = config.paired
    tokens, steps = len(x), -(-packed.chunks * CHUNK_COLS // STEP_COLUMNS)
    tiles = config.tiles // 2 if gated else config.tiles
    maps = product_maps(x, packed, spec, tokens=tokens, tiles=tiles, code_words=_CODE_WORDS, step_columns=STEP_COLUMNS)
    kernel(x.device, packed, spec, tokens, config, gated=gated).launch(
        (-(-packed.tiles // config.tiles), 1, 1),
        config.warps * 32,
        (packed.scales, packed.zeros, out, tokens, spec.rows, steps, maps),
        shared_bytes=config.shared_bytes(spec, tokens, gated=gated),
        overlap=True,
    )
