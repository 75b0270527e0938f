"""How far a candidate's predictions lie from the base's, token by token: pure functions over logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24  # 64 MB of float32 per temporary
TOP_K = 5


@dataclass(frozen=True)
class TokenScores:
    """Both models' predictions at T positions of one text; every field is [T] on the CPU.

    Attributes:
        base_nll, candidate_nll: float32, negative log-likelihood of the token that follows, in nats.
        kl: float32, KL(base ‖ candidate) over the whole vocabulary, in nats, ≥ 0 up to rounding.
        same_top1: bool, whether both put the same token first.
        top5_overlap: float32, share of the base's five likeliest tokens among the candidate's five.

    A candidate's row of logits with NaN or +infinity predicts nothing: its numbers are NaN, and it agrees with no base.
    """

    base_nll: Tensor
    candidate_nll: Tensor
    kl: Tensor
    same_top1: Tensor
    top5_overlap: Tensor


def token_scores(base: Tensor, candidate: Tensor, targets: Tensor) -> TokenScores:
    """Compare two models' logits [T, vocab] at positions whose next tokens are `targets` [T] int64.

    Log-softmax and sums are taken in float32 (whatever the logits' type), a bounded number of rows at a time.

    Raises:
        ValueError: shapes that do not fit together.
    """
    if base.shape != candidate.shape or base.ndim != 2 or targets.shape != base.shape[:1]:
        shapes = f"{tuple(base.shape)}, {tuple(candidate.shape)}, {tuple(targets.shape)}"
        raise ValueError(f"expected [T, vocab], [T, vocab], [T], got {shapes}")
    rows = max(1, CHUNK_ELEMENTS // base.shape[1])
    chunks = zip(torch.split(base, rows), torch.split(candidate, rows), torch.split(targets, rows))
    parts = [_score_rows(b, c, t) for b, c, t in chunks]
    return TokenScores(*(torch.cat(column) for column in zip(*parts)))


def _score_rows(base: Tensor, candidate: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    log_p = torch.log_softmax(base.float(), dim=-1)
    log_q = torch.log_softmax(candidate.float(), dim=-1)
    pick = targets[:, None]
    base_nll = -log_p.gather(1, pick)[:, 0]
    candidate_nll = -log_q.gather(1, pick)[:, 0]
    k = min(TOP_K, base.shape[1])
    top_p, top_q = log_p.topk(k).indices, log_q.topk(k).indices  # [rows, k]
    whole = ~log_q.isnan().any(dim=-1)
    overlap = (top_p[:, :, None] == top_q[:, None, :]).any(dim=-1).float().mean(dim=-1) * whole
    same = (top_p[:, 0] == top_q[:, 0]) & whole
    # p·(log p − log q), where p = 0 (a logit of −inf) adds nothing
    kl = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - log_q)).sum(dim=-1)
    return base_nll.cpu(), candidate_nll.cpu(), kl.cpu(), same.cpu(), overlap.cpu()


@dataclass(frozen=True)
class Distribution:
    """What is told of one per-token quantity."""

    mean: float
    p50: float
    p99: float
    max: float


def describe(values: Tensor) -> Distribution:
    """Mean, median, 99th percentile and maximum of `values` [n], in float64."""
    v = values.double()
    p50, p99 = torch.quantile(v, torch.tensor([0.5, 0.99], dtype=torch.float64)).tolist()
    return Distribution(mean=v.mean().item(), p50=p50, p99=p99, max=v.max().item())


def perplexity(nll: Tensor) -> float:
    """exp of the mean negative log-likelihood `nll` [n], summed in float64; inf where that overflows."""
    return nll.double().mean().exp().item()
