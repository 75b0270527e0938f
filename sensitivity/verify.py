"""Plans measured as a whole: the KL divergence of a model whose every group is rounded at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qtool.quant.calibration import Block, BlockWalker
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.progress import ProgressFn, silent
from qtool.quant.scheme import QuantPlan, QuantScheme
from qtool.sensitivity.candidates import fake_quantize

BATCH_TOKENS = 1024


def joint_kl(
    checkpoint: Checkpoint,
    tokens: Tensor,
    plans: Sequence[QuantPlan],
    *,
    device: torch.device,
    progress: ProgressFn = silent,
) -> list[float]:
    """KL(16-bit ‖ plan) in nats, mean over tokens, of every plan as a whole, rounded to nearest with signed scales.

    All plans walk through the blocks together, so that each block is read once. Memory: the hidden states of all
    samples for each plan, and the logits of one batch.

    Args:
        checkpoint: the 16-bit model.
        tokens: [num_sequences, seq_len] int64.
    """
    walker = BlockWalker(checkpoint, tokens, device=device, batch_tokens=BATCH_TOKENS)
    states = [list(walker.states) for _ in plans]
    for block in walker:
        originals = {name: linear.weight.data for name, linear in block.linears.items()}
        rounded: dict[tuple[str, QuantScheme], Tensor] = {}
        for plan, batches in zip(plans, states, strict=True):
            for name, weight in originals.items():
                scheme = plan[name]
                if scheme is not None and (name, scheme) not in rounded:
                    rounded[name, scheme] = fake_quantize(name, weight, scheme)
                block.linears[name].weight.data = weight if scheme is None else rounded[name, scheme]
            run_all(block, batches)
        for name, weight in originals.items():
            block.linears[name].weight.data = weight
        progress(f"measure {len(plans)} plans", block.index + 1, len(walker))
    head = walker.head()
    return [mean_kl(head, walker.states, batches) for batches in states]


@torch.no_grad()
def run_all(block: Block, batches: list[Tensor]) -> None:
    """Replace every batch by the block's output for it."""
    for i, states in enumerate(batches):
        batches[i] = block.run(states)


@torch.no_grad()
def mean_kl(head: nn.Module, base: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """KL(base ‖ other) in nats, mean over tokens, from final hidden states [b, seq, hidden]; never below zero."""
    total, count = 0.0, 0
    for one, two in zip(base, other, strict=True):
        for a, b in zip(one, two, strict=True):
            log_p, log_q = head(a).log_softmax(-1), head(b).log_softmax(-1)
            total += float((log_p.exp() * (log_p - log_q)).sum(-1).double().sum())
            count += len(log_p)
    return max(0.0, total / count)
