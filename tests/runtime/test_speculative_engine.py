"""Whole engines with and without speculation: the same tokens, whatever else is asked for or happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qtool.quant.errors import QtoolError
from qtool.runtime import drafting
from qtool.runtime.engine.params import SamplingParams, StructuredOutputsParams
from qtool.runtime.engine.speculation import Speculator, StepCosts
from qtool.runtime.executor.model_runner import kv_block_bytes
from qtool.runtime.llm import LLM

TinyModel = Callable[..., Path]

FREE = StepCosts((1,), (1.0,), (0.0,), (0.0,))  # drafts cost nothing: they are always worth it
REPEATING = "one two three, one two three, one two three, one two"
PROMPTS = [REPEATING, "abc", "a quite different and longer text than the others", REPEATING * 2]


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speculate in every step: on tiny models nothing would ever pay."""
    monkeypatch.setattr(drafting, "measure_step_costs", lambda *a, **k: FREE)
    monkeypatch.setattr(Speculator, "_pays", lambda *a: True)


@pytest.fixture(scope="module")
def target(tiny_model: TinyModel) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def draft(tiny_model: TinyModel) -> Path:
    return tiny_model("llama", num_hidden_layers=1)


def make(target: Path, draft: Path | None, method: str, **changes: Any) -> LLM:
    arguments = {"kv_cache_memory": 1 << 22, "max_num_seqs": 4, "block_size": 8} | changes
    needed = None if method == "prompt-lookup" else str(target if method == "self" else draft)
    return LLM(target, speculative=method, draft_model=needed, **arguments)


def plain(target: Path, **changes: Any) -> LLM:
    return LLM(target, **({"kv_cache_memory": 1 << 22, "max_num_seqs": 4, "block_size": 8} | changes))


def outputs(llm: LLM, params: SamplingParams, prompts: list[str] = PROMPTS) -> list[Any]:
    found = [
        [(o.token_ids, o.text, o.finish_reason, o.stop_reason) for o in output.outputs]
        for output in llm.generate(prompts, params)
    ]
    llm.engine.check_integrity()
    assert llm.engine.stats().kv_blocks_used == 0
    return found


METHODS = ["prompt-lookup", "draft", "self"]

ASKS = {
    "greedy": SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
    "penalties": SamplingParams(
        max_tokens=40, temperature=0.0, ignore_eos=True, repetition_penalty=1.2, frequency_penalty=0.3
    ),
    "seed": SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, seed=3, ignore_eos=True, n=2),
    "one token": SamplingParams(max_tokens=1, temperature=0.0),
    "eos": SamplingParams(max_tokens=100, temperature=1.0, seed=1, min_tokens=5),
    "stop token": SamplingParams(max_tokens=60, temperature=0.0, stop_token_ids=list(range(40)), min_tokens=2),
    "bad words": SamplingParams(max_tokens=30, temperature=0.0, bad_words=["one", "a"], ignore_eos=True),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ask", ASKS)
def test_the_same_tokens_as_without(target: Path, draft: Path, method: str, ask: str) -> None:
    speculating = make(target, draft, method)
    assert outputs(speculating, ASKS[ask]) == outputs(plain(target), ASKS[ask])
    if ask == "greedy":
        assert speculating.engine.stats().num_draft_tokens > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 8},  # chunked prefill, and little room for drafts
        {"prefix_caching": False},
        {"kv_cache_dtype": "int8"},
        {"deterministic": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_same_tokens_under_other_settings(target: Path, draft: Path, method: str, changes: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    assert outputs(make(target, draft, method, **changes), params) == outputs(plain(target, **changes), params)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_tokens_with_preemptions(target: Path, draft: Path, method: str) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    reference = plain(target)
    block = kv_block_bytes(reference.engine.runner.model, 8)
    layers = {"prompt-lookup": 2, "draft": 3, "self": 4}[method]  # of both caches; the target has two
    tight = make(target, draft, method, max_model_len=168, kv_cache_memory=24 * block * layers // 2)
    assert outputs(tight, params) == outputs(reference, params)
    assert tight.engine.stats().num_preemptions > 0


def test_a_model_that_drafts_for_itself_is_always_right(target: Path) -> None:
    llm = make(target, None, "self", num_speculative_tokens=3)
    params = SamplingParams(max_tokens=41, temperature=0.0, ignore_eos=True)
    (output,) = llm.generate(["abc"], params)
    assert output.metrics.num_accepted_tokens == output.metrics.num_drafted_tokens == 30
    # the prompt's step gives a token, ten steps give four each
    assert llm.engine.stats().num_steps == 11


def test_a_model_that_drafts_for_itself_is_always_right_when_sampling(target: Path) -> None:
    """p = q: rejection sampling refuses nothing, but for what rounding makes of the products."""
    llm = make(target, None, "self", num_speculative_tokens=3)
    params = SamplingParams(max_tokens=41, temperature=0.9, top_p=0.95, ignore_eos=True)
    (output,) = llm.generate(["abc"], params)
    assert output.metrics.num_drafted_tokens >= 30
    assert output.metrics.num_accepted_tokens >= 0.95 * output.metrics.num_drafted_tokens


@pytest.mark.parametrize("method", METHODS)
def test_stop_strings_end_the_text_and_the_tokens(target: Path, draft: Path, method: str) -> None:
    long = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    reference = plain(target)
    text = reference.generate([REPEATING], long)[0].outputs[0].text
    stop = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, stop=[text[9:11]], logprobs=0)
    want, got = reference.generate([REPEATING], stop)[0], make(target, draft, method).generate([REPEATING], stop)[0]
    assert got.outputs[0].text == want.outputs[0].text
    assert got.outputs[0].token_ids == want.outputs[0].token_ids
    assert got.outputs[0].stop_reason == text[9:11]
    assert got.outputs[0].logprobs is not None
    assert len(got.outputs[0].logprobs) == len(got.outputs[0].token_ids)


@pytest.mark.parametrize("method", METHODS)
def test_logprobs_are_those_of_a_run_without(target: Path, draft: Path, method: str) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    want, got = (
        plain(target).generate([REPEATING], params)[0],
        make(target, draft, method).generate([REPEATING], params)[0],
    )
    assert got.outputs[0].logprobs is not None
    assert want.outputs[0].logprobs is not None
    for a, b in zip(got.outputs[0].logprobs, want.outputs[0].logprobs, strict=True):
        assert (a.token_id, a.rank, list(a.top)) == (b.token_id, b.rank, list(b.top))
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
    assert got.prompt_logprobs is not None
    assert len(got.prompt_logprobs) == len(REPEATING)


def test_cancelling_frees_both_caches(target: Path, draft: Path) -> None:
    llm = make(target, draft, "draft")
    engine = llm.engine
    engine.add_request("a", REPEATING, SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True))
    for _ in range(4):
        engine.step()
    proposer = engine._core._speculator.proposer
    assert proposer.kv.pool.num_used > 0
    engine.abort_request("a")
    assert proposer.kv.pool.num_used == 0
    proposer.kv.check_integrity()


def test_a_draft_model_that_fails_is_left_out(target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(target, draft, "draft")
    proposer = llm.engine._core._speculator.proposer

    def fail(batch: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(proposer.runner, "submit", fail)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    assert outputs(llm, params) == outputs(plain(target), params)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speculative": "guess"}, "speculative must be one of prompt-lookup, draft, self"),
        ({"speculative": "draft"}, "speculative draft needs draft_model"),
        ({"speculative": "self"}, "speculative self needs draft_model"),
        ({"speculative": "prompt-lookup", "draft_model": "x"}, "takes no draft_model"),
        ({"speculative": "prompt-lookup", "num_speculative_tokens": 0}, "between 1 and 16"),
        ({"draft_model": "x"}, "draft_model is for speculation"),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens is for speculation"),
        ({"speculative": "prompt-lookup", "static_batching": True}, "static_batching"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(target: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(QtoolError, match=message):
        LLM(target, **arguments)


def test_self_wants_the_same_model(target: Path, draft: Path) -> None:
    with pytest.raises(QtoolError, match="is no quantization of"):
        LLM(target, speculative="self", draft_model=str(draft))


def test_a_draft_model_of_another_tokenizer_is_refused(target: Path, draft: Path, tmp_path: Path) -> None:
    import shutil

    other = tmp_path / "other"
    shutil.copytree(draft, other)
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"<eos>"', '"<end>"'))
    with pytest.raises(QtoolError, match="another tokenizer"):
        LLM(target, speculative="draft", draft_model=str(other))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ask", ["greedy", "seed"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_same_tokens_in_a_form(target: Path, draft: Path, method: str, ask: str, deterministic: bool) -> None:
    pytest.importorskip("llguidance")
    form = StructuredOutputsParams(regex="(one two three, |four five six, ){2,4}!")
    params = SamplingParams(max_tokens=80, temperature=0.0 if ask == "greedy" else 1.0, seed=7, structured_outputs=form)
    speculating = make(target, draft, method, deterministic=deterministic)
    found = outputs(speculating, params)
    assert found == outputs(plain(target, deterministic=deterministic), params)
    assert all(text.endswith("!") for output in found for _, text, _, _ in output)
    assert speculating.engine.stats().num_accepted_tokens > 0


def test_drawn_drafts_in_a_form_keep_to_it(target: Path) -> None:
    pytest.importorskip("llguidance")
    form = StructuredOutputsParams(regex="[ab]{30}")
    llm = make(target, None, "self")
    params = SamplingParams(max_tokens=60, temperature=1.0, structured_outputs=form, n=4)
    for output in llm.generate(PROMPTS, params):
        for part in output.outputs:
            assert len(part.text) == 30
            assert set(part.text) <= {"a", "b"}
