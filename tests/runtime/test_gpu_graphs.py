"""Decode steps in CUDA graphs, run ahead of the host: the same tokens as steps one by one without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.executor.decode_graphs import graph_sizes
from qtool.runtime.llm import LLM

gpu = pytest.mark.gpu
PROMPTS = [[5, 6, 7], list(range(1, 80)), [300], list(range(1, 60)), [9, 8] * 20, [17] * 130]
LIMITS = {"max_num_batched_tokens": 64, "max_num_seqs": 5, "kv_cache_memory": 1 << 23, "dtype": "float16"}


def big_heads(tiny_model: Any, **changes: Any) -> Path:
    return tiny_model(head_dim=64, hidden_size=128, max_position_embeddings=512, **changes)


def generate(folder: Path, params: SamplingParams, *, graphs: bool, **limits: Any) -> list[tuple[int, ...]]:
    llm = LLM(folder, device="cuda", **(LIMITS | limits))
    runner = llm.engine.runner
    assert runner.runs_ahead
    assert runner.graphs is not None
    assert runner.graphs.sizes == [1, 2, 4, 5]
    assert runner.prompt_graphs is not None
    assert runner.prompt_graphs.sizes == [16, 32, 64]
    if not graphs:
        runner.graphs = runner.prompt_graphs = None
        llm.engine._core._run_ahead = False
    found = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
    assert llm.engine.stats().kv_blocks_used == 0
    return found


@gpu
@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 4}])
def test_greedy_tokens_are_those_without_graphs(tiny_model: Any, changes: dict[str, Any], kv: str) -> None:
    folder = big_heads(tiny_model, **changes)
    params = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
    with_graphs = generate(folder, params, graphs=True, kv_cache_dtype=kv)
    assert with_graphs == generate(folder, params, graphs=False, kv_cache_dtype=kv)
    assert [len(t) for t in with_graphs] == [48] * len(PROMPTS)


@gpu
def test_a_small_cache_preempts_and_still_gives_the_same(tiny_model: Any) -> None:
    folder = big_heads(tiny_model)
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    small = {"kv_cache_memory": 24 * 16 * 2 * 2 * 64 * 2 * 2, "max_model_len": 240, "prefix_caching": False}
    assert generate(folder, params, graphs=True, **small) == generate(folder, params, graphs=True)


@gpu
def test_sampled_and_scored_requests_beside_greedy_ones(tiny_model: Any) -> None:
    folder = big_heads(tiny_model)
    llm = LLM(folder, device="cuda", **LIMITS)
    kinds = [
        SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=0.9, seed=4, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=0, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=0, repetition_penalty=1.3, ignore_eos=True),
    ]
    params = [kinds[i % 4] for i in range(len(PROMPTS))]
    together = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
    for prompt, own, tokens in zip(PROMPTS, params, together, strict=True):
        assert llm.generate([prompt], own)[0].outputs[0].token_ids == tokens


@gpu
def test_logits_are_those_of_float32(tiny_model: Any) -> None:
    folder = big_heads(tiny_model)
    fast = LLM(folder, device="cuda", **LIMITS).prompt_logits(PROMPTS)
    exact = LLM(folder, device="cpu", dtype="float32").prompt_logits(PROMPTS)
    for got, want in zip(fast, exact, strict=True):
        assert (got.cpu() - want).norm() / want.norm() < 1e-2


@gpu
def test_too_little_memory_for_all_graphs_keeps_the_small_ones(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from qtool.runtime.executor.decode_graphs import DecodeGraphs

    capture = DecodeGraphs._capture

    def starved(self: DecodeGraphs, size: int, pool: Any) -> Any:
        if size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return capture(self, size, pool)

    monkeypatch.setattr(DecodeGraphs, "_capture", starved)
    llm = LLM(big_heads(tiny_model), device="cuda", **LIMITS)
    assert llm.engine.runner.graphs.sizes == [1]
    assert "does not suffice for all CUDA graphs: steps of more than 1 sequences run without" in caplog.text
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    found = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
    monkeypatch.undo()
    assert found == [
        o.outputs[0].token_ids for o in LLM(big_heads(tiny_model), device="cuda", **LIMITS).generate(PROMPTS, params)
    ]


def test_graph_sizes_reach_the_limit_and_no_further() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(5) == [5, 4, 2, 1]
    assert graph_sizes(256)[:3] == [256, 240, 224]
    assert graph_sizes(256)[-4:] == [8, 4, 2, 1]
    assert graph_sizes(300)[0] == 300
