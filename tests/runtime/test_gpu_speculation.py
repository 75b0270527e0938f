"""Speculation on a GPU: beside CUDA graphs and steps that run ahead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qtool.runtime import drafting
from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.engine.speculation import Speculator, StepCosts
from qtool.runtime.llm import LLM

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 6, 7] * 9, list(range(1, 80)), [300], list(range(1, 60)), [9, 8] * 20]
LIMITS = {"max_num_batched_tokens": 64, "max_num_seqs": 5, "kv_cache_memory": 1 << 24, "device": "cuda"}
METHODS = ["prompt-lookup", "draft", "self"]
TinyModel = Callable[..., Path]


def make(tiny_model: TinyModel, method: str | None, dtype: str) -> LLM:
    shape: dict[str, Any] = {"head_dim": 64, "hidden_size": 128, "max_position_embeddings": 512}
    target = tiny_model(**shape)
    draft = {"draft": str(tiny_model(**shape, num_hidden_layers=1)), "self": str(target)}.get(method or "")
    return LLM(target, dtype=dtype, speculative=method, draft_model=draft, **LIMITS)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "measure_step_costs", lambda *a, **k: StepCosts((1,), (1.0,), (0.0,), (0.0,)))
    monkeypatch.setattr(Speculator, "_pays", lambda *a: True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
        # four tokens make 16 pairs, so that 40 of them repeat one, and prompt lookup has something to copy
        SamplingParams(max_tokens=40, temperature=0.9, seed=3, ignore_eos=True, allowed_token_ids=[5, 6, 7, 8]),
    ],
    ids=["greedy", "seed"],
)
@pytest.mark.usefixtures("always")
def test_float32_tokens_are_those_without(tiny_model: TinyModel, method: str, params: SamplingParams) -> None:
    speculating, plain = make(tiny_model, method, "float32"), make(tiny_model, None, "float32")
    want = [o.outputs[0].token_ids for o in plain.generate(PROMPTS, params)]
    assert [o.outputs[0].token_ids for o in speculating.generate(PROMPTS, params)] == want
    assert speculating.engine.stats().num_draft_tokens > 0
    assert speculating.engine.stats().kv_blocks_used == 0


@pytest.mark.usefixtures("always")
def test_a_float16_model_accepts_its_own_drafts(tiny_model: TinyModel) -> None:
    """The kernels that draft (captured decodes) and those that verify (chunks) agree but for rounding."""
    llm = make(tiny_model, "self", "float16")
    assert llm.engine.runner.runs_ahead
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
    drafted = sum(o.metrics.num_drafted_tokens for o in outputs)
    assert drafted > 100
    assert sum(o.metrics.num_accepted_tokens for o in outputs) > 0.9 * drafted
    assert all(len(o.outputs[0].token_ids) == 60 for o in outputs)
    assert llm.engine.stats().kv_blocks_used == 0


@pytest.mark.parametrize("method", METHODS)
def test_measured_costs_decide_and_plain_steps_run_ahead(tiny_model: TinyModel, method: str) -> None:
    llm, plain = make(tiny_model, method, "float16"), make(tiny_model, None, "float16")
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    outputs, wanted = llm.generate(PROMPTS, params), plain.generate(PROMPTS, params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [60] * len(PROMPTS)
    same = sum(a.outputs[0].token_ids[:8] == b.outputs[0].token_ids[:8] for a, b in zip(outputs, wanted))
    assert same >= len(PROMPTS) - 1, "rounding may tell the kernels' choices apart, seldom"
