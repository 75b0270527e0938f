"""Measure every sensible way to cut one linear layer's product and keep the fastest, per number of tokens."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from qtool.quant.errors import QtoolError
from qtool.quant.progress import ProgressFn, silent
from qtool.quant.weight import QuantizedWeight
from qtool.runtime.kernels.cuda import dequantize, gemm, skinny, stream
from qtool.runtime.kernels.cuda.choice import Choice, key
from qtool.runtime.kernels.cuda.driver import arch_of
from qtool.runtime.kernels.cuda.layout import PackedWeight, arrange_activations, pack_weight
from qtool.runtime.kernels.cuda.linear import multiply, ready
from qtool.runtime.kernels.cuda.precompile import compile_job, job_of
from qtool.runtime.kernels.cuda.skinny import SkinnyConfig
from qtool.runtime.kernels.cuda.timing import calls_of, copies, in_turns, settling
from qtool.runtime.kernels.interface import LinearSpec

_WRONG = 0.02  # relative difference from the dequantized product that no rounding explains
_TURNS = 3  # of all candidates, whose medians count

_SHARED_BYTES = 220_000  # of an SM, for all its blocks

# By number of tokens: the smallest set of cuts that holds, for each linear layer of a 7B model and each of w4g128,
# w4g128a8 and w8a8, one within 1.5 % of the fastest of an exhaustive search (40 to 240 cuts) on an H200; small cuts for
# small layers; and those that were the fastest of later searches.
_SKINNY = {
    8: (
        SkinnyConfig(2, 16, prefetch=1),
        SkinnyConfig(2, 8, prefetch=1, min_blocks=3),
        SkinnyConfig(2, 8, prefetch=2, prefetch_x=True, min_blocks=3),
        SkinnyConfig(2, 16, prefetch=2, prefetch_x=True),
        SkinnyConfig(3, 16, prefetch=2, prefetch_x=True),
        SkinnyConfig(3, 8, prefetch=2, prefetch_x=True),
        SkinnyConfig(3, 16, prefetch=1),
        SkinnyConfig(3, 8, prefetch=1),
        SkinnyConfig(3, 4, prefetch=2, prefetch_x=True),
        SkinnyConfig(2, 4, prefetch=1),
        SkinnyConfig(2, 8, prefetch=1),
        SkinnyConfig(2, 16, prefetch=2),
        SkinnyConfig(1, 16, prefetch=1),
        SkinnyConfig(1, 16, prefetch=1, prefetch_x=True),
        SkinnyConfig(1, 8, prefetch=1),
        SkinnyConfig(1, 4, prefetch=2),
    ),
    16: (
        SkinnyConfig(2, 16, prefetch=1),
        SkinnyConfig(2, 4, prefetch=2, prefetch_x=True),
        SkinnyConfig(2, 16, prefetch=1, prefetch_x=True),
        SkinnyConfig(2, 8, prefetch=1),
        SkinnyConfig(4, 4, prefetch=1),
        SkinnyConfig(4, 4, prefetch=1, min_blocks=4),
        SkinnyConfig(2, 4, prefetch=4),
        SkinnyConfig(2, 8, 2, prefetch=1, min_blocks=2),
        SkinnyConfig(1, 8, prefetch=1),
        SkinnyConfig(2, 8, prefetch=1, min_blocks=3),
        SkinnyConfig(3, 8, prefetch=1),
    ),
    32: (
        SkinnyConfig(2, 4, prefetch=1),
        SkinnyConfig(2, 8, 2, prefetch=1, prefetch_x=True),
        SkinnyConfig(1, 8, prefetch=2),
        SkinnyConfig(2, 8, 2, prefetch=1),
        SkinnyConfig(1, 4, 2, prefetch=2),
        SkinnyConfig(1, 4, prefetch=1, prefetch_x=True),
        SkinnyConfig(4, 4, prefetch=1, prefetch_x=True),
    ),
    64: (
        SkinnyConfig(1, 4, 2, prefetch=2),
        SkinnyConfig(1, 4, prefetch=4),
        SkinnyConfig(2, 4, prefetch=1, prefetch_x=True),
        SkinnyConfig(1, 8, prefetch=1, prefetch_x=True),
        SkinnyConfig(1, 4, 2, prefetch=1, prefetch_x=True),
    ),
}


@dataclass(frozen=True)
class Timing:
    """One way to cut one product: microseconds (infinite where it failed), the relative difference from the
    dequantized product, and why it must not be used (None: it may)."""

    choice: Choice
    microseconds: float
    difference: float
    problem: str | None = None


def skinny_candidates(spec: LinearSpec, tokens: int, clusters: bool) -> Iterator[SkinnyConfig]:
    """Ways to cut skinny.cu: those of _SKINNY that fit the layer and the device."""
    chunks = -(-spec.cols // 64)
    steps = chunks // 2 if chunks % 2 == 0 else chunks
    bucket = next(b for b in _SKINNY if tokens <= b)
    for config in _SKINNY[bucket]:
        fits = config.shared_bytes(8 * skinny.token_tiles(tokens)) * config.min_blocks <= _SHARED_BYTES
        if fits and config.prefetch <= -(-steps // config.warps) and (clusters or config.split == 1):
            yield config


def candidates(spec: LinearSpec, tokens: int, device: torch.device) -> list[Choice]:
    """All ways worth measuring on `device`."""
    properties = torch.cuda.get_device_properties(device)
    hopper = (properties.major, properties.minor) == (9, 0)
    found: list[Choice] = []
    if tokens <= (skinny.MAX_TOKENS if spec.scheme.act_bits or not hopper else 32):
        found += skinny_candidates(spec, tokens, properties.major >= 9)
    if hopper and not spec.scheme.act_bits:
        found += stream.candidates(spec, tokens)
    if hopper and tokens > 8:
        found += gemm.candidates(spec, tokens, properties.multi_processor_count)
    if tokens > 16:
        found.append(None)
    return found


def precompile(
    jobs: Iterable[tuple[LinearSpec, int, Choice]], device: torch.device, progress: ProgressFn = silent
) -> None:
    """Compile the kernels of many (spec, tokens, choice) into the disk cache, one process a core.

    Raises:
        QtoolError: a kernel does not compile.
    """
    arch = arch_of(torch.cuda.current_device() if device.index is None else device.index)
    found = (job_of(spec, torch.float16, -(-spec.cols // 64), tokens, choice) for spec, tokens, choice in jobs)
    unique = dict.fromkeys(job for job in found if job is not None)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        work = pool.map(partial(compile_job, arch), unique, chunksize=4)
        for done, _ in enumerate(work):
            progress("compile kernels", done + 1, len(unique))


def random_weight(spec: LinearSpec, seed: int = 0) -> QuantizedWeight:
    """A random weight of the spec on the current CUDA device, of about unit gain (float16 scales)."""
    generator = torch.Generator("cuda").manual_seed(seed)
    scheme, groups = spec.scheme, spec.scheme.num_groups(spec.cols)
    levels = 1 << scheme.bits
    codes = torch.randint(0, levels, (spec.rows, spec.cols), generator=generator, dtype=torch.uint8, device="cuda")
    scale = torch.rand(spec.rows, groups, generator=generator, device="cuda") + 0.5
    scale *= 3.5 / levels / spec.cols**0.5
    zero = None
    if not scheme.symmetric:
        zero = torch.randint(
            levels // 4, levels * 3 // 4, (spec.rows, groups), generator=generator, dtype=torch.uint8, device="cuda"
        )
    return QuantizedWeight(codes, scale.half(), zero, scheme)


def product(
    rounds: list[PackedWeight], x: Tensor, spec: LinearSpec, choice: Choice, out: Tensor
) -> Callable[[int], object]:
    """The product by one choice as a function of a number, by which weights take turns. Rounding activations to int8 is
    done already: a layer before can do it."""
    rows = ready(x, rounds[0], spec, choice)
    return lambda i: multiply(rows, rounds[i % len(rounds)], spec, choice, out)


def tune(
    weight: QuantizedWeight, spec: LinearSpec, token_counts: Iterable[int], progress: ProgressFn = silent
) -> dict[str, list[Timing]]:
    """Measure all candidates for one linear on the current CUDA device.

    Args:
        weight: of the spec; its values do not matter to the times.
        spec: the linear.
        token_counts: of choice.BUCKETS.

    Returns:
        choice.key → the measured candidates: the fastest that may be used first, those with a problem last.

    Raises:
        QtoolError: no candidate works.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    packed = pack_weight(weight, spec.scheme.act_bits or 16, device)
    rounds = [replace(packed, codes=codes, scales=scales) for codes, scales in copies((packed.codes, packed.scales))]
    found: dict[str, list[Timing]] = {}
    for tokens in token_counts:
        x = torch.randn(tokens, spec.cols, device=device).to(spec.dtype)
        out = torch.empty(tokens, spec.rows, dtype=spec.dtype, device=device)
        want = torch.empty_like(out)
        dequantize.multiply(arrange_activations(x, packed), packed, spec, want)
        tried = candidates(spec, tokens, device)
        checked = []
        for done, choice in enumerate(tried):
            checked.append(_check(rounds, x, spec, choice, out, want))
            progress(f"tune {key(spec, tokens)}", done + 1, len(tried))
        timings = _measure(checked, rounds, x, spec, out)
        if timings[0].problem is not None:
            raise QtoolError(f"no kernel multiplies {key(spec, tokens)} on this device: {timings[0].problem}")
        found[key(spec, tokens)] = timings
    return found


def _check(
    rounds: list[PackedWeight], x: Tensor, spec: LinearSpec, choice: Choice, out: Tensor, want: Tensor
) -> Timing:
    """Of a candidate that has not been measured; zero microseconds."""
    out.fill_(torch.nan)
    try:
        product(rounds, x, spec, choice, out)(0)
    except QtoolError as error:
        return Timing(choice, math.inf, math.nan, str(error))
    difference = float((out.float() - want.float()).norm() / want.float().norm())
    if not difference < _WRONG:
        return Timing(choice, math.inf, difference, f"relative difference {difference:.3g}")
    return Timing(choice, 0.0, difference)


def _measure(
    checked: list[Timing], rounds: list[PackedWeight], x: Tensor, spec: LinearSpec, out: Tensor
) -> list[Timing]:
    """`checked` with microseconds, the fastest first, those with a problem last. All take turns: what runs alone, or
    first, may meet a cooler device, which is worth more than most cuts differ."""
    good = [t for t in checked if t.problem is None]
    work = [product(rounds, x, spec, t.choice, out) for t in good]
    times = in_turns(work, calls_of(len(x), len(rounds)), settle=settling(len(x)) / 2, rounds=_TURNS) if work else []
    measured = [replace(t, microseconds=us) for t, us in zip(good, times, strict=True)]
    return sorted(measured, key=lambda t: t.microseconds) + [t for t in checked if t.problem is not None]
