"""The sampler against distributions worked out by hand, and log-probabilities against log_softmax."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.executor.sampler import NO_TOKEN, SamplingRow, distribution, sample, token_logprobs, uniforms

PROBS = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])


def row(
    seed: int = 0, tokens: tuple[int, ...] = (0,), prompt: int = 1, stop: tuple[int, ...] = (), **params: Any
) -> SamplingRow:
    return SamplingRow(SamplingParams(**({"max_tokens": 99} | params)), tokens, prompt, frozenset(stop), seed)


def frequencies(count: int = 20_000, **params: Any) -> torch.Tensor:
    tokens, _ = sample(PROBS.log().repeat(count, 1), [row(seed=i, **params) for i in range(count)])
    seen = Counter(tokens)
    return torch.tensor([seen[i] / count for i in range(len(PROBS))])


def normed(*weights: float) -> torch.Tensor:
    return torch.tensor(weights) / sum(weights)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"temperature": 1.0}, PROBS),
        ({"temperature": 0.5}, PROBS**2 / (PROBS**2).sum()),
        ({"top_k": 2}, normed(0.4, 0.3, 0, 0, 0)),
        ({"top_p": 0.75}, normed(0.4, 0.3, 0.15, 0, 0)),
        ({"min_p": 0.3}, normed(0.4, 0.3, 0.15, 0, 0)),
        ({"top_k": 3, "top_p": 0.8}, normed(0.4, 0.3, 0, 0, 0)),  # 0.4 + 0.3 is 82 % of the three
        ({"top_p": 1e-6}, normed(1, 0, 0, 0, 0)),
        ({"top_p": 1e-320}, normed(1, 0, 0, 0, 0)),  # 0 in float32
        ({"temperature": 1e6}, normed(1, 1, 1, 1, 1)),
    ],
)
def test_frequencies_follow_the_distribution(params: dict[str, Any], expected: torch.Tensor) -> None:
    got = frequencies(**params)
    assert (got - expected).abs().max() < 0.015  # more than four standard deviations at 20,000 draws
    assert bool((got[expected == 0] == 0).all())


@pytest.mark.parametrize(("params", "likeliest"), [({"top_p": 1e-320}, 0), ({"typical_p": 1e-320}, 1)], ids=str)
def test_filters_leave_a_token_however_little_they_keep(params: dict[str, Any], likeliest: int) -> None:
    """The surprise of 0.3 (1.20 nats) is nearest to the entropy of PROBS (1.39)."""
    want = torch.eye(5)[likeliest]
    assert torch.equal(distribution(PROBS.log()[None], [row(**params)])[0], want)
    assert torch.equal(frequencies(100, **params), want)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2000, "top_p": 0.5}, 1000),
        ({"top_k": 1024, "top_p": 0.25}, 256),
        ({"top_k": 3000}, 3000),
        ({"min_p": 0.5, "top_p": 0.5}, 1500),  # the likelier 3,000 of the 5,000 alone pass min-p
    ],
)
def test_top_p_counts_what_the_other_filters_left(params: dict[str, Any], kept: int) -> None:
    """Nearly flat logits, so that the number of tokens that can come is known: all of them come, and no others."""
    logits = torch.cat((torch.linspace(1e-4, 0, 3000), torch.full((2000,), -3.0)))[None].expand(3000, -1)
    tokens, _ = sample(logits, [row(seed=i, **params) for i in range(3000)])
    assert 0.99 * kept < max(tokens) <= kept + 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_without_a_likeliest_token_gives_none(bad: float) -> None:
    logits = PROBS.log().repeat(3, 1)
    logits[1, 2] = bad
    tokens, _ = sample(logits, [row(temperature=t, top_k=k) for t, k in ((0, 0), (1.0, 2), (0, 0))])
    assert tokens == [0, NO_TOKEN, 0]


def test_filters_look_beyond_the_first_candidates() -> None:
    """A flat distribution over 5,000 tokens: top-p 0.9 keeps 4,500 of them."""
    count, vocab = 3000, 5000
    logits = torch.zeros(1, vocab).expand(count, vocab)
    tokens, _ = sample(logits, [row(seed=i, top_p=0.9) for i in range(count)])
    kept = set(logits[0].topk(vocab).indices[:4501].tolist())
    assert set(tokens) <= kept
    assert len(set(tokens)) > 1900  # 4,500 (1 - exp(-3000 / 4500)) = 2,190 expected


def test_greedy_and_random_rows_mix() -> None:
    logits = PROBS.log().repeat(3, 1)
    tokens, _ = sample(logits, [row(temperature=0), row(top_k=1, seed=3), row(temperature=0)])
    assert tokens == [0, 0, 0]


def test_a_seed_decides_alone() -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    alone, _ = sample(logits[2:3], [row(seed=9)])
    among, _ = sample(logits, [row(seed=1), row(seed=2, top_p=0.5), row(seed=9), row(temperature=0)])
    assert among[2] == alone[0]


def test_penalties_follow_their_formulas() -> None:
    logits = torch.tensor([[2.0, -1.0, 1.9, 0.0]])
    seen = (1, 0, 0)  # prompt: token 1; output: token 0 twice
    cases: list[tuple[dict[str, float], int]] = [
        ({}, 0),
        ({"repetition_penalty": 1.1}, 2),  # 2.0 / 1.1 < 1.9
        ({"presence_penalty": 0.2}, 2),  # 2.0 - 0.2
        ({"frequency_penalty": 0.04}, 0),  # 2.0 - 2 * 0.04 > 1.9
        ({"frequency_penalty": 0.06}, 2),
    ]
    for params, want in cases:
        tokens, _ = sample(logits, [row(tokens=seen, prompt=1, temperature=0, **params)])
        assert tokens == [want], params
    only_prompt, _ = sample(logits, [row(tokens=(0,), prompt=1, temperature=0, presence_penalty=1.0)])
    assert only_prompt == [0], "presence counts the output alone"


def test_stop_tokens_wait_for_min_tokens() -> None:
    logits = torch.tensor([[5.0, 1.0, 4.0]])
    early = row(tokens=(1,), prompt=1, stop=(0,), temperature=0, min_tokens=1)
    late = row(tokens=(1, 2), prompt=1, stop=(0,), temperature=0, min_tokens=1)
    assert sample(logits, [early])[0] == [2]
    assert sample(logits, [late])[0] == [0]


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(3))
    want = logits.log_softmax(-1)
    rows = [row(temperature=0.3, logprobs=3, frequency_penalty=1.0, tokens=(1, 4)), row(logprobs=None)]
    tokens, found = sample(logits, rows)
    assert found[1] is None
    assert found[0] is not None
    assert found[0].token_id == tokens[0]
    assert found[0].logprob == pytest.approx(float(want[0, tokens[0]]), abs=1e-5)
    order = want[0].argsort(descending=True).tolist()
    assert list(found[0].top) == order[:3]
    assert found[0].rank == order.index(tokens[0]) + 1
    assert found[0].top[order[1]] == pytest.approx(float(want[0, order[1]]), abs=1e-5)


def test_ranks_and_empty_tops() -> None:
    (best,) = token_logprobs(PROBS.log()[None], torch.tensor([0]), [0])
    assert best.rank == 1
    assert best.top == {}
    assert best.logprob == pytest.approx(-0.916291, abs=1e-5)  # ln 0.4


def test_of_equal_logits_the_lowest_id_comes_first() -> None:
    """As greedy decoding takes them: in 16 bits equals are ordinary, and no two tokens may both be the likeliest."""
    logits = torch.randint(-2, 3, (40, 300), generator=torch.Generator().manual_seed(5)).float()
    logits[0] = 0.0
    places = logits.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    row_of, tokens = torch.arange(40).repeat_interleave(300), torch.arange(300).repeat(40)
    found = token_logprobs(logits, tokens, [0] * len(tokens), row_of)
    assert [f.rank for f in found] == (places.flatten() + 1).tolist()
    assert [f.token_id for f in found if f.rank == 1] == sample(logits, [row(temperature=0)] * 40)[0]


def test_uniforms_are_uniform_and_differ_by_position() -> None:
    draws = uniforms(list(range(50_000)), [3] * 50_000)
    assert 0 <= draws.min()
    assert draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.006
    assert abs(draws.var() - 1 / 12) < 0.003
    assert uniforms([1], [2])[0] != uniforms([1], [3])[0]
    assert uniforms([-1], [2])[0] == uniforms([2**64 - 1], [2])[0]
