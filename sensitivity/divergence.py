"""KL divergence at the logits, from hidden states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


@torch.no_grad()
def mean_kl(head: nn.Module, base: Iterable[Tensor], others: Sequence[Sequence[Tensor]]) -> list[float]:
    """KL(base ‖ other) in nats, mean over tokens, for each of `others`; never below zero. Holds one sample's logits.

    Args:
        head: hidden states [..., hidden] → logits [..., vocab].
        base: final hidden states [b, seq, hidden] of every batch; each of `others` likewise.
    """
    totals, count = [0.0] * len(others), 0
    for index, batch in enumerate(base):
        for row, states in enumerate(batch):
            log_p = head(states).log_softmax(-1)
            p = log_p.exp()
            for i, other in enumerate(others):
                log_q = head(other[index][row]).log_softmax(-1)
                totals[i] += float((p * (log_p - log_q)).sum(-1).double().sum())
            count += len(states)
    return [max(0.0, total / count) for total in totals]
