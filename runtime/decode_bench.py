"""The decode path end to end on random weights of a known shape: scheduler, paged cache, kernels and sampler.

No checkpoint and no tokenizer: what is measured is the engine. Loads: the decode speed of one request; output tokens a
second with many in flight, of which four in five answer shortly; the time to the first token.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qtool.quant.errors import QtoolError
from qtool.quant.progress import ProgressFn, silent
from qtool.quant.scheme import QuantScheme
from qtool.runtime.engine.core import EngineCore
from qtool.runtime.engine.kv_cache_manager import KVCacheManager
from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.engine.request import Request, Status
from qtool.runtime.engine.scheduler import SchedulerConfig
from qtool.runtime.executor.model_runner import ModelRunner, kv_block_bytes
from qtool.runtime.kernels.interface import QuantLinear
from qtool.runtime.kernels.kv_cache import KVMode
from qtool.runtime.kernels.measure import random_weight
from qtool.runtime.loader import HEAD_SCHEME
from qtool.runtime.models import decoder_config
from qtool.runtime.models.decoder import Decoder, DecoderLayer
from qtool.runtime.models.layers import DenseLinear, LinearFn, make_linear
from qtool.runtime.models.rope import rotation_table

_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-2-7b": _LLAMA
    | {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 32},
    "llama-2-13b": _LLAMA
    | {"vocab_size": 32000, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40}
    | {"num_attention_heads": 40, "num_key_value_heads": 40},
    "llama-3-8b": _LLAMA
    | {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0},
}
"""Settings of config.json."""

MODES: Mapping[str, Mapping[str, str]] = {
    "fp16": {},
    "w4": dict.fromkeys(("qkv", "o", "gate_up", "down"), "w4g128"),
    # o reads what attention leaves in 16 bits; rounding it would cost a kernel of its own
    "w4a8": {"qkv": "w4g128a8", "o": "w4g128", "gate_up": "w4g128a8", "down": "w4g128a8"},
    "w8a8": dict.fromkeys(("qkv", "o", "gate_up", "down"), "w8a8"),
}
"""Scheme of each kind of projection; 16 bits where none is named."""

HEAD_SUFFIX = "-h8"
"""After a mode: with the head in int8."""

BLOCK_SIZE = 16
CACHE_SHARE = 0.85  # of the memory that is free once the weights are there
BATCHED_TOKENS = 8192


@dataclass(frozen=True)
class Load:
    """`requests` requests of `prompt` tokens, at most `in_flight` at once; one in five gives `long` tokens, the others
    `short`."""

    in_flight: int
    requests: int
    prompt: int = 256
    short: int = 50
    long: int = 500


@dataclass(frozen=True)
class DecodeFigures:
    """One mode's figures.

    Attributes:
        weight_bytes: of everything but the KV cache.
        start_seconds: kernels compiled and graphs captured, weights being there already.
        single: decode tokens per second of one request.
        many: requests in flight → output tokens per second.
        ttft_ms: prompt length → milliseconds to the first token, median.
    """

    shape: str
    mode: str
    kv: str
    weight_bytes: int
    start_seconds: float
    single: float
    many: Mapping[int, float]
    ttft_ms: Mapping[int, float]


def mode_schemes(mode: str) -> Mapping[str, str]:
    """Scheme of each kind of projection, `head` among them, of a mode such as `w4a8` or `w4a8-h8`.

    Raises:
        QtoolError: an unknown mode.
    """
    name = mode.removesuffix(HEAD_SUFFIX)
    if name not in MODES:
        raise QtoolError(f"unknown mode {mode!r}: use one of {', '.join(MODES)}, with {HEAD_SUFFIX} for an int8 head")
    return MODES[name] if name == mode else {**MODES[name], "head": HEAD_SCHEME.name}


def random_decoder(
    settings: Mapping[str, Any],
    schemes: Mapping[str, str],
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    kv_mode: KVMode = "float",
) -> Decoder:
    """A model of this shape with random weights of about unit gain, made on `device`.

    Raises:
        QtoolError: settings that no family supports.
    """
    config = decoder_config(settings)
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    width = (config.num_heads + 2 * config.num_kv_heads) * dim
    generator = torch.Generator(device).manual_seed(0)

    def linear(kind: str, rows: int, cols: int) -> LinearFn:
        scheme = QuantScheme.parse(schemes[kind]) if kind in schemes else None
        return make_linear([random_weight(rows, cols, scheme, device, dtype)], [None], dtype, device)

    def norm() -> Tensor:
        return (torch.rand(hidden, generator=generator, device=device) + 0.5).to(dtype)

    layers = tuple(
        DecoderLayer(
            input_norm=norm(),
            qkv=linear("qkv", width, hidden),
            q_norm=None,
            k_norm=None,
            o=linear("o", hidden, config.num_heads * dim),
            post_norm=norm(),
            gate_up=linear("gate_up", 2 * inner, hidden),
            down=linear("down", hidden, inner),
            window=None,
        )
        for _ in range(config.num_layers)
    )
    embed = torch.randn(config.vocab_size, hidden, generator=generator, device=device).to(dtype)
    cos, sin = rotation_table(settings, dim, max_model_len, dtype, device)
    head = linear("head", config.vocab_size, hidden)
    return Decoder(config, embed, layers, norm(), head, cos[:, None], sin[:, None], kv_mode)


def weight_bytes(decoder: Decoder) -> int:
    """Bytes of all weights on the device."""
    total = decoder.embed.nbytes + decoder.norm.nbytes
    total += sum(layer.input_norm.nbytes + layer.post_norm.nbytes for layer in decoder.layers)
    for linear in decoder.linears:
        if isinstance(linear, QuantLinear):
            total += sum(t.nbytes for t in linear.packed)
        elif isinstance(linear, DenseLinear):
            total += linear.weight.nbytes
    return total


class DecodeBench:
    """An engine over a random model, and the loads it is measured with."""

    def __init__(self, decoder: Decoder, *, max_num_seqs: int, max_model_len: int) -> None:
        device = decoder.embed.device
        each = kv_block_bytes(decoder, BLOCK_SIZE)
        wanted = max_num_seqs * -(-max_model_len // BLOCK_SIZE)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            wanted = min(wanted, int(torch.cuda.mem_get_info(device)[0] * CACHE_SHARE) // each)
        if wanted * BLOCK_SIZE < max_model_len:
            raise QtoolError(f"the memory left holds a KV cache of {wanted * BLOCK_SIZE} tokens, fewer than needed")
        begin = time.perf_counter()
        self.decoder, self.max_model_len, self.blocks = decoder, max_model_len, wanted
        self.runner = ModelRunner(decoder, num_blocks=wanted, block_size=BLOCK_SIZE)
        self.runner.prepare(max_num_seqs, max_model_len)
        self.start_seconds = time.perf_counter() - begin
        self._random = random.Random(0)

    def engine(self, in_flight: int) -> EngineCore:
        """A fresh engine over the same cache and graphs."""
        config = SchedulerConfig(in_flight, max(BATCHED_TOKENS, in_flight), self.max_model_len)
        kv = KVCacheManager(self.blocks, BLOCK_SIZE, prefix_caching=False)
        return EngineCore(config, kv, self.runner, run_ahead=self.runner.runs_ahead)

    def request(self, name: str, prompt: int, output: int) -> Request:
        """A random prompt of `prompt` tokens, to be answered greedily with exactly `output`."""
        ids = self._random.choices(range(self.decoder.config.vocab_size), k=prompt)
        return Request(name, ids, SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True))

    def single(self, prompt: int = 128, output: int = 400) -> float:
        """Decode tokens per second of one request."""
        core, request = self.engine(1), self.request("single", prompt, output)
        core.add_request(request)
        first = 0.0
        while core.has_unfinished():
            if core.step() and not first:
                first = time.perf_counter()
        elapsed = time.perf_counter() - first
        _check([request])
        return (output - 1) / elapsed

    def many(self, load: Load, progress: ProgressFn = silent) -> float:
        """Output tokens per second."""
        core = self.engine(load.in_flight)
        lengths = [load.long if i % 5 == 4 else load.short for i in range(load.requests)]
        self._random.shuffle(lengths)
        requests = [self.request(str(i), load.prompt, length) for i, length in enumerate(lengths)]
        begin = time.perf_counter()
        for request in requests:
            core.add_request(request)
        done = 0
        while core.has_unfinished():
            done += sum(r.status is Status.FINISHED for r in core.step())
            progress(f"{load.in_flight} in flight", done, load.requests)
        elapsed = time.perf_counter() - begin
        _check(requests)
        return sum(lengths) / elapsed

    def ttft(self, prompt: int, repeats: int = 7) -> float:
        """Median milliseconds from a request's arrival to its only token."""
        times = []
        for i in range(repeats):
            core, request = self.engine(1), self.request(str(i), prompt, 1)
            begin = time.perf_counter()
            core.add_request(request)
            while core.has_unfinished():
                core.step()
            times.append(1e3 * (time.perf_counter() - begin))
            _check([request])
        return statistics.median(times)


def _check(requests: Sequence[Request]) -> None:
    for request in requests:
        if request.finish_reason != "length" or request.num_output_tokens != request.params.max_tokens:
            raise QtoolError(f"a request ended with {request.finish_reason}: {request.stop_reason}")


def open_bench(
    shape: str,
    mode: str,
    *,
    kv_mode: KVMode,
    device: torch.device,
    loads: Sequence[Load],
    prompts: Sequence[int],
    dtype: torch.dtype = torch.float16,
    settings: Mapping[str, Any] | None = None,
) -> DecodeBench:
    """An engine that is ready for `loads` and for prompts of these lengths.

    Args:
        shape: of SHAPES; only a name where `settings` are given.
        mode: see mode_schemes.

    Raises:
        QtoolError: an unknown shape or mode, or too little memory.
    """
    if settings is None and shape not in SHAPES:
        raise QtoolError(f"unknown shape {shape!r}: use one of {', '.join(SHAPES)}")
    schemes = mode_schemes(mode)
    longest = max([128 + 400, *(p + 1 for p in prompts), *(x.prompt + x.long for x in loads)])
    decoder = random_decoder(
        settings or SHAPES[shape], schemes, dtype=dtype, device=device, max_model_len=longest, kv_mode=kv_mode
    )
    return DecodeBench(decoder, max_num_seqs=max([1, *(x.in_flight for x in loads)]), max_model_len=longest)


def run_mode(
    bench: DecodeBench,
    shape: str,
    mode: str,
    loads: Sequence[Load],
    prompts: Sequence[int],
    progress: ProgressFn = silent,
) -> DecodeFigures:
    """All figures of one mode, measured on an open bench: the loads, and the time to the first token of `prompts`."""
    for load in loads:  # kernels of every size of step
        bench.many(replace(load, requests=min(load.requests, load.in_flight), short=2, long=4))
    bench.single(output=20)
    return DecodeFigures(
        shape,
        mode,
        bench.decoder.kv_mode,
        weight_bytes(bench.decoder),
        bench.start_seconds,
        bench.single(),
        {load.in_flight: bench.many(load, progress) for load in loads},
        {prompt: bench.ttft(prompt) for prompt in prompts},
    )
