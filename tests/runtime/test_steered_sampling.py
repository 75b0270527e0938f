"""Bias, bans, allowed tokens, typical sampling, dynamic temperature and best_of, against peers and closed forms."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import TypicalLogitsWarper

from qtool.quant.errors import QtoolError
from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.executor.sampler import SamplingRow, _typical, sample
from qtool.runtime.llm import LLM

PROBS = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])


def row(
    seed: int = 0, tokens: tuple[int, ...] = (0,), bad: tuple[tuple[int, ...], ...] = (), stop: int = 99, **params: Any
) -> SamplingRow:
    return SamplingRow(SamplingParams(**({"max_tokens": 99} | params)), tokens, 1, frozenset([stop]), seed, bad)


def frequencies(probs: torch.Tensor = PROBS, count: int = 20_000, **params: Any) -> torch.Tensor:
    tokens, _ = sample(probs.log().repeat(count, 1), [row(seed=i, **params) for i in range(count)])
    seen = Counter(tokens)
    return torch.tensor([seen[i] / count for i in range(len(probs))])


def test_bias_multiplies_the_odds() -> None:
    want = PROBS * torch.tensor([1, 1, 1, math.e**2, 0])
    got = frequencies(logit_bias={3: 2.0, 4: -100})
    assert (got - want / want.sum()).abs().max() < 0.015


def test_only_allowed_tokens_come() -> None:
    want = PROBS * torch.tensor([0, 1, 0, 0, 1])
    assert (frequencies(allowed_token_ids=[4, 1]) - want / want.sum()).abs().max() < 0.015


def test_rows_are_steered_each_for_itself() -> None:
    logits = PROBS.log().repeat(5, 1)
    rows = [
        row(temperature=0),
        row(temperature=0, logit_bias={4: 50.0}),
        row(temperature=0, allowed_token_ids=[2, 3]),
        row(temperature=0, bad=((0,),)),
        row(temperature=0, allowed_token_ids=[1, 2], bad=((1,),), logit_bias={0: 90}),
    ]
    assert sample(logits, rows)[0] == [0, 4, 2, 1, 2]


def test_the_last_token_of_a_bad_word_is_banned_after_the_others() -> None:
    bad = ((2, 3, 0),)
    for tokens, want in (((9, 2, 3), 0 + 1), ((9, 3), 0), ((9, 2, 3, 3), 0), ((2, 3), 0)):
        got = sample(PROBS.log()[None], [row(tokens=tokens, bad=bad, temperature=0)])[0]
        assert got == [want], tokens  # the last one has a part of it in the prompt, which is no output


def test_a_ban_that_leaves_nothing_does_not_count() -> None:
    early = row(tokens=(1,), stop=3, allowed_token_ids=[3], min_tokens=5, temperature=0)
    assert sample(PROBS.log()[None], [early])[0] == [3]


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e6])
def test_no_temperature_lets_a_forbidden_token_through(temperature: float) -> None:
    only = row(allowed_token_ids=[3], temperature=temperature, dynatemp_range=temperature)
    assert sample(PROBS.log()[None], [only])[0] == [3]


@pytest.mark.parametrize("mass", [0.1, 0.2, 0.5, 0.9, 0.99])
def test_typical_sampling_keeps_what_transformers_keeps(mass: float) -> None:
    logits = torch.randn(16, 200, generator=torch.Generator().manual_seed(4)) * 3
    want = TypicalLogitsWarper(mass=mass)(torch.zeros(16, 1, dtype=torch.long), logits).isfinite()
    got = _typical(logits, [row(typical_p=mass)] * 16).isfinite()
    assert torch.equal(got, want)
    assert got.sum() < got.numel()


def test_typical_frequencies() -> None:
    """The entropy of PROBS is 1.39 nats: 0.3 (1.20) is nearest, then 0.4 (0.92) and 0.15 (1.90)."""
    want = torch.tensor([0.4, 0.3, 0, 0, 0]) / 0.7
    assert (frequencies(typical_p=0.6) - want).abs().max() < 0.015
    assert (frequencies(typical_p=0.25) - torch.tensor([0, 1.0, 0, 0, 0])).abs().max() == 0


@pytest.mark.parametrize("exponent", [1.0, 2.0])
def test_dynamic_temperature_follows_the_entropy(exponent: float) -> None:
    entropy = -float((PROBS.double() * PROBS.double().log()).sum()) / math.log(5)
    temperature = 1.0 - 0.8 + 1.6 * entropy**exponent
    want = PROBS ** (1 / temperature)
    got = frequencies(temperature=1.0, dynatemp_range=0.8, dynatemp_exponent=exponent)
    assert (got - want / want.sum()).abs().max() < 0.015


def test_dynamic_temperature_at_its_ends() -> None:
    flat = torch.full((4,), 0.25)
    assert (frequencies(flat, dynatemp_range=1.0) - flat).abs().max() < 0.015  # any temperature
    sure = torch.tensor([1 - 3e-6, 1e-6, 1e-6, 1e-6])
    assert frequencies(sure, dynatemp_range=1.0)[0] == 1  # the temperature comes down to nothing


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {1: 101}}, "logit_bias must be a mapping from token ids"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logit_bias": {"1": 1.0}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids"),
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"typical_p": 0.0}, r"typical_p must be in \(0, 1\]"),
        ({"temperature": 1e39}, r"temperature must be in \[0, 1000000\]"),  # infinite in float32
        ({"temperature": 10**400}, "temperature"),
        ({"dynatemp_range": 1.1}, "dynatemp_range must be between 0 and the temperature"),
        ({"dynatemp_exponent": 0.0}, "dynatemp_exponent"),
        ({"n": 3, "best_of": 2}, "best_of must be between n, which is 3, and 128"),
    ],
)
def test_bad_values_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(QtoolError, match=message):
        SamplingParams(**params)


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[..., Any]) -> LLM:
    return LLM(tiny_model(), kv_cache_memory=1 << 22, max_num_seqs=16)


def test_best_of_gives_the_likeliest_outputs_in_order(llm: LLM) -> None:
    every = SamplingParams(max_tokens=6, seed=5, n=6, logprobs=0, ignore_eos=True)
    (all_six,) = llm.generate([[5, 6, 7]], every)
    means = {o.token_ids: sum(t.logprob for t in o.logprobs or ()) / 6 for o in all_six.outputs}
    (best,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=6, seed=5, n=2, best_of=6, ignore_eos=True))
    assert [o.token_ids for o in best.outputs] == sorted(means, key=lambda ids: -means[ids])[:2]
    assert [o.index for o in best.outputs] == [0, 1]
    assert all(o.logprobs is None for o in best.outputs), "nobody asked for them"


def test_bad_words_and_allowed_tokens_hold_for_a_whole_output(llm: LLM) -> None:
    base = SamplingParams(max_tokens=24, seed=1, ignore_eos=True, allowed_token_ids=[66, 67, 68])
    (free,) = llm.generate([[5, 6, 7]], base)
    assert set(free.outputs[0].token_ids) <= {66, 67, 68}
    letters = [llm.tokenizer.decode([i]) for i in (66, 67, 68)]
    word = letters[0] + letters[1]
    assert word in llm.generate([[5]], SamplingParams(max_tokens=200, seed=1, ignore_eos=True,
                                                      allowed_token_ids=[66, 67, 68]))[0].outputs[0].text  # fmt: skip
    params = SamplingParams(max_tokens=200, seed=1, ignore_eos=True, allowed_token_ids=[66, 67, 68], bad_words=[word])
    assert word not in llm.generate([[5]], params)[0].outputs[0].text


def test_tokens_outside_the_vocabulary_are_refused(llm: LLM) -> None:
    for params in (SamplingParams(logit_bias={320: 1.0}), SamplingParams(allowed_token_ids=[1, 320])):
        with pytest.raises(QtoolError, match="320 is outside the vocabulary of 320"):
            llm.generate([[5]], params)
