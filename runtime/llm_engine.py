"""The engine with words: tokenizer, EngineCore and detokenizer. Synchronous: one call of `step` is one step."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from qtool.quant.checkpoint import read_config
from qtool.quant.device import resolve_device
from qtool.quant.errors import QtoolError
from qtool.quant.hub import resolve_model
from qtool.quant.progress import ProgressFn, silent
from qtool.runtime.drafting import check_draft, load_draft, make_speculator
from qtool.runtime.engine.core import EngineCore
from qtool.runtime.engine.core import EngineStats as EngineStats  # part of this face
from qtool.runtime.engine.kv_cache_manager import KVCacheManager
from qtool.runtime.engine.params import RequestOutput, SamplingParams
from qtool.runtime.engine.request import Request
from qtool.runtime.engine.scheduler import SchedulerConfig
from qtool.runtime.engine.speculation import speculation_config
from qtool.runtime.engine.swap import MODES, PreemptionMode, SwapSpace
from qtool.runtime.engine.updates import OutputUpdate, RequestUpdate
from qtool.runtime.entry import Entry
from qtool.runtime.executor.device_memory import AnyMemory, CudaMemory, HostMemory
from qtool.runtime.executor.host_allocator import keep_freed_memory
from qtool.runtime.executor.model_runner import ModelRunner
from qtool.runtime.executor.structured_output import GrammarCompiler
from qtool.runtime.loader import check_head_dtype, check_kv_cache_dtype, load_model
from qtool.runtime.memory_budget import MemoryBudget as MemoryBudget  # part of this face
from qtool.runtime.memory_plan import Wishes, memory_limit, most_cache_bytes, plan_memory
from qtool.runtime.models import decoder_config
from qtool.runtime.output_processor import OutputProcessor
from qtool.runtime.tokenizer import eos_token_ids, load_tokenizer

log = logging.getLogger(__name__)


class LLMEngine:
    """A model that answers requests, many at a time.

    Args:
        model: folder, hub id or built-in name.
        dtype: auto, float32, bfloat16 or float16; of activations and KV cache (see loader.resolve_dtype).
        device: auto, cpu, cuda or cuda:N.
        kv_cache_dtype: auto, int8 or float (see loader.resolve_kv_cache).
        head_dtype: auto (as stored) or int8 (see loader.load_model).
        block_size: tokens per KV block, 8 to 64; on a CPU 1 to 64.
        kv_cache_memory: bytes for the KV cache. None: what `max_num_seqs` requests of full length need; on a CPU at
            most a quarter of the available memory and the larger of 1 GiB and two requests of full length, on a GPU
            at most what `gpu_memory_utilization` leaves.
        gpu_memory_utilization: share of the GPU's memory that the engine may hold, weights and the largest step
            included, in (0, 1]. None: nine tenths of what is free at start.
        max_num_seqs, max_num_batched_tokens: limits of a step, see SchedulerConfig.
        max_model_len: longest prompt and output together. "auto" or None: what the model was made for, less where the
            cache holds less (said in the log).
        swap_space: bytes of host memory for the KV blocks of requests that must make room for others. None: on a GPU
            4 GiB or less, on a CPU none.
        preemption_mode: how requests make room: recompute, swap, or auto, which takes what costs less by the measured
            rates. What does not fit into the swap space is recomputed.
        scheduling_policy: fcfs, priority or shortest, see engine/policy.py.
        static_batching: request-level batching, for comparison.
        prefix_caching: share the KV blocks of equal prefixes.
        deterministic: a request gets the same tokens alone or among others, whatever is cached, chunked or preempted;
            on a CPU alone, and slower: see executor/batch_invariant.py.
        speculative: propose tokens and verify several in a step, see engine/speculation.py: prompt-lookup, draft or
            self; None: no.
        draft_model: folder or name of the model that drafts, for the latter two.
        num_speculative_tokens: always so many drafts where they pay; None: as many as their acceptance suggests.
        seed: base of the random streams of requests without a seed of their own.
        memory: reader of the device's memory; None: the device's own.

    Attributes:
        memory: where the device's memory went, see MemoryBudget.

    Raises:
        QtoolError: the model cannot be loaded, an argument is out of range, or the memory does not suffice; then the
            message names the largest setting that would fit.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        kv_cache_dtype: str = "auto",
        head_dtype: str = "auto",
        block_size: int = 16,
        kv_cache_memory: int | None = None,
        gpu_memory_utilization: float | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | Literal["auto"] | None = None,
        swap_space: int | None = None,
        preemption_mode: PreemptionMode = "auto",
        scheduling_policy: str = "fcfs",
        static_batching: bool = False,
        prefix_caching: bool = True,
        deterministic: bool = False,
        speculative: str | None = None,
        draft_model: str | None = None,
        num_speculative_tokens: int | None = None,
        seed: int = 0,
        progress: ProgressFn = silent,
        memory: AnyMemory | None = None,
    ) -> None:
        length = None if max_model_len == "auto" else max_model_len
        where = resolve_device(device)
        smallest = 1 if where.type == "cpu" else 8
        if not smallest <= block_size <= 64:
            raise QtoolError(f"block_size must be between {smallest} and 64, got {block_size}")
        if length is not None and length < 2:
            raise QtoolError(f"max_model_len must be at least 2, got {length}")
        if gpu_memory_utilization is not None and not 0 < gpu_memory_utilization <= 1:
            raise QtoolError(f"gpu_memory_utilization must be in (0, 1], got {gpu_memory_utilization}")
        scheduling = SchedulerConfig(  # refused before the model is loaded
            max_num_seqs, max_num_batched_tokens, static_batching=static_batching, policy=scheduling_policy
        )
        if preemption_mode not in MODES:
            raise QtoolError(f"preemption_mode must be one of {', '.join(MODES)}, got {preemption_mode!r}")
        if swap_space is not None and swap_space < 0:
            raise QtoolError(f"swap_space must be at least 0, got {swap_space}")
        check_kv_cache_dtype(kv_cache_dtype)
        check_head_dtype(head_dtype)
        speculation = speculation_config(speculative, draft_model, num_speculative_tokens, static_batching)
        if deterministic and where.type != "cpu":
            raise QtoolError("deterministic: kernels on a GPU sum by the batch; take --device cpu, or leave it out")
        folder = resolve_model(model, progress=progress)
        if where.type == "cpu":
            keep_freed_memory()
        self.model_name = str(model)
        self.config: dict[str, Any] = read_config(folder)
        trained = decoder_config(self.config).max_position_embeddings
        if length is not None and length > trained:
            raise QtoolError(f"max_model_len {length} is more than the model's own context of {trained} tokens")
        self.tokenizer = load_tokenizer(folder)
        self.eos_token_ids = eos_token_ids(folder, self.config)
        draft_folder = None if speculation is None else check_draft(speculation, folder, self.config)
        draft = None
        memory = memory or (CudaMemory(where) if where.type == "cuda" else HostMemory())
        limit, before = memory_limit(memory, gpu_memory_utilization), memory.used()
        try:
            decoder = load_model(
                folder,
                device=where,
                dtype=dtype,
                kv_cache_dtype=kv_cache_dtype,
                head_dtype=head_dtype,
                max_model_len=length,
                cache_bytes=most_cache_bytes(memory, limit, kv_cache_memory),
                progress=progress,
            )
            if draft_folder is not None:
                draft = load_draft(
                    draft_folder,
                    decoder,
                    device=where,
                    dtype=dtype,
                    kv_cache_dtype=kv_cache_dtype,
                    max_model_len=length,
                    progress=progress,
                )
        except torch.OutOfMemoryError:
            raise QtoolError(
                f"{folder}: the weights do not fit into the {limit} bytes that are free on {memory.name}: quantize the "
                "model, or take a smaller one"
            ) from None
        wishes = Wishes(
            block_size,
            kv_cache_memory,
            gpu_memory_utilization,
            length,
            trained,
            len(decoder.cos),
            max_num_seqs,
            max_num_batched_tokens,
            swap_space,
        )
        plan = plan_memory(
            decoder, memory, wishes, limit=limit, weights=memory.used() - before, draft=draft, progress=progress
        )
        blocks, wanted = plan.num_blocks, plan.max_model_len
        self.memory = plan.budget
        if decoder.kv_mode != "float":
            scales = "a scale for each token and head" if decoder.kv_mode == "int8" else "the checkpoint's own scales"
            log.info("KV cache in int8 with %s: room for %d tokens", scales, blocks * block_size)
        self.max_model_len = wanted
        self.device = where
        self.dtype = decoder.dtype
        self._vocab_size = decoder.config.vocab_size
        self.grammars = GrammarCompiler(self.tokenizer, self._vocab_size, self.eos_token_ids)
        self.runner = ModelRunner(decoder, num_blocks=blocks, block_size=block_size, deterministic=deterministic)
        swap = None
        if plan.swap_blocks and preemption_mode != "recompute" and not static_batching:
            costs = self.runner.open_swap_space(plan.swap_blocks, plan.prefill_s)
            swap = SwapSpace(plan.swap_blocks, costs, preemption_mode)
        self.runner.prepare(max_num_seqs, wanted, max_num_batched_tokens, progress=progress)
        self._core = EngineCore(
            replace(scheduling, max_model_len=wanted),
            KVCacheManager(blocks, block_size, prefix_caching=prefix_caching),
            self.runner,
            run_ahead=self.runner.runs_ahead and not static_batching,
            speculator=None
            if speculation is None
            else make_speculator(
                speculation,
                self.runner,
                draft,
                num_blocks=blocks,
                max_num_seqs=max_num_seqs,
                max_model_len=wanted,
                prefix_caching=prefix_caching,
                deterministic=deterministic,
            ),
            swap=swap,
        )
        self._outputs = OutputProcessor(self.tokenizer)
        self._entries: dict[str, Entry] = {}
        self._home: dict[Request, tuple[Entry, int]] = {}
        self._seeds = random.Random(seed)
        self._ids = itertools.count()

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a text. Raises QtoolError where it is none (half a surrogate pair)."""
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise QtoolError(f"the prompt is no text: half a surrogate pair at position {error.start}") from None
        ids: list[int] = self.tokenizer.encode(prompt)
        return ids

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        detokenize: bool = True,
        arrival: float | None = None,
    ) -> None:
        """Queue a prompt (text, or token ids).

        Args:
            detokenize: its outputs are wanted of `step`. False: its tokens, of `step_tokens`.
            arrival: when it came, in seconds of time.monotonic(); None: now.

        Raises:
            QtoolError: an id in use; an empty prompt; one longer than the context; a token id outside the vocabulary;
                a form (structured_outputs) that cannot be compiled.
        """
        score_from = None if params.prompt_logprobs is None else 1
        entry, ids = self._add(
            request_id, prompt, params, score_from=score_from, score_kind="logprobs", generate=True, arrival=arrival
        )
        if detokenize:
            self._outputs.add(entry.request_id, ids, params)

    def add_scoring_request(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        score_from: int = 1,
        kind: Literal["logprobs", "logits"] = "logprobs",
        rivals: Mapping[int, Sequence[int]] | None = None,
    ) -> Request:
        """Queue a text that is scored, not continued: positions `score_from` and up; see Request.

        Raises:
            QtoolError: as add_request; `score_from` outside 1 .. len(token_ids); a rival outside the vocabulary.
        """
        if not 1 <= score_from <= len(token_ids):
            raise QtoolError(f"score_from must be between 1 and the {len(token_ids)} tokens given, got {score_from}")
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        for tokens in (rivals or {}).values():
            self._check_tokens(tokens)
        entry, ids = self._add(request_id, token_ids, params, score_from=score_from, score_kind=kind, generate=False)
        self._outputs.add(request_id, ids, params, generate=False)
        entry.parts[0].rivals = rivals or {}
        return entry.parts[0]

    def _add(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        score_from: int | None,
        score_kind: Literal["logprobs", "logits"],
        generate: bool,
        arrival: float | None = None,
    ) -> tuple[Entry, list[int]]:
        if request_id in self._entries:
            raise QtoolError(f"request id {request_id!r} is in use")
        if not isinstance(prompt, Iterable):
            raise QtoolError(f"a prompt is a text or a list of token ids, got {prompt!r}")
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check_tokens(ids)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(params, name) or ():
                if not 0 <= token < self._vocab_size:
                    raise QtoolError(f"{name}: {token} is outside the vocabulary of {self._vocab_size}")
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        bad_words = self._bad_words(params.bad_words)
        matcher = None if params.structured_outputs is None else self.grammars.compile(params.structured_outputs)
        count = params.best_of or params.n
        # The best are found by their log-probabilities.
        own = params if count == params.n else replace(params, logprobs=params.logprobs or 0)
        entry = Entry(request_id, params, [], [0] * count)
        arrival = time.monotonic() if arrival is None else arrival
        for i in range(count):
            request = Request(
                request_id=f"{request_id}/{next(self._ids)}",
                prompt_token_ids=ids,
                params=own,
                stop_token_ids=stops,
                bad_words=bad_words,
                matcher=None if matcher is None else matcher.fork(),
                score_from=score_from if i == 0 else None,
                score_kind=score_kind,
                generate=generate,
                sample_seed=seed + i * 0x9E3779B97F4A7C15,
                arrival=arrival,
            )
            self._core.add_request(request)  # refuses the first part or none: all have the same prompt
            entry.parts.append(request)
            self._home[request] = entry, i
        self._entries[request_id] = entry
        return entry, ids

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of each word, as it is written at the start of a text and after a space."""
        texts = [text for word in words for text in (word, f" {word.lstrip()}")]
        found = (tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        return tuple(dict.fromkeys(ids for ids in found if ids))

    def check_scoring(self, token_ids: Sequence[int]) -> None:
        """Raises QtoolError where add_scoring_request would refuse this text for log-probabilities."""
        self._check_tokens(token_ids)
        self._core.scheduler.check_length(len(token_ids), generate=False, last_is_spare=True)

    def _check_tokens(self, ids: Sequence[int]) -> None:
        if not ids:
            raise QtoolError("the prompt is empty: give it at least one token")
        for i, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int):
                raise QtoolError(f"prompt token {i} is {token!r}, expected an integer")
            if not 0 <= token < self._vocab_size:
                raise QtoolError(f"prompt token {i} is {token}, outside the vocabulary of {self._vocab_size}")

    def has_unfinished(self) -> bool:
        return bool(self._entries)

    def abort_request(self, request_id: str) -> None:
        """End a request at once, wherever it stands; unknown ids are passed over (it may just have ended)."""
        self._outputs.drop(request_id)
        entry = self._entries.get(request_id)
        if entry is not None:
            for part in entry.parts:
                self._core.abort(part.request_id)
            self._forget(entry)

    def finish_output(self, request_id: str, index: int, stop_reason: str) -> None:
        """End one output of a request by a stop string; one that has ended is passed over."""
        entry = self._entries.get(request_id)
        if entry is not None:
            self._core.finish(entry.parts[index].request_id, "stop", stop_reason)
            if entry.finished:
                self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.request_id]
        for part in entry.parts:
            del self._home[part]

    def step(self) -> list[RequestOutput]:
        """Compute one step; an output for every request that has something new."""
        outputs, stops = self._outputs.process(self.step_tokens())
        for stop in stops:
            self.finish_output(*stop)
        return outputs

    def step_tokens(self) -> list[RequestUpdate]:
        """Compute one step; what is new of every request, in token ids. The caller looks for stop strings, and says
        `finish_output` where there is one."""
        changed: dict[str, list[OutputUpdate]] = {}
        for request in self._core.step():
            entry, index = self._home[request]
            changed.setdefault(entry.request_id, []).append(entry.output_update(index))
        updates = []
        for request_id, outputs in changed.items():
            entry = self._entries[request_id]
            updates.append(entry.update(outputs))
            if entry.finished:
                self._forget(entry)
        return updates

    def stats(self) -> EngineStats:
        return self._core.stats()

    def check_integrity(self) -> None:
        """Raise RuntimeError where a KV block leaked or is counted wrongly."""
        self._core.check_integrity()
