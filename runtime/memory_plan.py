"""How large an engine's KV cache becomes on the device that its model was loaded to."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from qtool.quant.errors import QtoolError
from qtool.quant.progress import ProgressFn, silent
from qtool.runtime.executor.device_memory import (
    AnyMemory,
    HostMemory,
    estimated_activations,
    graph_bytes,
    profile_step,
)
from qtool.runtime.executor.model_runner import kv_block_bytes
from qtool.runtime.memory_budget import MemoryBudget, check_length, engine_limit, in_units, kv_bytes_left
from qtool.runtime.models.decoder import Decoder

log = logging.getLogger(__name__)

CPU_CACHE_SHARE = 0.25  # of the memory that is available after loading
SWAP_SPACE = (
    4 << 30
)  # on a GPU, at most an eighth of the host's available memory; none on a CPU: a cache as large is better
CPU_CACHE_PLENTY = 1 << 30  # more than this only where two requests of full length need it


@dataclass(frozen=True)
class Wishes:
    """What was asked for; as LLMEngine's arguments of these names. `max_model_len` None: as much as there is room for,
    up to `trained`, the model's own context, and to the `positions` that the loaded model can rotate."""

    block_size: int
    kv_cache_memory: int | None
    gpu_memory_utilization: float | None
    max_model_len: int | None
    trained: int
    positions: int
    max_num_seqs: int
    max_num_batched_tokens: int
    swap_space: int | None = None

    @property
    def length(self) -> int:
        return self.max_model_len or min(self.trained, self.positions)

    @property
    def blocks_per_request(self) -> int:
        return -(-self.length // self.block_size)


@dataclass(frozen=True)
class MemoryPlan:
    """`swap_blocks`: blocks of swap space on the host. `prefill_s`: seconds for a token of a prompt, None where it was
    not measured."""

    num_blocks: int
    swap_blocks: int
    max_model_len: int
    budget: MemoryBudget
    prefill_s: float | None


def memory_limit(memory: AnyMemory, utilization: float | None) -> int:
    """Bytes that the engine may hold, to be asked before the model is loaded. Raises QtoolError where not free."""
    if isinstance(memory, HostMemory):
        if utilization is not None:
            raise QtoolError("gpu_memory_utilization is for a GPU: on a CPU set kv_cache_memory")
        return memory.free()
    return engine_limit(memory.total(), memory.free(), utilization)


def most_cache_bytes(memory: AnyMemory, limit: int, wanted: int | None) -> int:
    """Bytes that no KV cache will exceed, to be asked before the model is loaded; `wanted` of kv_cache_memory."""
    if wanted is not None:
        return min(wanted, memory.free())
    return int(limit * CPU_CACHE_SHARE) if isinstance(memory, HostMemory) else limit


def plan_memory(
    decoder: Decoder,
    memory: AnyMemory,
    wishes: Wishes,
    *,
    limit: int,
    weights: int,
    draft: Decoder | None = None,
    progress: ProgressFn = silent,
) -> MemoryPlan:
    """Measure or estimate what a step takes, and give the rest to the KV cache.

    Args:
        limit, weights: bytes that the engine may hold, and those that it holds now.
        draft: a model that drafts, already loaded; its KV cache has as many blocks.

    Raises:
        QtoolError: what was asked for does not fit; names the largest setting that would.
    """
    models = [decoder] if draft is None else [decoder, draft]
    each = sum(kv_block_bytes(model, wishes.block_size) for model in models)
    on_cpu = isinstance(memory, HostMemory)
    option = "kv_cache_memory" if on_cpu or wishes.kv_cache_memory else "gpu_memory_utilization"
    if wishes.length > wishes.positions:
        room = wishes.positions // wishes.block_size * wishes.block_size
        check_length(wishes.length, room, each, wishes.block_size, option=option)
    prefill_s = None
    if isinstance(memory, HostMemory):
        graphs = 0
        activations = estimated_activations(decoder, wishes.max_num_seqs, wishes.max_num_batched_tokens)
        left = _cpu_cache(memory.free(), each, wishes)
    else:
        progress("measuring memory", 0, 1)
        activations, prefill_s = profile_step(
            memory,
            decoder,
            max_num_seqs=wishes.max_num_seqs,
            max_num_batched_tokens=wishes.max_num_batched_tokens,
            max_model_len=wishes.length,
            block_size=wishes.block_size,
        )
        graphs = sum(
            graph_bytes(
                memory,
                model,
                max_num_seqs=wishes.max_num_seqs,
                max_num_batched_tokens=wishes.max_num_batched_tokens,
                max_model_len=wishes.length,
                block_size=wishes.block_size,
            )
            for model in models
        )
        progress("measuring memory", 1, 1)
        if wishes.kv_cache_memory is not None:
            limit = max(limit, min(memory.total(), weights + memory.free()))
        left = kv_bytes_left(
            limit,
            total=memory.total(),
            weights=weights,
            activations=activations,
            graphs=graphs,
            least=each,
            max_num_batched_tokens=wishes.max_num_batched_tokens,
            max_num_seqs=wishes.max_num_seqs,
        )
    if wishes.kv_cache_memory is not None:
        most = memory.free() - activations - graphs if on_cpu else left
        if wishes.kv_cache_memory > most:
            raise QtoolError(
                f"kv_cache_memory {wishes.kv_cache_memory} is more than the {max(0, most)} bytes that are free beside "
                f"{in_units(activations)} for the largest step: use {max(0, most)} or less"
            )
        left = wishes.kv_cache_memory
    if left < each:
        raise QtoolError(
            f"{left} bytes for the KV cache, but one block of {wishes.block_size} tokens takes {each} bytes"
        )
    blocks = min(left // each, wishes.max_num_seqs * wishes.blocks_per_request)
    room, length = blocks * wishes.block_size, wishes.length
    if wishes.max_model_len is not None:
        check_length(length, room, each, wishes.block_size, option=option)
    elif (length := min(room, length)) < wishes.trained:
        log.info("max_model_len is %d instead of %d: the KV cache holds no more", length, wishes.trained)
    swap_blocks = _swap_space(wishes, on_cpu, blocks * each) // each
    if on_cpu:
        limit = weights + activations + blocks * each
    budget = MemoryBudget(
        device=memory.name,
        limit=limit,
        weights=weights,
        activations=activations,
        activations_measured=not on_cpu,
        graphs=graphs,
        kv_cache=blocks * each,
        kv_tokens=room,
        swap_space=swap_blocks * each,
    )
    return MemoryPlan(blocks, swap_blocks, length, budget, prefill_s)


def _cpu_cache(free: int, each: int, wishes: Wishes) -> int:
    """Bytes of a cache that nobody gave a size for."""
    plenty = max(CPU_CACHE_PLENTY, 2 * each * wishes.blocks_per_request)
    return min(int(free * CPU_CACHE_SHARE), plenty)


def _swap_space(wishes: Wishes, on_cpu: bool, kv_cache: int) -> int:
    """Bytes on the host for swapped requests, beside a KV cache of `kv_cache` bytes. Raises QtoolError."""
    free = HostMemory().free() - (kv_cache if on_cpu else 0)
    if wishes.swap_space is None:
        return 0 if on_cpu else min(SWAP_SPACE, kv_cache, free // 8)
    if wishes.swap_space > free:
        raise QtoolError(
            f"swap_space {wishes.swap_space} is more than the {free} bytes of host memory that are free: use "
            f"{free // 2} or less"
        )
    return wishes.swap_space
