"""`deterministic`: a request's tokens are the same alone or among 31 others, cold or warm, chunked, preempted."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.executor.batch_invariant import RowTiled, rows_are_alike
from qtool.runtime.executor.model_runner import ModelRunner
from qtool.runtime.llm import LLM
from qtool.runtime.loader import load_model

RANDOM = random.Random(3)
OTHERS = [RANDOM.choices(range(1, 257), k=RANDOM.randint(1, 60)) for _ in range(31)]
PROMPT = RANDOM.choices(range(1, 257), k=45)
PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=7, ignore_eos=True)


def tokens_and_logprobs(llm: LLM, prompts: list[list[int]]) -> Any:
    """Of the first prompt; log-probabilities to the last bit."""
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=7, ignore_eos=True, logprobs=3)
    output = llm.generate(prompts, [params, *[PARAMS] * (len(prompts) - 1)])[0].outputs[0]
    return output.token_ids, [(t.logprob, t.top) for t in output.logprobs or ()]


@pytest.mark.parametrize(("model_type", "dtype"), [("llama", "float32"), ("qwen3", "bfloat16")])
def test_neighbours_caches_chunks_and_preemptions_change_no_bit(
    tiny_model: Callable[..., Path], dtype: str, model_type: str
) -> None:
    folder = tiny_model(model_type)

    def engine(**options: Any) -> LLM:
        sizes = {"kv_cache_memory": 1 << 23, "max_num_seqs": 32} | options
        return LLM(folder, dtype=dtype, device="cpu", deterministic=True, **sizes)

    llm = engine()
    want = tokens_and_logprobs(llm, [PROMPT])
    assert tokens_and_logprobs(llm, [PROMPT]) == want, "with its prefix in the cache"
    assert tokens_and_logprobs(engine(), [PROMPT, *OTHERS]) == want, "among others"
    chunked = engine(max_num_seqs=4, max_num_batched_tokens=7)
    assert tokens_and_logprobs(chunked, [PROMPT, *OTHERS[:6]]) == want, "in chunks"
    block = llm.engine.runner.caches[0].values[0].nbytes * len(llm.engine.runner.caches)
    tight = engine(kv_cache_memory=12 * block, max_num_seqs=8, max_model_len=128)
    assert tokens_and_logprobs(tight, [PROMPT, *OTHERS[:8]]) == want, "short of memory"


def test_preempted_requests_get_the_same_tokens(tiny_model: Callable[..., Path]) -> None:
    llm = LLM(tiny_model(), device="cpu", deterministic=True, kv_cache_memory=1 << 23)
    alone = [llm.generate([p], PARAMS)[0].outputs[0].token_ids for p in OTHERS[:8]]
    block = llm.engine.runner.caches[0].values[0].nbytes * len(llm.engine.runner.caches)
    tight = LLM(tiny_model(), device="cpu", deterministic=True, kv_cache_memory=9 * block, max_model_len=128)
    together = tight.generate(OTHERS[:8], PARAMS)
    assert tight.engine.stats().num_preemptions > 0
    assert [o.outputs[0].token_ids for o in together] == alone


def test_the_answers_are_those_of_the_ordinary_engine(tiny_model: Callable[..., Path]) -> None:
    greedy = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    want, got = (
        LLM(tiny_model(), device="cpu", dtype="float32", deterministic=d, kv_cache_memory=1 << 23).generate(
            OTHERS[:6], greedy
        )
        for d in (False, True)
    )
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in want]


def test_a_product_whose_rows_differ_is_seen() -> None:
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(2))

    def by_place(rows: torch.Tensor) -> torch.Tensor:
        out = torch.nn.functional.linear(rows, weight)
        out[3] = out[3].nextafter(out[3] + 1)
        return out

    assert not rows_are_alike(by_place, x)
    assert not rows_are_alike(lambda rows: rows * rows.abs().amax(), x), "scaled by the others"
    assert rows_are_alike(lambda rows: rows * 2, x)


def test_tiles_are_always_whole(tiny_model: Callable[..., Path]) -> None:
    seen = []

    def linear(rows: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        return rows * 2

    for count in (0, 1, 4, 9):
        x = torch.randn(count, 5)
        assert torch.equal(RowTiled(linear, 4)(x), x * 2)
    assert set(seen) <= {0, 4}
    runner = ModelRunner(load_model(tiny_model(), device=torch.device("cpu")), num_blocks=2, block_size=16,
                         deterministic=True)  # fmt: skip
    assert all(isinstance(linear, RowTiled) for linear in runner.model.linears)
