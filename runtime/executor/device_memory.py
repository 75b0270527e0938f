"""What a device says of its memory, and what the largest step takes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import psutil
import torch

from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.engine.request import Request, ScheduledRequest
from qtool.runtime.executor.host_allocator import release_freed_memory
from qtool.runtime.executor.model_runner import ModelRunner
from qtool.runtime.executor.prompt_graphs import token_counts
from qtool.runtime.models.decoder import Decoder


class DeviceMemory(Protocol):
    """Bytes of one device, and the peak of what runs on it. `name` is for people."""

    name: str

    def total(self) -> int: ...

    def free(self) -> int:
        """What nobody holds."""
        ...

    def used(self) -> int:
        """What is held; only differences are looked at, and all of them are taken for this process's own."""
        ...

    def peak(self, run: Callable[[], object]) -> int:
        """Most bytes that `run` holds at a time, beyond those held before."""
        ...


AnyMemory: TypeAlias = "DeviceMemory | HostMemory"


class CudaMemory:
    """A GPU as the driver and torch's allocator see it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.name = torch.cuda.get_device_name(device)

    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def used(self) -> int:
        return self.total() - self.free()

    def peak(self, run: Callable[[], object]) -> int:
        """Of torch's allocator, whole segments: what is lost between allocations counts."""
        self.free()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - before


class HostMemory:
    """The machine's memory, for a model that runs on the CPU. A step's peak is not known without a high-water mark of
    its own: `estimated_activations` stands in for it."""

    name = "the CPU"

    def total(self) -> int:
        return int(psutil.virtual_memory().total)

    def free(self) -> int:
        release_freed_memory()
        return int(psutil.virtual_memory().available)

    def used(self) -> int:
        release_freed_memory()
        return int(psutil.Process().memory_info().rss)


def estimated_activations(model: Decoder, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Bytes of the largest step's activations by the model's shape: the wider of a block's two halves for every token,
    and logits in float32 with the sampler's two copies of them for every sequence."""
    config = model.config
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    width = 3 * config.hidden_size + max(attention, 3 * config.intermediate_size)
    rows = max_num_batched_tokens * width * model.dtype.itemsize
    return rows + 3 * max_num_seqs * config.vocab_size * 4


def largest_step(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int
) -> list[ScheduledRequest]:
    """The mixed step that takes the most memory: full of tokens, all sequences at the end of the context, as few as
    hold the tokens being prompts and the others decodes; every row is sampled through the filters that look at the
    whole vocabulary.

    All KV blocks are block 0: what is computed means nothing.
    """
    params = SamplingParams(temperature=1.0, typical_p=0.9, top_p=0.9, logprobs=0)
    table = [0] * -(-max_model_len // block_size)
    tokens = [0] * max_model_len
    works = []
    for number, count in enumerate(_full_counts(max_num_seqs, max_num_batched_tokens, max_model_len)):
        request = Request(f"profile-{number}", [0], params, sample_seed=number)
        request.token_ids, request.num_prompt_tokens = tokens, max_model_len  # one list for all
        works.append(ScheduledRequest(request, max_model_len - count, count, table, True))
    return works


def _full_counts(seqs: int, budget: int, longest: int) -> list[int]:
    """Tokens of each sequence of a full step: decodes, then prompts of at most `longest` tokens, the longest last."""
    prompts = 1
    while prompts < seqs and seqs - prompts + prompts * longest < budget:
        prompts += 1
    counts, left = [1] * (seqs - prompts), budget - (seqs - prompts)
    chunks: list[int] = []
    while left > 0 and len(chunks) < prompts:
        chunks.append(min(left, longest))
        left -= chunks[-1]
    return counts + chunks[::-1]


def profile_step(
    memory: DeviceMemory,
    model: Decoder,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    block_size: int,
) -> tuple[int, float]:
    """Bytes at the peak of the largest step, and the seconds that a prompt of its tokens takes, for each token."""
    runner = ModelRunner(model, num_blocks=1, block_size=block_size)
    works = largest_step(max_num_seqs, max_num_batched_tokens, max_model_len, block_size)

    def run() -> None:
        runner.collect(runner.submit(works))

    peak = memory.peak(run)
    began = time.perf_counter()
    runner.collect(runner.submit(works[-1:]))
    return peak, (time.perf_counter() - began) / works[-1].num_tokens


def graph_bytes(
    memory: DeviceMemory,
    model: Decoder,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    block_size: int,
) -> int:
    """Bytes of all CUDA graphs, of decodes and of steps with prompts: the two largest of each kind are captured over a
    cache of one block, and thrown away. The first brings the memory pool that all of its kind share, the second stands
    for each of the others. 0 where there are no graphs."""
    runner = ModelRunner(model, num_blocks=1, block_size=block_size)
    if not runner.runs_ahead:
        return 0
    from qtool.runtime.executor.decode_graphs import graph_sizes

    def captured(sizes: Sequence[int], prompt_sizes: Sequence[int]) -> int:
        runner.graphs = runner.prompt_graphs = None
        before = memory.used()
        runner.prepare(max_num_seqs, max_model_len, sizes=sizes, prompt_sizes=prompt_sizes)
        return memory.used() - before

    sizes, counts = graph_sizes(max_num_seqs), token_counts(max_num_batched_tokens)
    first = captured(sizes[:1], counts[:1])
    decode = captured(sizes[:2], counts[:1]) - first
    prompt = captured(sizes[:1], counts[:2]) - first
    return first + max(0, decode) * (len(sizes) - 1) + max(0, prompt) * (len(counts) - 1)
