"""How long one decode step spends in each linear, measured on this device by the kernels that serve it, and kept.

`kernel_times` is what planning and `qtool bench kernels` both call: it reads this device's table, measures what is not
in it yet, and keeps that. A table belongs to one device, thread count, activation dtype, version of qtool and torch,
and to the kernels' sources, which change between two versions, too.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtool._version import __version__
from qtool.quant.errors import QtoolError
from qtool.quant.hub import cache_folder
from qtool.quant.progress import ProgressFn, silent
from qtool.quant.scheme import QuantScheme, layer_bytes, parse_scheme
from qtool.quant.textfile import read_json, write_text
from qtool.quant.weight import QuantizedWeight
from qtool.runtime.kernels.interface import QuantLinear
from qtool.runtime.models.layers import DenseLinear, LinearFn, make_linear

FORMAT = 1
_SOURCES = {".py", ".cu", ".cuh", ".json"}
_COLD_BYTES = {"cpu": 64_000_000, "cuda": 260_000_000}  # of weights that take turns: several times a usual last cache
_MOST_COPIES = 256
_ROUNDS = 9  # of which the median is taken
_LEAST_SECONDS = 0.01  # of one round on the CPU, so that its clock does not count


@dataclass(frozen=True, order=True)
class LinearCase:
    """One product: [tokens, cols] by a [rows, cols] weight stored as `scheme` (`fp16`: not quantized).

    Projections that the runtime fuses (q,k,v; gate,up) are one case with the sum of their rows.
    """

    rows: int
    cols: int
    scheme: str
    tokens: int = 1


@dataclass(frozen=True)
class LinearTime:
    """A measured case.

    Attributes:
        kernel: name of the kernel that the dispatch table chose.
        microseconds: median of one product, weights not in the cache.
        gb_per_s: weight bytes (scales and zero points included) over that time, 10^9 bytes a second.
    """

    case: LinearCase
    kernel: str
    microseconds: float
    gb_per_s: float


def random_weight(
    rows: int, cols: int, scheme: QuantScheme | None, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Tensor | QuantizedWeight:
    """A random [rows, cols] weight of about unit gain; its values do not matter to times."""
    generator = torch.Generator(device).manual_seed(0)
    if scheme is None:
        dense: Tensor = torch.randn(rows, cols, generator=generator, device=device) / cols**0.5
        return dense.to(dtype)
    levels, groups = 1 << scheme.bits, scheme.num_groups(cols)
    codes = torch.randint(0, levels, (rows, cols), generator=generator, dtype=torch.uint8, device=device)
    scale = (torch.rand(rows, groups, generator=generator, device=device) + 0.5) * (3.5 / levels / cols**0.5)
    zero = None
    if not scheme.symmetric:
        zero = torch.randint(0, levels, (rows, groups), generator=generator, dtype=torch.uint8, device=device)
    return QuantizedWeight(codes, scale.half(), zero, scheme)


def measure_linears(
    cases: Iterable[LinearCase],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    progress: ProgressFn = silent,
) -> list[LinearTime]:
    """Time each distinct case on `device` with activations in `dtype`; sorted by shape, tokens and scheme.

    Each weight is multiplied in turn with copies of itself that no cache holds together, as in a model. Cases of one
    shape take turns round by round, so that whatever else the machine does falls on all alike; the median counts. On a
    GPU the products are replayed from a CUDA graph.

    Raises:
        QtoolError: a case that no kernel can run.
    """
    wanted = sorted(set(cases), key=lambda c: (c.rows, c.cols, c.tokens, c.scheme))
    found: list[LinearTime] = []
    for (rows, cols, tokens), same in _by_shape(wanted).items():
        x = torch.randn(tokens, cols, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        weights = {case: _copies(case, device, dtype) for case in same}
        times = _gpu_times(weights, x) if device.type == "cuda" else _cpu_times(weights, x)
        for case, microseconds in times.items():
            size = layer_bytes(parse_scheme(case.scheme), rows, cols)
            first = weights[case][0]
            kernel = first.kernel.name if isinstance(first, QuantLinear) else "dense"
            found.append(LinearTime(case, kernel, microseconds, size / microseconds / 1e3))
        progress("measure kernels", len(found), len(wanted))
    return found


def _by_shape(cases: Sequence[LinearCase]) -> dict[tuple[int, int, int], list[LinearCase]]:
    shapes: dict[tuple[int, int, int], list[LinearCase]] = {}
    for case in cases:
        shapes.setdefault((case.rows, case.cols, case.tokens), []).append(case)
    return shapes


def _copies(case: LinearCase, device: torch.device, dtype: torch.dtype) -> list[LinearFn]:
    """The linear, and as many copies as it takes for a round over them to read from memory."""
    scheme = parse_scheme(case.scheme)
    linear = make_linear([random_weight(case.rows, case.cols, scheme, device, dtype)], [None], dtype, device)
    size = layer_bytes(scheme, case.rows, case.cols)
    count = max(2, min(_MOST_COPIES, math.ceil(_COLD_BYTES[device.type] / size)))
    return [linear, *(_clone(linear) for _ in range(count - 1))]


def _clone(linear: LinearFn) -> LinearFn:
    if isinstance(linear, QuantLinear):
        return QuantLinear(linear.kernel, tuple(t.clone() for t in linear.packed), linear.spec, None)
    assert isinstance(linear, DenseLinear)
    return DenseLinear(linear.weight.clone(), None)


def _cpu_times(weights: dict[LinearCase, list[LinearFn]], x: Tensor) -> dict[LinearCase, float]:
    """Median microseconds of a product."""
    seconds: dict[LinearCase, list[float]] = {case: [] for case in weights}
    with torch.inference_mode():
        for _ in range(_ROUNDS):
            for case, copies in weights.items():
                calls, start = 0, time.perf_counter()
                while calls == 0 or time.perf_counter() - start < _LEAST_SECONDS:
                    for linear in copies:
                        linear(x)
                    calls += len(copies)
                seconds[case].append((time.perf_counter() - start) / calls)
    return {case: 1e6 * statistics.median(values) for case, values in seconds.items()}


def _gpu_times(weights: dict[LinearCase, list[LinearFn]], x: Tensor) -> dict[LinearCase, float]:
    from qtool.runtime.kernels.cuda.timing import calls_of, in_turns, settling

    def product(copies: list[LinearFn]) -> Callable[[int], object]:
        return lambda i: copies[i % len(copies)](x)

    with torch.inference_mode():
        calls = calls_of(len(x), *(len(copies) for copies in weights.values()))
        times = in_turns([product(copies) for copies in weights.values()], calls, settle=settling(len(x)))
    return dict(zip(weights, times, strict=True))


def copy_ceiling(device: torch.device) -> float:
    """GB/s of a large copy on `device`, bytes read plus bytes written: what its memory gives at most."""
    if device.type == "cuda":
        from qtool.runtime.kernels.cuda.timing import copy_ceiling as on_gpu

        return on_gpu(device)
    source = torch.ones(_COLD_BYTES["cpu"], dtype=torch.uint8)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(seconds) / 1e9


# --- the table of a device -------------------------------------------------------------------------------------------


def device_name(device: torch.device) -> str:
    """What the table of a device is called: the GPU's name, or the processor's with its number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        named = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        named = ""
    return named or platform.processor() or platform.machine()


def table_path(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Path:
    """`$QTOOL_CACHE/latency/DEVICE-DTYPE.json`."""
    slug = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    return cache_folder() / "latency" / f"{slug}-{str(dtype).removeprefix('torch.')}.json"


@functools.cache
def sources_digest(folder: Path) -> str:
    """One digest of all sources in `folder`, their names included; taken once, since what has been imported stays."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in _SOURCES:
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _facts(device: torch.device) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "device": device_name(device),
        "qtool_version": __version__,
        "torch_version": torch.__version__,
        "kernels": sources_digest(Path(__file__).parent),
    }


def read_times(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> dict[LinearCase, LinearTime]:
    """This device's table; empty where there is none, a damaged one, or one of other versions or kernels."""
    try:
        document = read_json(table_path(device, dtype))
        if any(document[key] != value for key, value in _facts(device).items()):
            return {}
        times = [LinearTime(**{**entry, "case": LinearCase(**entry["case"])}) for entry in document["times"]]
        if not all(math.isfinite(t.microseconds) and t.microseconds > 0 for t in times):
            return {}
        return {t.case: t for t in times}
    except (OSError, QtoolError, KeyError, TypeError):
        return {}  # a cache: what cannot be read is measured again


def save_times(times: Iterable[LinearTime], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Put `times` into this device's table, in place of older ones of the same cases. Returns the table's path."""
    path = table_path(device, dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    merged = read_times(device, dtype) | {t.case: t for t in times}
    entries = [asdict(merged[case]) for case in sorted(merged)]
    write_text(path, json.dumps({**_facts(device), "times": entries}, indent=1) + "\n")
    return path


def kernel_times(
    cases: Iterable[LinearCase],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    progress: ProgressFn = silent,
) -> dict[LinearCase, LinearTime]:
    """The measured time of every case, from this device's table or, where it lacks them, measured now and kept."""
    wanted = list(cases)
    known = read_times(device, dtype)
    missing = [case for case in wanted if case not in known]
    if missing:
        measured = measure_linears(missing, device, dtype, progress)
        save_times(measured, device, dtype)
        known |= {t.case: t for t in measured}
    return {case: known[case] for case in wanted}
