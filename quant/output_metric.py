"""How errors of a block's output count: the Fisher metric of the model's answer, from one backward pass.

For a small change δ of the hidden states after a block, KL(p ‖ p') ≈ ½ δᵀFδ with F = E[g gᵀ], g the gradient of Σ vᵀz
at those states, z the logits and v random with covariance diag p − ppᵀ at every position (Amari's natural metric; used
for quantization by YAQA, Tseng et al. 2025, arXiv 2505.22988, there per layer). Averaged over tokens it is one
[hidden, hidden] matrix for a block: some directions of the residual stream count a hundred times more than others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qtool.quant.block_search import compute_dtype
from qtool.quant.calibration import BlockWalker
from qtool.quant.progress import ProgressFn, silent

FLOOR = 0.02  # of the mean eigenvalue, added to all: directions that the samples did not excite count a little


def output_metrics(walker: BlockWalker, *, seed: int = 0, progress: ProgressFn = silent) -> list[Tensor]:
    """One metric [hidden, hidden] float32 for each block of the 16-bit model, over the samples of `walker`.

    Forward once and keep every block's inputs, then backward block by block, each recomputed with its graph. Memory:
    one block with its graph for a batch, and the hidden states of the samples for each block. The walk is used up.
    """
    dtype = compute_dtype(walker.device)
    with torch.autocast(walker.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        inputs = []
        for block in walker:
            inputs.append(list(block.inputs))
            progress("output metric (forward)", block.index + 1, len(walker))
        grads = _head_gradients(walker, seed)
        metrics: list[Tensor] = []
        for index in reversed(range(len(walker))):
            metrics.append(_second_moment(grads))
            block = walker.block(index, inputs.pop())
            for i, batch in enumerate(block.inputs):
                states = batch.detach().requires_grad_()
                grads[i] = torch.autograd.grad(block.run(states), states, grads[i])[0]
            progress("output metric (backward)", len(walker) - index, len(walker))
    return metrics[::-1]


def _second_moment(grads: list[Tensor]) -> Tensor:
    """E[g gᵀ] over all tokens, plus the floor."""
    size = grads[0].shape[-1]
    total = torch.zeros(size, size, device=grads[0].device)
    for grad in grads:
        flat = grad.reshape(-1, size).float()
        total.addmm_(flat.T, flat)
    total /= sum(grad.shape[0] * grad.shape[1] for grad in grads)
    total.diagonal().add_(FLOOR * total.diagonal().mean())
    return total


def _head_gradients(walker: BlockWalker, seed: int) -> list[Tensor]:
    """∂(Σ vᵀz)/∂(final hidden states) [b, seq, hidden] for every batch of samples."""
    head = walker.head()
    generator = torch.Generator().manual_seed(seed)
    grads = []
    for batch in walker.states:
        states = batch.detach().requires_grad_()
        logits = head(states)
        with torch.no_grad():
            p = logits.float().softmax(-1)
            signs = torch.randint(0, 2, p.shape, generator=generator, dtype=torch.int8).to(p.device)
            v = p.sqrt().mul_(signs.mul_(2).sub_(1))
            v.sub_(p.mul_(v.sum(-1, keepdim=True)))
        grads.append(torch.autograd.grad(logits, states, v.to(logits.dtype))[0])
    return grads
