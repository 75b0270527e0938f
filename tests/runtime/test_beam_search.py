"""Beam search; transformers' own on the same tiny random models is the judge."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from qtool.quant.errors import QtoolError
from qtool.runtime.beam_search import BeamSearch, BeamSearchParams
from qtool.runtime.engine.params import SamplingParams, TokenLogprobs
from qtool.runtime.llm import LLM

PROMPTS = [[5, 6, 7], list(range(1, 45)), [200, 9], [77] * 16]


def with_ends(folder: Path, target: Path, eos: list[int]) -> Path:
    """A copy of a model with these end-of-sequence tokens."""
    shutil.copytree(folder, target)
    for name in ("config.json", "generation_config.json"):
        path = target / name
        if path.is_file():
            path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": eos}))
    return target


def judge(
    folder: Path, prompt: list[int], params: BeamSearchParams, eos: list[int]
) -> list[tuple[tuple[int, ...], float]]:
    """transformers' outputs, end-of-sequence token included, with their scores."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = model.generate(
        torch.tensor([prompt]),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=eos or None,
        pad_token_id=319,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    outputs = []
    for tokens, score in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist()):
        end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
        outputs.append((tuple(tokens[:end]), score))
    return outputs


@pytest.mark.parametrize(
    ("width", "changes"),
    [
        (4, {}),
        (3, {"length_penalty": 2.0}),
        (3, {"length_penalty": -1.0}),
        (5, {"length_penalty": 0.0, "early_stopping": True}),
        (12, {"early_stopping": True}),
    ],
)
@pytest.mark.parametrize("ends", [3, 40])
def test_outputs_and_scores_are_those_of_transformers(
    tiny_model: Any, tmp_path: Path, width: int, changes: dict[str, Any], ends: int
) -> None:
    eos = list(range(7, 320, 320 // ends))[:ends]  # so many that outputs do end
    folder = with_ends(tiny_model(), tmp_path / "m", eos)
    params = BeamSearchParams(beam_width=width, max_tokens=14, **changes)
    llm = LLM(folder, device="cpu", dtype="float32", kv_cache_memory=1 << 22)
    reasons = set()
    for prompt, found in zip(PROMPTS, llm.beam_search(PROMPTS, params)):
        want = judge(folder, prompt, params, eos)
        assert [o.token_ids for o in found.outputs] == [tokens for tokens, _ in want]
        for output, (tokens, score) in zip(found.outputs, want):
            assert output.cumulative_logprob is not None
            assert output.cumulative_logprob / len(tokens) ** params.length_penalty == pytest.approx(
                score, rel=1e-5, abs=1e-4
            )
            reasons.add(output.finish_reason)
    assert "stop" in reasons or ends == 3
    assert llm.engine.stats().kv_blocks_used == 0


def test_without_an_end_all_outputs_have_the_full_length(tiny_model: Any) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True, logprobs=2)
    llm = LLM(tiny_model(), device="cpu", dtype="float32", kv_cache_memory=1 << 22)
    (found,) = llm.beam_search([PROMPTS[1]], params)
    want = judge(tiny_model(), PROMPTS[1], params, [])
    assert [o.token_ids for o in found.outputs] == [tokens for tokens, _ in want]
    for output in found.outputs:
        assert output.finish_reason == "length"
        assert output.text == llm.tokenizer.decode(output.token_ids)
        assert output.logprobs is not None
        assert sum(t.logprob for t in output.logprobs) == pytest.approx(output.cumulative_logprob)
        assert tuple(t.token_id for t in output.logprobs) == output.token_ids
        assert all(len(t.top) == 2 and (t.rank <= 2) == (t.token_id in t.top) for t in output.logprobs)
    assert llm.engine.stats().prefix_cache_hits > 0


def test_one_beam_is_greedy_decoding(tiny_model: Any) -> None:
    llm = LLM(tiny_model(), device="cpu", dtype="float32", kv_cache_memory=1 << 22)
    greedy = [o.outputs[0] for o in llm.generate(PROMPTS, SamplingParams(max_tokens=9, temperature=0))]
    beams = [o.outputs[0] for o in llm.beam_search(PROMPTS, BeamSearchParams(1, 9))]
    assert [(o.token_ids, o.text) for o in beams] == [(o.token_ids, o.text) for o in greedy]


def test_a_text_is_found_that_greedy_decoding_misses() -> None:
    """Token 1 is likelier at first, 2 leads to the likelier whole: 0.6 · 0.3 against 0.4 · 0.9."""
    after = {(): {1: -0.51, 2: -0.92, 3: -9.0}, (1,): {4: -1.2, 5: -1.3}, (2,): {6: -0.105, 7: -2.3}}
    search = BeamSearch([9], BeamSearchParams(beam_width=2, max_tokens=2), ())
    while not search.done:
        search.advance([TokenLogprobs(0, 0.0, 1, after[tuple(s[1:])]) for s in search.sequences])
    assert [beam.token_ids for _, beam in search._complete] == [(2, 6), (1, 4)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 129}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_bad_parameters_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(QtoolError, match=message):
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 2} | change))


def test_what_cannot_be_searched_is_refused(tiny_model: Any) -> None:
    llm = LLM(tiny_model(), device="cpu", kv_cache_memory=1 << 22)
    with pytest.raises(QtoolError, match="prompt 1 has 250 tokens, 7 are to be generated"):
        llm.beam_search([[1], [1] * 250], BeamSearchParams(2, 7))
    with pytest.raises(QtoolError, match="one string"):
        llm.beam_search("hello", BeamSearchParams(2, 7))
    with pytest.raises(QtoolError, match="needs 1032 candidates a beam"):
        BeamSearch([1], BeamSearchParams(8, 2), range(128))
    assert not llm.engine.has_unfinished()
