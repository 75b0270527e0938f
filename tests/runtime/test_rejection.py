"""Speculative sampling leaves the distribution as it is: chi-square against the closed form on a tiny vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.engine.request import Draft
from qtool.runtime.executor.rejection import draft_rows, draw, verify
from qtool.runtime.executor.sampler import NO_TOKEN, SamplingRow, distribution, sample

VOCAB = 6
TRIALS = 6_000

TARGET = torch.tensor([1.2, 0.3, -0.5, 0.9, -1.0, 0.1])  # after any token
PROPOSAL = torch.tensor([0.2, 1.1, 0.4, -0.3, 0.8, -2.0])

SETTINGS = {
    "plain": SamplingParams(temperature=1.0),
    "temperature": SamplingParams(temperature=0.6),
    "top_p": SamplingParams(temperature=1.3, top_p=0.8),
    "top_k": SamplingParams(top_k=3),
    "min_p": SamplingParams(min_p=0.3),
    "typical": SamplingParams(typical_p=0.7),
    "penalties": SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.4),
    "bias": SamplingParams(logit_bias={1: 2.0}, allowed_token_ids=[0, 1, 3, 5]),
}


def closed_form(params: SamplingParams, tokens: list[int], logits: torch.Tensor) -> np.ndarray:
    """The next token's probabilities in float64, written out from the definitions."""
    x = logits.double().numpy().copy()
    output = tokens[1:]  # the prompt is one token
    for token in range(VOCAB):
        if token in tokens:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if params.allowed_token_ids is not None:
        x[[t for t in range(VOCAB) if t not in params.allowed_token_ids]] = -np.inf
    p = np.exp(x / params.temperature)
    p /= p.sum()
    if params.typical_p < 1:
        with np.errstate(divide="ignore", invalid="ignore"):
            surprise = -np.log(p)
        order = np.argsort(np.abs(surprise - (p * surprise).sum()), kind="stable")
        count = int(np.searchsorted(np.cumsum(p[order]), params.typical_p)) + 1
        p[order[count:]] = 0
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0
    p[p < params.min_p * p.max()] = 0
    if params.top_p < 1:
        p /= p.sum()
        count = int(np.searchsorted(np.cumsum(p[order]), params.top_p)) + 1
        p[order[count:]] = 0
    return p / p.sum()


def rows_for(params: SamplingParams, count: int) -> list[SamplingRow]:
    return [SamplingRow(params, [2], 1, frozenset(), 1_000_003 * i + 17) for i in range(count)]


def p_value(params: SamplingParams, outputs: np.ndarray) -> float:
    """Of the first two tokens together."""
    want = np.zeros((VOCAB, VOCAB))
    first = closed_form(params, [2], TARGET)
    for token in range(VOCAB):
        if first[token] > 0:
            want[token] = first[token] * closed_form(params, [2, token], TARGET)
    seen = np.zeros_like(want)
    np.add.at(seen, (outputs[:, 0], outputs[:, 1]), 1)
    assert seen[want == 0].sum() == 0, "a token that cannot come"
    possible = want > 0
    return float(stats.chisquare(seen[possible], want[possible] * len(outputs)).pvalue)


def two_tokens(params: SamplingParams, drafts: list[Draft]) -> np.ndarray:
    """The first two tokens of each trial: where the first draft is refused, the second token is drawn as usual."""
    own = rows_for(params, len(drafts))
    rows = [row for o, d in zip(own, drafts) for row in draft_rows(o, d.token_ids)]
    found = verify(TARGET.expand(len(rows), VOCAB), rows, drafts, sample)
    late = [i for i, v in enumerate(found) if len(v.token_ids) == 1]
    nexts = [own[i].after(found[i].token_ids) for i in late]
    tokens, _ = sample(TARGET.expand(len(nexts), VOCAB), nexts) if nexts else ([], [])
    second = dict(zip(late, tokens))
    return np.array([[v.token_ids[0], second.get(i, v.token_ids[-1])] for i, v in enumerate(found)])


@pytest.mark.parametrize("name", SETTINGS)
def test_drawn_drafts_leave_the_distribution_as_it_is(name: str) -> None:
    params = SETTINGS[name]
    tokens, probs = draw(PROPOSAL.expand(TRIALS, VOCAB), rows_for(params, TRIALS))
    drafts = [Draft((t,), q[None]) for t, q in zip(tokens.tolist(), probs)]
    assert p_value(params, two_tokens(params, drafts)) > 1e-3


@pytest.mark.parametrize("name", ["plain", "top_p", "penalties"])
def test_copied_drafts_leave_the_distribution_as_it_is(name: str) -> None:
    params = SETTINGS[name]
    drafts = [Draft((i % VOCAB,)) for i in range(TRIALS)]
    assert p_value(params, two_tokens(params, drafts)) > 1e-3


def test_a_wrong_rule_is_noticed() -> None:
    """The chi-square test has teeth: accepting every draft fails it."""
    params = SETTINGS["plain"]
    tokens, _ = draw(PROPOSAL.expand(TRIALS, VOCAB), rows_for(params, TRIALS))
    second, _ = sample(TARGET.expand(TRIALS, VOCAB), [r.after([t]) for r, t in zip(rows_for(params, TRIALS), tokens)])
    assert p_value(params, np.stack([tokens.numpy(), np.array(second)], axis=1)) < 1e-6


def test_acceptance_is_the_overlap_of_the_distributions() -> None:
    """Leviathan et al. 2023, theorem 3.5: a draft is accepted with probability sum of min(p, q)."""
    params = SETTINGS["plain"]
    tokens, probs = draw(PROPOSAL.expand(TRIALS, VOCAB), rows_for(params, TRIALS))
    drafts = [Draft((t,), q[None]) for t, q in zip(tokens.tolist(), probs)]
    own = rows_for(params, TRIALS)
    rows = [row for o, d in zip(own, drafts) for row in draft_rows(o, d.token_ids)]
    found = verify(TARGET.expand(len(rows), VOCAB), rows, drafts, sample)
    share = sum(len(v.token_ids) == 2 for v in found) / TRIALS
    want = float(torch.minimum(TARGET.softmax(0), PROPOSAL.softmax(0)).sum())
    assert share == pytest.approx(want, abs=4 * (want * (1 - want) / TRIALS) ** 0.5)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_distribution_is_the_one_that_is_sampled(name: str) -> None:
    got = distribution(TARGET[None], rows_for(SETTINGS[name], 1))[0].double().numpy()
    np.testing.assert_allclose(got, closed_form(SETTINGS[name], [2], TARGET), rtol=1e-5, atol=1e-9)


def test_drafts_stand_up_to_the_first_that_is_not_the_likeliest() -> None:
    params = SamplingParams(temperature=0.0, logprobs=1)
    logits = torch.eye(4)[[3, 1, 2, 0]] * 5  # the likeliest tokens of four rows
    row = SamplingRow(params, [0], 1, frozenset(), 0)
    draft = Draft((3, 1, 0))
    (found,) = verify(logits, draft_rows(row, draft.token_ids), [draft], sample)
    assert found.token_ids == [3, 1, 2]
    assert [s.token_id for s in found.logprobs if s] == [3, 1, 2]


def test_seeded_requests_get_the_tokens_that_they_get_without() -> None:
    params = SamplingParams(temperature=1.0, seed=5, top_p=0.9)
    own = rows_for(params, 200)
    alone = [sample(TARGET[None], [row])[0][0] for row in own]
    drafts = [Draft((i % VOCAB,)) for i in range(200)]
    rows = [row for o, d in zip(own, drafts) for row in draft_rows(o, d.token_ids)]
    found = verify(TARGET.expand(len(rows), VOCAB), rows, drafts, sample)
    assert [v.token_ids[0] for v in found] == alone


def test_penalties_count_the_drafts_before() -> None:
    """A ban on a repeated token holds within one step."""
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    row = SamplingRow(params, [9], 1, frozenset(), 0)
    logits = torch.zeros(3, 10)
    logits[:, 4], logits[:, 5] = 1.0, 0.5
    draft = Draft((4, 4))
    (found,) = verify(logits, draft_rows(row, draft.token_ids), [draft], sample)
    assert found.token_ids == [4, 5]


def test_logprobs_are_of_the_raw_distribution_after_a_refusal_too() -> None:
    params = SamplingParams(temperature=0.7, logprobs=2)
    tokens, probs = draw(PROPOSAL.expand(300, VOCAB), rows_for(params, 300))
    drafts = [Draft((t,), q[None]) for t, q in zip(tokens.tolist(), probs)]
    own = rows_for(params, 300)
    rows = [row for o, d in zip(own, drafts) for row in draft_rows(o, d.token_ids)]
    raw = TARGET.log_softmax(0)
    lengths = set()
    for found in verify(TARGET.expand(len(rows), VOCAB), rows, drafts, sample):
        lengths.add(len(found.token_ids))
        for token, score in zip(found.token_ids, found.logprobs, strict=True):
            assert score is not None
            assert score.token_id == token
            assert score.logprob == pytest.approx(float(raw[token]), abs=1e-5)
            assert list(score.top) == [0, 3]
    assert lengths == {1, 2}


def test_equal_distributions_refuse_nothing() -> None:
    params = SETTINGS["plain"]
    tokens, probs = draw(TARGET.expand(500, VOCAB), rows_for(params, 500))
    drafts = [Draft((t,), q[None]) for t, q in zip(tokens.tolist(), probs)]
    rows = [row for o, d in zip(rows_for(params, 500), drafts) for row in draft_rows(o, d.token_ids)]
    assert all(len(v.token_ids) == 2 for v in verify(TARGET.expand(len(rows), VOCAB), rows, drafts, sample))


def test_rows_that_are_no_numbers_give_no_token() -> None:
    params = SETTINGS["plain"]
    tokens, probs = draw(TARGET[None], rows_for(params, 1))
    draft = Draft((int(tokens[0]),), probs)
    logits = torch.full((2, VOCAB), float("nan"))
    (found,) = verify(logits, draft_rows(rows_for(params, 1)[0], draft.token_ids), [draft], sample)
    assert NO_TOKEN in found.token_ids
