"""LLM and LLMEngine on a tiny model: same tokens however they are batched, scores, stops, refusals."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qtool.quant.errors import QtoolError
from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.llm import LLM
from qtool.runtime.llm_engine import LLMEngine
from qtool.runtime.warm_up import warm_up

PROMPTS = ["hello", "a longer prompt, with words in it", "x", "the same beginning: one", "the same beginning: two"]
GREEDY = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
BLOCK_BYTES = 2 * 16 * 2 * 2 * 16 * 4  # layers, tokens, keys and values, KV heads, head size, float32


def tokens(llm: LLM, params: SamplingParams = GREEDY, prompts: list[str] = PROMPTS) -> list[tuple[int, ...]]:
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def llm(tiny_model: Any) -> LLM:
    return LLM(tiny_model(), device="cpu")


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 4, "max_num_batched_tokens": 7},
        {"static_batching": True},
        {"prefix_caching": False},
        {"block_size": 32},
        {"kv_cache_memory": 8 * BLOCK_BYTES, "max_model_len": 128},
    ],
    ids=lambda s: next(iter(s)),
)
def test_tokens_do_not_depend_on_how_they_are_batched(tiny_model: Any, llm: LLM, settings: dict[str, Any]) -> None:
    other = LLM(tiny_model(), device="cpu", **settings)
    assert tokens(other) == tokens(llm)
    assert tokens(other) == tokens(llm), "a second time, from the warm prefix cache"
    other.engine.check_integrity()
    assert other.engine.stats().kv_blocks_used == 0
    if "kv_cache_memory" in settings:
        assert other.engine.stats().num_preemptions > 0


def test_seeded_samples_do_not_depend_on_neighbours(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=12, seed=i, top_p=0.9, ignore_eos=True) for i in range(len(PROMPTS))]
    together = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
    alone = [llm.generate([p], s)[0].outputs[0].token_ids for p, s in zip(PROMPTS, params)]
    assert together == alone


def test_scores_agree_with_transformers(tiny_model: Any, llm: LLM) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)
    context, others = list(range(1, 40)), [[5, 6, 7], [200], [9] * 8]
    for got, continuation in zip(llm.loglikelihood([(context, c) for c in others]), others):
        with torch.no_grad():
            logprobs = model(torch.tensor([context + continuation])).logits[0].log_softmax(-1)
        want = [float(logprobs[len(context) - 1 + i, t]) for i, t in enumerate(continuation)]
        assert got.logprobs == pytest.approx(want, abs=1e-4)
    best = int(model(torch.tensor([context])).logits[0, -1].argmax())
    hit, miss = llm.loglikelihood([(context, [best]), (context, [(best + 1) % 300])])
    assert hit.greedy
    assert not miss.greedy
    assert llm.engine.stats().prefix_cache_hits > 0, "contexts that repeat come from the cache"
    # more choices of one context than rows that are scored at a time, some of them twice
    many = [(context, [i % 290, 7][: 1 + i % 2]) for i in range(400)]
    with torch.no_grad():
        first = model(torch.tensor([context])).logits[0, -1].log_softmax(-1)
        second = model(torch.tensor([[*context, i] for i in range(290)])).logits[:, -1].log_softmax(-1)[:, 7]
    for got, (_, tokens) in zip(llm.loglikelihood(many), many, strict=True):
        want = [float(first[tokens[0]]), float(second[tokens[0]])][: len(tokens)]
        assert got.logprobs == pytest.approx(want, abs=1e-4)
        assert got.greedy == (len(tokens) == 1 and tokens[0] == best)


def test_pairs_that_cannot_be_scored_are_refused_before_any_is(llm: LLM) -> None:
    before = llm.engine.stats().prompt_tokens
    for bad, why in (
        ([10**6], "vocabulary"),
        ([5, -1], "vocabulary"),
        ([1] * 4000, "context is"),
        ([], "at least one"),
    ):
        with pytest.raises(QtoolError, match=f"pair 1: .*{why}"):
            llm.loglikelihood([([1, 2], [3]), ([1, 2], bad)])
    assert llm.engine.stats().prompt_tokens == before
    assert not llm.engine.has_unfinished()


def test_prompt_logprobs_and_logprobs_line_up(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (output,) = llm.generate([[4, 5, 6, 7]], params)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [p.token_id for p in output.prompt_logprobs[1:] if p] == [5, 6, 7]
    chosen = output.outputs[0].logprobs
    assert chosen is not None
    assert [c.token_id for c in chosen] == list(output.outputs[0].token_ids)
    assert all(c.rank == 1 and len(c.top) == 2 for c in chosen)
    (rescored,) = llm.loglikelihood([([4, 5, 6, 7], output.outputs[0].token_ids)])
    assert rescored.logprobs == pytest.approx([c.logprob for c in chosen], abs=1e-4)
    assert rescored.greedy


def test_stop_strings_and_stop_tokens_end_the_output(llm: LLM) -> None:
    (free,) = llm.generate(["hello"], GREEDY)
    ids = list(free.outputs[0].token_ids)
    text = free.outputs[0].text
    stop = text[8:11]
    (cut,) = llm.generate(["hello"], SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, stop=[stop]))
    assert cut.outputs[0].text == text[: text.find(stop)]
    assert cut.outputs[0].finish_reason == "stop"
    assert cut.outputs[0].stop_reason == stop
    end = ids[6]
    ending = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, stop_token_ids=[end])
    (by_id,) = llm.generate(["hello"], ending)
    assert list(by_id.outputs[0].token_ids) == ids[: ids.index(end) + 1]
    assert by_id.outputs[0].stop_reason == end
    assert llm.engine.stats().kv_blocks_used == 0


def test_several_outputs_of_one_prompt(llm: LLM) -> None:
    (output,) = llm.generate(["abc"], SamplingParams(max_tokens=8, n=3, seed=1, ignore_eos=True))
    assert [o.index for o in output.outputs] == [0, 1, 2]
    assert len({o.token_ids for o in output.outputs}) == 3
    assert all(len(o.token_ids) == 8 for o in output.outputs)


def test_an_abort_frees_its_blocks_and_leaves_neighbours_alone(tiny_model: Any, llm: LLM) -> None:
    engine = LLMEngine(tiny_model(), device="cpu", max_num_seqs=2)
    for i, prompt in enumerate(PROMPTS[:3]):
        engine.add_request(str(i), prompt, GREEDY)
    engine.step()
    engine.abort_request("0")  # running
    engine.abort_request("2")  # waiting
    engine.abort_request("none")
    last = None
    while engine.has_unfinished():
        for output in engine.step():
            assert output.request_id == "1"
            last = output
    assert last is not None
    assert last.outputs[0].token_ids == tokens(llm)[1]
    assert engine.stats().kv_blocks_used == 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ("", "prompt is empty"),
        ([1, 2, 320], "prompt token 2 is 320, outside the vocabulary of 320"),
        ([1, -1], "outside the vocabulary"),
        ([1, True], "expected an integer"),
        (None, "a text or a list of token ids"),
        (list(range(256)), "the prompt has 256 tokens, but the context is 256"),
    ],
)
def test_bad_prompts_are_refused_before_any_work(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(QtoolError, match=message):
        llm.generate([[1, 2], prompt], GREEDY)
    assert not llm.engine.has_unfinished(), "the good prompt of the same call was taken back"


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": "5"}, {"max_tokens": 2.5}, {"temperature": None}, {"temperature": float("nan")}, {"top_k": 1.5},
        {"top_p": "x"}, {"seed": 1.5}, {"n": True}, {"logprobs": 1.5}, {"min_tokens": None}, {"stop": "x"},
        {"stop": [1]}, {"stop": 5}, {"stop_token_ids": ["a"]}, {"stop_token_ids": 5}, {"repetition_penalty": 1e-300},
    ],
    ids=str,
)  # fmt: skip
def test_sampling_params_refuse_what_would_fail_a_step(wrong: dict[str, Any]) -> None:
    with pytest.raises(QtoolError, match=f"^{next(iter(wrong))} must be "):
        SamplingParams(**wrong)


def test_half_a_surrogate_pair_is_no_prompt(llm: LLM) -> None:
    with pytest.raises(QtoolError, match="half a surrogate pair at position 2"):
        llm.generate(["ab\ud800"], GREEDY)


def test_what_a_broken_token_computes_spoils_nobody_else(tiny_model: Any, tmp_path: Path, llm: LLM) -> None:
    """One embedding is NaN: its requests fail, generating or scoring; who gets their blocks later does not."""
    folder = tmp_path / "m"
    shutil.copytree(tiny_model(), folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    broken = LLM(folder, device="cpu", kv_cache_memory=8 * BLOCK_BYTES, max_num_batched_tokens=16, max_num_seqs=4)
    bad = [*range(20, 50), 7, *range(50, 90)]
    for number, prompt in enumerate(["hello", bad, "x"]):
        broken.engine.add_request(str(number), prompt, GREEDY)
    ends = {}
    while broken.engine.has_unfinished():
        ends |= {o.request_id: o.outputs[0] for o in broken.engine.step() if o.finished}
    good = tokens(llm, prompts=["hello", "x"])
    assert (ends["0"].token_ids, ends["2"].token_ids) == tuple(good)
    assert ends["1"].finish_reason == "error"
    assert "NaN or infinity" in str(ends["1"].stop_reason)
    with pytest.raises(QtoolError, match=r"prompt 1: generating failed: .*float32"):
        broken.generate(["hello", bad], GREEDY)
    with pytest.raises(QtoolError, match=r"scoring failed: .*NaN"):
        broken.loglikelihood([([1, 2], [3]), ([1, 7], [3])])
    with pytest.raises(QtoolError, match=r"scoring failed: .*NaN"):
        next(broken.prompt_logits([[1, 7]]))
    _check_what_is_kept_of_it(broken, llm, bad)
    for prompt in PROMPTS:  # one at a time: each gets blocks in which NaN was once computed
        assert tokens(broken, prompts=[prompt]) == tokens(llm, prompts=[prompt])
    assert broken.engine.stats().kv_blocks_used == 0


def _check_what_is_kept_of_it(broken: LLM, llm: LLM, bad: list[int]) -> None:
    """Before the broken token all is as in the whole model, from there on NaN; a step computes 16 tokens of `bad`."""
    at = bad.index(7)
    texts = [bad, bad[:at], bad[at:]]
    for got, want, good in zip(broken.prompt_logits(texts, keep_broken=True), llm.prompt_logits(texts), (at, at, 0)):
        assert got.shape == want.shape
        assert torch.allclose(got[:good], want[:good], atol=1e-5)
        assert got[good:].isnan().all()
    # the first leads the others of its context, and breaks
    pairs = [([1, 2], [3, 7, 4, 5]), ([1, 2], [3, 9]), ([1, 7], [3]), (bad, [4]), ([1, 2], [7]), ([1, 2], [8, 3])]
    scored = list(zip(broken.loglikelihood(pairs, keep_broken=True), llm.loglikelihood(pairs), strict=True))
    for i, (got, want) in enumerate(scored):
        if i in (0, 2, 3):
            assert [math.isnan(p) for p in got.logprobs] == [True] * len(want.logprobs)
            assert not got.greedy
        else:  # a token that is scored, but not computed, breaks nothing
            assert got.logprobs == pytest.approx(want.logprobs, abs=1e-5)
            assert got.greedy == want.greedy
    kept, broke = broken.generate(["hello", bad], GREEDY, keep_broken=True)
    assert kept.outputs[0].token_ids == tokens(llm, prompts=["hello"])[0]
    assert (broke.outputs[0].finish_reason, broke.outputs[0].token_ids) == ("error", ())


def test_a_text_to_be_scored_may_have_one_token_more_than_the_context(tiny_model: Any) -> None:
    """Its last token is scored but never computed: 256 positions score the 257th, a KV cache of 256 holds them."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)
    llm = LLM(tiny_model(), device="cpu", kv_cache_memory=16 * BLOCK_BYTES, max_num_batched_tokens=100)
    assert llm.max_model_len == 256
    text = [3 + i * 7 % 290 for i in range(257)]
    with torch.no_grad():
        logprobs = model(torch.tensor([text[:-1]])).logits[0].log_softmax(-1)
    for cut in (1, 200, 256):
        (got,) = llm.loglikelihood([(text[:cut], text[cut:])])
        want = [float(logprobs[i, text[i + 1]]) for i in range(cut - 1, 256)]
        assert got.logprobs == pytest.approx(want, abs=1e-4)
    with pytest.raises(QtoolError, match="258 tokens, but the context is 256 tokens and one more to be scored"):
        llm.loglikelihood([([1], [2] * 257)])
    with pytest.raises(QtoolError, match="257 tokens, but the context is 256 tokens: "):
        next(llm.prompt_logits([text]))
    llm.engine.check_integrity()


def test_a_model_that_does_not_run_is_refused_at_its_warm_up(tiny_model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_model(), folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][300, 5] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QtoolError, match="does not run: the model computed NaN"):
        warm_up(LLMEngine(folder, device="cpu"))


def test_times_of_several_outputs_reach_to_the_last_end(tiny_model: Any) -> None:
    engine = LLMEngine(tiny_model(), device="cpu", max_num_seqs=1)  # one output after the other
    engine.add_request("r", "abc", SamplingParams(max_tokens=4, n=2, seed=1, ignore_eos=True))
    seen = []
    while engine.has_unfinished():
        seen += engine.step()
    first = next(o for o in seen if o.outputs[0].finish_reason)
    assert first.metrics.finished is None
    last, ends = seen[-1].metrics, [o.metrics.finished for o in seen[-1:]]
    assert last.finished == ends[0]
    assert last.first_token == seen[0].metrics.first_token
    assert last.first_token is not None
    assert last.finished is not None
    assert last.finished > first.metrics.first_token


def test_bad_arguments_are_refused(tiny_model: Any) -> None:
    folder = tiny_model()
    for settings, message in [
        ({"block_size": 0}, "block_size must be between 1 and 64"),
        ({"max_model_len": 4096}, "more than the model's own context of 256"),
        ({"dtype": "int3"}, "dtype 'int3' is not supported"),
        ({"device": "tpu"}, "tpu"),
        ({"kv_cache_memory": 8 * BLOCK_BYTES, "max_model_len": 200}, "set max_model_len to 128 or less"),
        ({"kv_cache_memory": 100}, "one block of 16 tokens takes"),
        ({"kv_cache_memory": 1 << 60}, "bytes that are free"),
        ({"max_num_batched_tokens": 4}, "max_num_batched_tokens"),
    ]:
        with pytest.raises(QtoolError, match=message):
            LLMEngine(folder, **({"device": "cpu"} | settings))


def damaged_copy(folder: Path, target: Path, *, drop: str = "", add: str = "", reshape: str = "") -> Path:
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    if drop:
        del weights[drop]
    if add:
        weights[add] = torch.zeros(3)
    if reshape:
        weights[reshape] = weights[reshape][:-1].clone()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_missing_unused_and_misshapen_tensors_are_named(tiny_model: Any, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    cases = [
        ({"drop": name}, f"tensor '{name}' is missing"),
        ({"reshape": name}, f"tensor '{name}' is .63, 128., expected .64, 128."),
        ({"add": "model.layers.1.self_attn.k_scale"}, "belong to no layer of a llama model: .*k_scale"),
    ]
    for i, (damage, message) in enumerate(cases):
        with pytest.raises(QtoolError, match=message):
            LLM(damaged_copy(tiny_model(), tmp_path / str(i), **damage), device="cpu")


def test_a_folder_without_tokenizer_is_refused(tiny_model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_model(), folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(QtoolError, match="no tokenizer"):
        LLM(folder, device="cpu")


def test_end_of_sequence_ids_come_from_the_generation_config(tiny_model: Any, tmp_path: Path, llm: LLM) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_model(), folder)
    third = tokens(llm)[0][2]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, third]}))
    (output,) = LLM(folder, device="cpu").generate(["hello"], SamplingParams(max_tokens=30, temperature=0))
    ids = tokens(llm)[0]
    assert output.outputs[0].token_ids == ids[: ids.index(third) + 1]
    assert output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "text", ["{", "[]", "7", '{"eos_token_id": "abc"}', '{"eos_token_id": [0, [1]]}', '{"eos_token_id": true}']
)
def test_a_damaged_generation_config_is_one_line(tiny_model: Any, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_model(), folder)
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(QtoolError, match=r"generation_config\.json: .*"):
        LLM(folder, device="cpu")


def test_a_context_beyond_the_memory_is_cut_to_the_cache(tiny_model: Any, tmp_path: Path, llm: LLM) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_model(), folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 10**14}
    (folder / "config.json").write_text(json.dumps(config))
    assert tokens(LLM(folder, device="cpu", max_model_len=64)) == tokens(llm)
    cut = LLM(folder, device="cpu", kv_cache_memory=1 << 20)  # 2 layers, 2 × 2 heads of 16 float32: 512 bytes a token
    assert cut.max_model_len == 2048
    assert tokens(cut) == tokens(llm)
    for most in (None, 1 << 20):
        with pytest.raises(QtoolError, match=r"the KV cache holds \d+ tokens, fewer than max_model_len 99999999999"):
            LLM(folder, device="cpu", max_model_len=99999999999, kv_cache_memory=most)
