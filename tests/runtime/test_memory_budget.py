"""The memory of a GPU that is not there: a reader with numbers of its own in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from qtool.quant.errors import QtoolError
from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.executor.device_memory import estimated_activations, largest_step
from qtool.runtime.llm import LLM
from qtool.runtime.llm_engine import LLMEngine
from qtool.runtime.loader import load_model
from qtool.runtime.memory_budget import MemoryBudget, engine_limit, in_units, kv_bytes_left

BLOCK = 2 * 16 * 2 * 2 * 16 * 4  # layers, tokens, keys and values, KV heads, head size, float32
TOTAL = 1000 * BLOCK


class FakeGpu:
    """A device of `total` bytes, `others` of them taken; the model takes `weights`, a step `step` at its peak."""

    name = "a GPU of the mind"

    def __init__(self, *, total: int = TOTAL, others: int = 0, weights: int = 0, step: int = 0) -> None:
        self._total, self._others, self._weights, self._step = total, others, weights, step
        self._loaded = False
        self.profiled = 0

    def total(self) -> int:
        return self._total

    def free(self) -> int:
        return self._total - self._others - self._weights * self._loaded

    def used(self) -> int:
        held = self._weights * self._loaded
        self._loaded = True  # the engine asks before it loads, and after
        return held

    def peak(self, run: Callable[[], object]) -> int:
        run()
        self.profiled += 1
        return self._step


def engine(folder: Any, memory: FakeGpu, **settings: Any) -> LLMEngine:
    limits = {"device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 64} | settings
    return LLMEngine(folder, memory=memory, **limits)


def test_what_the_rest_leaves_becomes_the_kv_cache(tiny_model: Any) -> None:
    memory = FakeGpu(others=100 * BLOCK, weights=700 * BLOCK, step=50 * BLOCK)
    found = engine(tiny_model(), memory, gpu_memory_utilization=0.8)
    assert memory.profiled == 1
    assert found.memory.limit == 800 * BLOCK
    assert found.memory.kv_cache == (800 - 700 - 50) * BLOCK
    assert found.memory.kv_tokens == 50 * 16 == found.stats().kv_blocks_total * 16
    assert found.memory.unused == 0
    assert found.max_model_len == 256


def test_without_a_share_nine_tenths_of_what_is_free_are_taken(tiny_model: Any) -> None:
    found = engine(tiny_model(), FakeGpu(others=500 * BLOCK, weights=400 * BLOCK, step=10 * BLOCK))
    assert found.memory.kv_cache == (450 - 400 - 10) * BLOCK


def test_no_more_is_taken_than_all_requests_need(tiny_model: Any) -> None:
    found = engine(tiny_model(), FakeGpu(), gpu_memory_utilization=1.0, max_num_seqs=3, max_model_len=64)
    assert found.memory.kv_cache == 3 * 4 * BLOCK
    assert found.memory.unused == TOTAL - 12 * BLOCK


def test_auto_takes_the_length_that_fits_and_a_number_is_kept_or_refused(tiny_model: Any) -> None:
    tight = {"weights": 880 * BLOCK, "step": 10 * BLOCK}  # 10 blocks are left of nine tenths
    for length in (None, "auto"):
        assert engine(tiny_model(), FakeGpu(**tight), max_model_len=length).max_model_len == 160
    assert engine(tiny_model(), FakeGpu(**tight), max_model_len=160).max_model_len == 160
    with pytest.raises(QtoolError, match="set max_model_len to 160 or less, or give it more memory by gpu_memory_util"):
        engine(tiny_model(), FakeGpu(**tight), max_model_len=161)


@pytest.mark.parametrize(
    ("memory", "settings", "message"),
    [
        ({"others": 250 * BLOCK}, {"gpu_memory_utilization": 0.8}, "are free: use 0.75 or less"),
        # 64 tokens take 64 blocks, and 900 - 861 - 1 = 38 are left for the step
        ({"weights": 861 * BLOCK, "step": 64 * BLOCK}, {}, "set max_num_batched_tokens to 38 or less"),
        # no step of 8 sequences fits into 900, but all fits into 0.93 of the device
        ({"weights": 897 * BLOCK, "step": 32 * BLOCK}, {}, "set gpu_memory_utilization to 0.93 or more"),
        ({"weights": 2000 * BLOCK, "step": 32 * BLOCK}, {}, "too small for this model"),
        ({"weights": 500 * BLOCK, "step": 32 * BLOCK}, {"kv_cache_memory": 600 * BLOCK}, f"use {468 * BLOCK} or less"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    tiny_model: Any, memory: dict[str, int], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(QtoolError, match=message):
        engine(tiny_model(), FakeGpu(**memory), **settings)


def test_what_a_refusal_names_does_fit(tiny_model: Any) -> None:
    small = FakeGpu(weights=861 * BLOCK, step=38 * BLOCK)  # as the step of 38 tokens would take
    assert engine(tiny_model(), small, max_num_batched_tokens=38).memory.kv_cache == BLOCK
    share = FakeGpu(weights=897 * BLOCK, step=32 * BLOCK)
    assert engine(tiny_model(), share, gpu_memory_utilization=0.93).memory.kv_cache >= BLOCK
    cache = FakeGpu(weights=500 * BLOCK, step=32 * BLOCK)
    assert engine(tiny_model(), cache, kv_cache_memory=468 * BLOCK).memory.kv_cache == 8 * 16 * BLOCK
    assert engine_limit(1000, 750, 0.75) == 750


def test_the_engine_answers_as_ever_after_the_profile(tiny_model: Any) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    want = LLM(tiny_model(), device="cpu").generate(["hello"], params)[0].outputs[0].token_ids
    profiled = LLM(tiny_model(), device="cpu", memory=FakeGpu(weights=BLOCK), max_num_seqs=4)
    assert profiled.generate(["hello"], params)[0].outputs[0].token_ids == want


def test_the_largest_step_is_full() -> None:
    works = largest_step(8, 64, 100, 16)
    assert [w.num_tokens for w in works] == [1] * 7 + [57]
    assert all(w.start + w.num_tokens == 100 and len(w.block_table) == 7 and w.sample for w in works)
    assert [w.num_tokens for w in largest_step(1, 64, 40, 16)] == [40], "no longer than the context"
    assert [w.num_tokens for w in largest_step(5, 130, 60, 16)] == [1, 1, 8, 60, 60], (
        "several prompts, where one is short"
    )
    assert [w.num_tokens for w in largest_step(8, 8, 40, 16)] == [1] * 8


def test_a_gpu_share_on_a_cpu_is_refused(tiny_model: Any) -> None:
    with pytest.raises(QtoolError, match="on a CPU set kv_cache_memory"):
        LLMEngine(tiny_model(), device="cpu", gpu_memory_utilization=0.5)
    for share in (0, 1.1, float("nan")):
        with pytest.raises(QtoolError, match="gpu_memory_utilization must be in"):
            LLMEngine(tiny_model(), device="cpu", gpu_memory_utilization=share)


def test_on_a_cpu_the_budget_is_what_was_given(tiny_model: Any) -> None:
    found = LLMEngine(tiny_model(), device="cpu", kv_cache_memory=20 * BLOCK + 5, max_num_seqs=4).memory
    assert (found.kv_cache, found.kv_tokens, found.unused) == (20 * BLOCK, 320, 0)
    model = load_model(tiny_model(), device=torch.device("cpu"))
    # hidden 64, inner 128: 3 · 64 + 3 · 128 floats a token; 320 logits three times a sequence
    assert estimated_activations(model, 4, 2048) == 4 * (2048 * (192 + 384) + 3 * 4 * 320)
    assert not found.activations_measured


def test_the_budget_in_words() -> None:
    budget = MemoryBudget("a GPU", 10 << 30, 3 << 30, 512 << 20, True, 0, 6 << 30, 4096)
    assert budget.lines() == [
        "memory on a GPU            10.00 GiB  at most",
        "  weights                   3.00 GiB",
        "  activations             512.00 MiB  largest mixed step, measured",
        "  KV cache                  6.00 GiB  4096 tokens",
        "  unused                  512.00 MiB",
    ]
    assert [in_units(n) for n in (0, 1023, 1024, 3 << 39)] == ["0 B", "1023 B", "1.00 KiB", "1.50 TiB"]


def test_without_activations_nothing_is_divided_by_zero() -> None:
    with pytest.raises(QtoolError, match="too small"):
        kv_bytes_left(
            10, total=10, weights=20, activations=0, graphs=0, least=1, max_num_batched_tokens=8, max_num_seqs=1
        )
