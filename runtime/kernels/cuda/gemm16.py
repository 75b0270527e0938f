"""Launch of gemm16.cu: the product with 16-bit activations for more than a handful of tokens, on Hopper."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.runtime.kernels.cuda.driver import Kernel, load_kernel, num_sms, tensor_map
from qtool.runtime.kernels.cuda.layout import CHUNK_COLS, TILE_ROWS, PackedWeight, kernel_group
from qtool.runtime.kernels.cuda.nvrtc import Macros
from qtool.runtime.kernels.cuda.skinny import weight_macros
from qtool.runtime.kernels.interface import LinearSpec

_SHARED_BYTES = 226 * 1024  # of a block, less what its barriers take
_MOST_STAGES = 8
_STEP_COLUMNS = 128
_TOKENS = (16, 32, 64, 96, 128, 192)
_WIDEST = {2: 192, 3: 192, 4: 64}  # tokens whose sums fit the registers, by warpgroups
# Measured on an H200. Clusters that it holds at once, by their blocks (its processing clusters differ in size);
# microseconds of a step for each warpgroup, by tokens: up to 64 bound by issue slots, then by the tensor cores.
_CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 8: 15}
_STEP_US = {16: 0.165, 32: 0.167, 64: 0.205, 96: 0.262, 128: 0.33, 192: 0.55}
_TILE_US = 2.7  # its beginning and its end


def _round(size: int) -> int:
    return -(-size // 128) * 128


@dataclass(frozen=True)
class Gemm16Config:
    """How the work is cut.

    Attributes:
        tokens: of a tile (TOKENS): 16, or a multiple of 32 up to 256.
        warpgroups: of a block that multiply, 64 rows of the weight each (CW), 2 to 4.
        split: blocks of a cluster with a share of K each (SPLIT): one of 1, 2, 3, 4, 5, 6, 8.
    """

    tokens: int
    warpgroups: int
    split: int = 1

    @property
    def rows(self) -> int:
        """Of a block's tile."""
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        """Of a block: those that multiply, and four warps that copy."""
        return 128 * self.warpgroups + 128

    @property
    def _out_bytes(self) -> int:
        return self.warpgroups * min(64, self.tokens) * 128 if self.split == 1 else 0

    def _stage_bytes(self, spec: LinearSpec) -> int:
        group = kernel_group(spec.scheme)
        pairs = self.rows // 2 * (_STEP_COLUMNS // group) if group else 0
        zeros = 0 if spec.scheme.symmetric else _round(pairs * 2)
        return _STEP_COLUMNS * (self.tokens * 2 + self.rows * spec.scheme.bits // 8) + _round(pairs * 4) + zeros

    def stages(self, spec: LinearSpec) -> int:
        """Steps in shared memory (STAGES)."""
        return min(_MOST_STAGES, (_SHARED_BYTES - self._out_bytes) // self._stage_bytes(spec))

    def shared_bytes(self, spec: LinearSpec) -> int:
        """Dynamic shared memory of a block: the ring and results on their way, or float32 sums of a cluster."""
        sums = self.tokens * (self.rows + 4) * 4 if self.split > 1 else 0
        return max(self.stages(spec) * self._stage_bytes(spec) + self._out_bytes, sums)


def configs(spec: LinearSpec, tokens: int) -> list[Gemm16Config]:
    """Ways to cut the product with so many tokens that fit registers and shared memory."""
    found = []
    for size, warpgroups, split in itertools.product(_TOKENS, _WIDEST, _CLUSTERS):
        config = Gemm16Config(size, warpgroups, split)
        needed = size == _TOKENS[0] or size < 2 * tokens
        fits = size <= _WIDEST[warpgroups] and config.stages(spec) >= 3 and config.shared_bytes(spec) <= _SHARED_BYTES
        if needed and fits:
            found.append(config)
    return found


def _tiles(spec: LinearSpec, tokens: int, config: Gemm16Config) -> int:
    return -(-spec.rows // config.rows) * -(-tokens // config.tokens)


def microseconds(spec: LinearSpec, tokens: int, config: Gemm16Config, num_sms: int) -> float:
    """About what the product takes: rounds over the device by what a tile takes."""
    rounds = -(-_tiles(spec, tokens, config) // max(1, _CLUSTERS[config.split] * num_sms // 132))
    steps = -(-spec.cols // (_STEP_COLUMNS * config.split))
    meeting = 0.5 + config.tokens / 100 if config.split > 1 else 0.0
    return rounds * (steps * config.warpgroups * _STEP_US[config.tokens] + _TILE_US + meeting)


def candidates(spec: LinearSpec, tokens: int, num_sms: int, most: int = 5) -> list[Gemm16Config]:
    """The ways to cut the product that should take the least time, first the one that should take least of all."""
    return sorted(configs(spec, tokens), key=lambda c: microseconds(spec, tokens, c, num_sms))[:most]


def macros(spec: LinearSpec, scale_dtype: torch.dtype, config: Gemm16Config) -> Macros:
    """All macros of gemm16.cu for one product."""
    return weight_macros(spec, scale_dtype) | {
        "TOKENS": config.tokens,
        "CW": config.warpgroups,
        "SPLIT": config.split,
        "STAGES": config.stages(spec),
    }


def kernel(device: torch.device, packed: PackedWeight, spec: LinearSpec, config: Gemm16Config) -> Kernel:
    """The compiled kernel. Raises QtoolError as load_kernel does."""
    chosen = macros(spec, packed.scales.dtype, config)
    return load_kernel(device, "gemm16.cu", "gemm16", chosen, shared_limit=config.shared_bytes(spec))


def _maps(x: Tensor, packed: PackedWeight, spec: LinearSpec, config: Gemm16Config) -> bytes:
    """The kernel's descriptions of activations, codes, scales and zero points (Maps); unused ones are zeros."""
    columns, box_tiles = packed.chunks * CHUNK_COLS, config.rows // TILE_ROWS
    acts = tensor_map(x.data_ptr(), len(x), columns, config.tokens, CHUNK_COLS, 2, swizzle=True)
    words = 32 * spec.scheme.bits  # of 16 rows of half a step
    codes = tensor_map(packed.codes.data_ptr(), packed.tiles, packed.chunks * words, box_tiles, words, 4)
    scales = zeros = bytes(len(codes))
    if group := kernel_group(spec.scheme):
        pairs, box_pairs = columns // group * 8, 8 * (_STEP_COLUMNS // group)
        scales = tensor_map(packed.scales.data_ptr(), packed.tiles, pairs, box_tiles, box_pairs, 4)
        if not spec.scheme.symmetric:
            zeros = tensor_map(packed.zeros.data_ptr(), packed.tiles, pairs, box_tiles, box_pairs, 2)
    return acts + codes + scales + zeros


def multiply(x: Tensor, packed: PackedWeight, spec: LinearSpec, config: Gemm16Config, out: Tensor) -> None:
    """out [M, N] = x [M, K'] @ weight.T.

    Args:
        x: in spec.dtype, as layout.arrange_activations gives it; K' = 64 packed.chunks.
        packed: a weight for 16-bit activations.
        out: [M, N] in spec.dtype, contiguous, 16-byte aligned.
    """
    tiles, slots = _tiles(spec, len(x), config), num_sms(x.device.index)
    whole = config.split == 1  # blocks take tiles in turn
    kernel(x.device, packed, spec, config).launch(
        (config.split, min(tiles, slots) if whole else tiles, 1),
        config.threads,
        (packed.scales, packed.zeros, out, len(x), spec.rows, packed.chunks, _maps(x, packed, spec, config)),
        shared_bytes=config.shared_bytes(spec),
        cluster=None if whole else (config.split, 1, 1),
        overlap=True,
    )
