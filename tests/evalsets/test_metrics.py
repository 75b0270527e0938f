"""Token metrics against scipy, closed forms and a float64 reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import special
from scipy import stats as scipy_stats

from qtool.evalsets import metrics


def _logits(seed: int, rows: int = 40, vocab: int = 300) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def test_kl_and_nll_match_scipy_in_float64() -> None:
    base, candidate = _logits(0), _logits(1)
    targets = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(2))
    scores = metrics.token_scores(base, candidate, targets)
    p = special.softmax(base.double().numpy(), axis=-1)
    q = special.softmax(candidate.double().numpy(), axis=-1)
    assert np.allclose(scores.kl.numpy(), scipy_stats.entropy(p, q, axis=-1), rtol=1e-4)
    rows = np.arange(40)
    assert np.allclose(scores.base_nll.numpy(), -np.log(p[rows, targets.numpy()]), rtol=1e-5, atol=1e-5)
    assert np.allclose(scores.candidate_nll.numpy(), -np.log(q[rows, targets.numpy()]), rtol=1e-5, atol=1e-5)
    assert np.array_equal(scores.same_top1.numpy(), p.argmax(-1) == q.argmax(-1))
    brute = [len(set(np.argsort(a)[-5:]) & set(np.argsort(b)[-5:])) / 5 for a, b in zip(p, q)]
    assert np.allclose(scores.top5_overlap.numpy(), brute)


def test_chunking_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    base, candidate, targets = _logits(0), _logits(1), torch.arange(40)
    whole = metrics.token_scores(base, candidate, targets)
    monkeypatch.setattr(metrics, "CHUNK_ELEMENTS", 300 * 7)
    chunked = metrics.token_scores(base, candidate, targets)
    for name in ("kl", "base_nll", "candidate_nll", "same_top1", "top5_overlap"):
        assert torch.equal(getattr(whole, name), getattr(chunked, name))


def test_a_model_against_itself() -> None:
    scores = metrics.token_scores(_logits(3), _logits(3), torch.zeros(40, dtype=torch.int64))
    assert scores.kl.abs().max() == 0
    assert scores.same_top1.all()
    assert (scores.top5_overlap == 1).all()


def test_uniform_against_point_mass_is_log_vocab() -> None:
    """KL(point mass ‖ uniform over n) = log n, with −inf logits handled; perplexity of uniform is n."""
    point = torch.full((1, 64), -torch.inf)
    point[0, 5] = 0.0
    uniform = torch.zeros(1, 64)
    scores = metrics.token_scores(point, uniform, torch.tensor([5]))
    assert scores.kl.item() == pytest.approx(math.log(64), rel=1e-6)
    assert metrics.perplexity(scores.candidate_nll) == pytest.approx(64, rel=1e-6)


def test_describe_matches_numpy() -> None:
    values = torch.rand(1001, generator=torch.Generator().manual_seed(0))
    told = metrics.describe(values)
    v = values.double().numpy()
    assert (told.mean, told.p50, told.p99, told.max) == pytest.approx(
        (v.mean(), np.quantile(v, 0.5), np.quantile(v, 0.99), v.max())
    )


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="expected"):
        metrics.token_scores(_logits(0), _logits(1, vocab=299), torch.zeros(40, dtype=torch.int64))
