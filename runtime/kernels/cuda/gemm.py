"""Launch of gemm.cu: the product for more than a handful of tokens, with 16-bit or int8 activations, on Hopper.

Int4 weights with scale groups and int8 activations have two ways. The exact one sums each group apart in int32 and adds
the sums in float32. The progressive one (GemmConfig.progressive; progressive group quantization, Lin et al. 2024, arXiv
2405.04532) rounds every weight anew to 8 bits of the largest one that its row could have, so that one int32 sum serves
the row. With many tokens it takes two thirds of the time, and adds to each weight an error of at most half such a step.
On the default model's 210 layers that costs 0.5 to 1.0 % of the result (medians by kind), in each layer less than
rounding the activations to int8 does (1.4 to 6.5 %), where rounding the weights to int4 costs 8 to 18 %. Products of
more than EXACT_TOKENS take it where it is the faster.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qtool.runtime.kernels.cuda.driver import Kernel, load_kernel, num_sms
from qtool.runtime.kernels.cuda.layout import TILE_ROWS, PackedWeight, kernel_group
from qtool.runtime.kernels.cuda.maps import product_maps
from qtool.runtime.kernels.cuda.nvrtc import Macros
from qtool.runtime.kernels.cuda.skinny import weight_macros
from qtool.runtime.kernels.interface import LinearSpec

EXACT_TOKENS = 128  # up to which no weight is rounded anew
EVEN = 0

_SHARED_BYTES = 226 * 1024  # of a block, less what its barriers take
_LEAST_STAGES, _MOST_STAGES = 3, 8
_STEP_COLUMNS = 128
_TOKEN_STEP = 16  # of tiles
# Tokens whose sums fit the registers, by warpgroups: with 16-bit activations, with int8 ones, and where those have the
# sums of a scale group apart from those of all.
_WIDEST = {2: 256, 3: 192, 4: 128}
_WIDEST_INT8 = {2: 256, 3: 192, 4: 64}
_WIDEST_BY_GROUP = {2: 160, 3: 96, 4: 32}


@dataclass(frozen=True)
class _Costs:
    """Microseconds: of a step of 128 columns for each warpgroup, by tokens of a tile (of numbers between by
    interpolation); of a tile's beginning and its end; of tiles that blocks share, whose sums pass through memory.

    `longer`: times that a step of those takes, since blocks at different columns meet less in L2. `idle`: of a step's
    time, what a multiprocessor without a tile in the last round costs with many tokens, where others use its power."""

    steps: dict[int, float]
    tile: float
    share: float
    longer: float = 1.06
    idle: float = 1.0

    def step(self, tokens: int) -> float:
        low = max(t for t in self.steps if t <= tokens)
        high = min(t for t in self.steps if t >= tokens)
        part = (tokens - low) / (high - low) if high > low else 0.0
        return self.steps[low] * (1 - part) + self.steps[high] * part


# Measured on an H200. What `microseconds` finds best is slower than the best measured in the mean by 1.3 % (110
# products of 128 tokens and more with 16-bit activations, eight ways each) and 1 % (1,721 with int8).
_16_BITS = {16: 0.152, 32: 0.167, 64: 0.233, 96: 0.298, 128: 0.395, 160: 0.499, 192: 0.593, 224: 0.704, 256: 0.781}
_ONE_SUM = {16: 0.179, 32: 0.183, 64: 0.205, 96: 0.209, 128: 0.225, 160: 0.283, 192: 0.31, 224: 0.368, 256: 0.408}
_BY_GROUP = {16: 0.097, 32: 0.111, 64: 0.148, 96: 0.197, 128: 0.254, 160: 0.312}
_PROGRESSIVE = {96: 0.22, 128: 0.251, 160: 0.293, 192: 0.31, 224: 0.349, 256: 0.401}
_COSTS = {
    "16 bits": _Costs(_16_BITS, 2.7, 2.6, longer=1.15, idle=0.66),
    "one sum": _Costs(_ONE_SUM, 2.6, 7.7),
    "by group": _Costs(_BY_GROUP, 2.6, 7.7),
    "progressive": _Costs(_PROGRESSIVE, 2.6, 7.7),
}
_CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 8: 15}  # that it holds at once, by their blocks
_CLUSTER_BYTES_PER_US, _SHARE_BYTES_PER_US = 40_000, 60_000  # of the others' sums that a block gets, there or by L2
_FOUR_WARPGROUPS = 0.97  # of a step, for each: they share the activations that come to them
_MOST_BLOCKS = 160  # that share tiles; more multiprocessors than any Hopper has
_LAUNCHES = 64  # that share tiles and take turns, those of one stream needlessly; a captured one keeps its turn
_turns = itertools.cycle(range(_LAUNCHES))


def _room(size: int) -> int:
    """Of a step's scales or zero points: where a copy of each half, of gate and of up, may begin."""
    return 2 * (-(-size // 256) * 128)


@dataclass(frozen=True)
class Ring:
    """What a block has in shared memory ahead of its use: so many steps (STAGES) of so many columns (COLUMNS)."""

    columns: int
    stages: int
    stage_bytes: int


@dataclass(frozen=True)
class GemmConfig:
    """How the work is cut.

    Attributes:
        tokens: of a tile (TOKENS), a multiple of 16 up to 256.
        warpgroups: of a block that multiply, 64 rows of the weight each (CW), 2 to 4.
        split: blocks of a cluster with a share of K each (SPLIT): one of 1, 2, 3, 4, 5, 6, 8; EVEN: no clusters, and
            tiles that would leave part of the device idle in the last round are shared evenly by all blocks.
        progressive: see above (PROGRESSIVE); False for every scheme but int4 in groups with int8 activations.
    """

    tokens: int
    warpgroups: int
    split: int = 1
    progressive: bool = False

    @property
    def rows(self) -> int:
        """Of a block's tile."""
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        """Of a block: those that multiply, three warps that copy and one that tells of sums left."""
        return 128 * self.warpgroups + 128

    @property
    def _out_bytes(self) -> int:
        """Of results on their way to memory, so many tokens at a time (TURN_TOKENS); of the sums of a cluster's other
        blocks before."""
        if self.split > 1:
            finished = -(-self.tokens // 8 // self.split)  # times 8 tokens (OWN)
            return self.warpgroups * (self.split - 1) * finished * 2048
        together = 16 if self.tokens % 32 else 64 if self.tokens in (64, 128, 192) else 32
        return self.warpgroups * together * 128

    def ring(self, spec: LinearSpec) -> Ring:
        """Steps of 128 columns; of 64 where shared memory holds too few of them, or registers the weights of 32 columns
        only (int8 activations: never)."""
        group = kernel_group(spec.scheme)

        def ring_of(columns: int) -> Ring:
            pairs = self.rows // 2 * max(1, columns // group) if group else 0
            zeros = 0 if spec.scheme.symmetric else _room(pairs * 2)
            acts, codes = self.tokens * (spec.scheme.act_bits or 16) // 8, self.rows * spec.scheme.bits // 8
            size = columns * (acts + codes) + _room(pairs * 4) + zeros
            return Ring(columns, min(_MOST_STAGES, (_SHARED_BYTES - self._out_bytes) // size), size)

        whole = ring_of(_STEP_COLUMNS)
        short = whole.stages < _LEAST_STAGES or (self.warpgroups == 4 and self.tokens > 64)  # SLICES of gemm.cu
        return ring_of(_STEP_COLUMNS // 2) if short and not spec.scheme.act_bits else whole

    def shared_bytes(self, spec: LinearSpec) -> int:
        """Dynamic shared memory of a block: the ring, and results on their way."""
        ring = self.ring(spec)
        return ring.stages * ring.stage_bytes + self._out_bytes


def supports(spec: LinearSpec) -> bool:
    """Whether gemm.cu multiplies by such a weight: with int8 activations, codes less their zero points fit 8 bits."""
    return spec.scheme.act_bits is None or spec.scheme.symmetric or spec.scheme.bits == 4


def _kind(spec: LinearSpec, config: GemmConfig) -> str:
    """Of _COSTS."""
    if not spec.scheme.act_bits:
        return "16 bits"
    return "progressive" if config.progressive else "by group" if kernel_group(spec.scheme) else "one sum"


def _tiles(spec: LinearSpec, tokens: int, config: GemmConfig) -> int:
    return -(-spec.rows // config.rows) * -(-tokens // config.tokens)


def fits(spec: LinearSpec, config: GemmConfig) -> bool:
    """Whether the kernel multiplies by such a weight in this way, registers and shared memory hold it, and its cost is
    known."""
    scheme = spec.scheme
    if config.progressive and not (scheme.act_bits and scheme.bits == 4 and kernel_group(scheme)):
        return False
    kind = _kind(spec, config)
    widest = _WIDEST_BY_GROUP if kind == "by group" else _WIDEST_INT8 if scheme.act_bits else _WIDEST
    least = _LEAST_STAGES + (scheme.act_bits is not None and config.split > 3)  # with fewer half as fast
    return (
        supports(spec)
        and min(_COSTS[kind].steps) <= config.tokens <= min(max(_COSTS[kind].steps), widest[config.warpgroups])
        and config.ring(spec).stages >= least
        and config.shared_bytes(spec) <= _SHARED_BYTES
    )


@functools.cache
def ways(spec: LinearSpec) -> tuple[GemmConfig, ...]:
    """All ways to cut products by such a weight."""
    sizes, splits = range(_TOKEN_STEP, 257, _TOKEN_STEP), (EVEN, *_CLUSTERS)
    every = itertools.starmap(GemmConfig, itertools.product(sizes, _WIDEST, splits, (False, True)))
    return tuple(config for config in every if fits(spec, config))


def configs(spec: LinearSpec, tokens: int, num_sms: int = 132) -> list[GemmConfig]:
    """Ways to cut the product with so many tokens that fit registers and shared memory."""
    widest = -(-tokens // _TOKEN_STEP) * _TOKEN_STEP

    def sensible(config: GemmConfig) -> bool:
        whole = config.split == EVEN and _tiles(spec, tokens, config) % num_sms == 0
        return config.tokens <= widest and not whole and (tokens > EXACT_TOKENS or not config.progressive)

    return [config for config in ways(spec) if sensible(config)]


def blocks_and_rounds(tiles: int, steps: int, config: GemmConfig, num_sms: int) -> tuple[int, int]:
    """Blocks, and rounds in which each takes a whole tile of so many steps, of a cut without clusters; tiles beyond
    those are shared."""
    blocks = min(tiles, num_sms)
    if config.split != EVEN:
        return blocks, -(-tiles // blocks)
    if tiles < num_sms:
        return min(num_sms, tiles * steps), 0
    whole, left = divmod(tiles, blocks)
    return blocks, whole - (left > 0)  # those of the last full round are shared too: at least a tile for each block


def microseconds(spec: LinearSpec, tokens: int, config: GemmConfig, num_sms: int) -> float:
    """About what the product takes: the steps of a block by what a step takes, and beginnings and ends of tiles."""
    tiles, steps = _tiles(spec, tokens, config), -(-spec.cols // _STEP_COLUMNS)
    costs = _COSTS[_kind(spec, config)]
    step_us = config.warpgroups * costs.step(config.tokens) * (_FOUR_WARPGROUPS if config.warpgroups == 4 else 1.0)
    idle = costs.idle if tokens >= EXACT_TOKENS else 1.0

    def rounds_us(at_once: int, steps: int, end_us: float) -> float:
        rounds = -(-tiles // at_once)
        busy = idle * rounds + (1 - idle) * tiles / at_once
        return busy * steps * step_us + rounds * (costs.tile + end_us)

    if config.split <= 1:
        blocks, rounds = blocks_and_rounds(tiles, steps, config, num_sms)
        if rounds * blocks < tiles:
            parts = max(2.0, blocks / (tiles - rounds * blocks))  # of a tile: the first block reads all others' sums
            sums_us = (parts - 2) * config.tokens * config.rows * 4 / _SHARE_BYTES_PER_US
            shared_us = -(-(tiles - rounds * blocks) * steps // blocks) * step_us * costs.longer + costs.share + sums_us
            return rounds * steps * step_us + shared_us + (rounds + 1) * costs.tile
        return rounds_us(num_sms, steps, 0.0)
    sums_us = config.tokens * config.rows * 4 * (1 - 1 / config.split) / _CLUSTER_BYTES_PER_US
    return rounds_us(max(1, _CLUSTERS[config.split] * num_sms // 132), -(-steps // config.split), sums_us)


def candidates(spec: LinearSpec, tokens: int, num_sms: int, most: int = 5) -> list[GemmConfig]:
    """The ways to cut the product that should take the least time, first the one that should take least of all."""
    return sorted(configs(spec, tokens, num_sms), key=lambda c: microseconds(spec, tokens, c, num_sms))[:most]


def for_more(spec: LinearSpec, tokens: int, config: GemmConfig, num_sms: int) -> GemmConfig:
    """The same kernel for other numbers of tokens: only whether the last tiles are shared may differ."""
    if config.split > 1:
        return config
    either = (replace(config, split=1), replace(config, split=EVEN))
    return min(either, key=lambda way: microseconds(spec, tokens, way, num_sms))


def gates(spec: LinearSpec) -> bool:
    """Whether the kernel leaves silu(gate) * up of a weight that is gate and up one below the other, in whole tiles."""
    return spec.rows % (2 * TILE_ROWS) == 0


def macros(
    spec: LinearSpec, scale_dtype: torch.dtype, config: GemmConfig, *, gated: bool = False, powers: bool = True
) -> Macros:
    """All macros of gemm.cu for one product; `powers`: the weight has PackedWeight.powers, if any of its spec does."""
    fused = not spec.scheme.act_bits and (not kernel_group(spec.scheme) or (spec.scheme.symmetric and powers))
    return weight_macros(spec, scale_dtype) | {
        "FUSED": int(fused),
        "PROGRESSIVE": int(config.progressive),
        "TOKENS": config.tokens,
        "CW": config.warpgroups,
        "GATED": int(gated),
        "SPLIT": max(1, config.split),
        "COLUMNS": config.ring(spec).columns,
        "STAGES": config.ring(spec).stages,
        "BLOCKS": _MOST_BLOCKS,
        "LAUNCHES": _LAUNCHES,
    }


def kernel(
    device: torch.device, packed: PackedWeight, spec: LinearSpec, config: GemmConfig, *, gated: bool = False
) -> Kernel:
    """The compiled kernel. Raises QtoolError as load_kernel does."""
    chosen = macros(spec, packed.scales.dtype, config, gated=gated, powers=len(packed.powers) > 0)
    return load_kernel(device, "gemm.cu", "gemm", chosen, shared_limit=config.shared_bytes(spec))


def multiply(
    x: Tensor,
    x_scales: Tensor | None,
    packed: PackedWeight,
    spec: LinearSpec,
    config: GemmConfig,
    out: Tensor,
    *,
    gated: bool = False,
) -> None:
    """out [M, N] = x [M, K'] @ weight.T.

    Args:
        x: as layout.arrange_activations gives it, in spec.dtype with x_scales None, or int8 and x_scales [M] as from
            rows.quantize_rows; K' = 64 packed.chunks.
        packed: a weight of a spec for which `supports` holds.
        out: [M, N] in spec.dtype, contiguous, 16-byte aligned; [M, N / 2] where `gated`.
        gated: the weight, for which `gates` holds, is gate and up, and out = silu(gate) * up.
    """
    ring, tiles = config.ring(spec), _tiles(spec, len(x), config)
    blocks, rounds, turn, room = tiles, 1, 0, out
    if config.split <= 1:
        steps = -(-x.shape[1] // ring.columns)
        blocks, rounds = blocks_and_rounds(tiles, steps, config, min(num_sms(x.device.index), _MOST_BLOCKS))
    if rounds * blocks < tiles:
        turn = next(_turns)
        room = torch.empty(blocks * config.rows * config.tokens, dtype=torch.float32, device=x.device)
    sizes = (len(x), spec.rows, packed.chunks, rounds, turn)
    box, words = config.rows // TILE_ROWS // (2 if gated else 1), 32 * spec.scheme.bits  # of 16 rows and 64 columns
    maps = product_maps(x, packed, spec, tokens=config.tokens, tiles=box, code_words=words, step_columns=ring.columns)
    scales = x if x_scales is None else x_scales
    kernel(x.device, packed, spec, config, gated=gated).launch(
        (max(1, config.split), blocks, 1),
        config.threads,
        (packed.scales, packed.zeros, packed.powers, scales, out, room, *sizes, maps),
        shared_bytes=config.shared_bytes(spec),
        cluster=(config.split, 1, 1) if config.split > 1 else None,
        overlap=True,
    )
