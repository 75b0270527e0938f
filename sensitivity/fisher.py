"""The Fisher metric: the KL divergence that each error would cause, to second order, from one backward pass.

For a small change δz of a position's logits, KL(p ‖ p') ≈ ½ δzᵀ(diag p − ppᵀ)δz. One random vector v with that
covariance is drawn for every position and sent backward; g = ∂(Σ vᵀz)/∂y at a linear's output y then gives, for an
error ΔY of that output, E[(Σ g·ΔY)²] = δzᵀ(diag p − ppᵀ)δz summed over positions. One weight error acts on every token,
so the g_t·ΔY_t of neighbours add up (most so in q,k,v), while products of distant tokens have a small mean and a large
noise: the score is ½ Σ_runs (Σ_{t in run} g_t·ΔY_t)², in nats, over runs of RUN tokens. Scoring by (g·ΔY)² is the idea
of NVIDIA's Model-Optimizer (auto_quantize), there with labels from data and each output on its own.

With ΔY = X ΔWᵀ a run's sum is ⟨ΔW, G⟩, G = Σ_{t in run} g_t x_tᵀ the run's own weight gradient. It is made once for all
schemes, so that their number costs next to nothing: forward, forward again with a graph, backward, weight gradients are
four forward passes in all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from qtool.quant.calibration import Block, BlockWalker
from qtool.quant.progress import ProgressFn
from qtool.sensitivity.candidates import Damage, Group
from qtool.sensitivity.rounding import NEAREST, Rounding, block_rounding

RUN = 32  # rank correlation with the measured KL on SmolLM2-135M: runs of 1 token 0.86, of 32 0.91
FORWARD_PASSES = 4.0  # what it costs, quantizing apart
_GRADIENT_ELEMENTS = 1 << 24  # of weight gradients held at a time
_SEED = 0


def fisher_damage(
    walker: BlockWalker, groups: list[Group], progress: ProgressFn, rounding: Rounding = NEAREST
) -> tuple[Damage, float]:
    """Predicted KL (mean over tokens) when one group alone is quantized: nats; and the forward passes it took.

    Forward once and keep every block's inputs, then backward block by block, each recomputed with its graph. Memory:
    one block with its graph for a batch, and the hidden states of all samples for each block.
    """
    held = rounding.held
    prefix = []
    for block in walker:
        prefix.append(list(block.inputs))
        progress("probe (forward)", block.index + 1, len(walker))
    grads = _head_grads(walker, walker.states[held:])
    tokens = sum(g.shape[0] * g.shape[1] for g in grads)
    damage: Damage = {}
    for index in reversed(range(len(walker))):
        mine = [g for g in groups if g.block == index]
        states = prefix.pop()
        block = walker.block(index, states[:held])
        rounded = block_rounding(block, mine, rounding)
        deltas = {
            name: torch.stack([rounded(name, block.linears[name].weight, s) for s in g.schemes])
            .sub_(block.linears[name].weight)
            .flatten(1)
            for g in mine
            for name in g.members
        }
        for i, inputs in enumerate(states[held:]):
            taps, grads[i] = _backward(block, inputs, grads[i])
            for group in mine:
                change = torch.stack([_run_changes(*taps[n], deltas[n]) for n in group.members]).sum(0)
                for scheme, runs in zip(group.schemes, change.double(), strict=True):
                    of_group = damage.setdefault(group.name, {})
                    of_group[scheme.name] = of_group.get(scheme.name, 0.0) + 0.5 * float(runs.square().sum()) / tokens
        progress("probe (backward)", len(walker) - index, len(walker))
    share = held / (held + len(grads))  # goes forward twice, and not back
    return damage, FORWARD_PASSES * (1 - share) + 2 * share


def _run_changes(x: Tensor, grad: Tensor, deltas: Tensor) -> Tensor:
    """Σ grad · (x ΔWᵀ) over the tokens and outputs of every run: [num_deltas, b * runs of RUN tokens].

    Args:
        x, grad: input [b, seq, K] and gradient at the output [b, seq, N] of a linear.
        deltas: [num_deltas, N * K] changes of its weight.
    """
    missing = -x.shape[1] % RUN
    x, grad = (functional.pad(t, (0, 0, 0, missing)).reshape(-1, RUN, t.shape[-1]) for t in (x, grad))
    at_once = max(1, _GRADIENT_ELEMENTS // deltas.shape[1])
    pairs = zip(torch.split(x, at_once), torch.split(grad, at_once), strict=True)
    return torch.cat([deltas @ torch.bmm(g.transpose(1, 2), y).flatten(1).T for y, g in pairs], dim=1)


def _head_grads(walker: BlockWalker, batches: Sequence[Tensor]) -> list[Tensor]:
    """∂(Σ vᵀz)/∂(final hidden states) for every batch, v drawn with covariance diag p − ppᵀ at every position."""
    head = walker.head()
    generator = torch.Generator().manual_seed(_SEED)
    grads = []
    for states in batches:
        states = states.detach().requires_grad_()
        logits = head(states)
        with torch.no_grad():
            p = logits.softmax(-1)
            signs = torch.randint(0, 2, p.shape, generator=generator, dtype=torch.int8).to(p.device)
            v = p.sqrt().mul_(signs.mul_(2).sub_(1))
            v.sub_(p.mul_(v.sum(-1, keepdim=True)))
        grads.append(torch.autograd.grad(logits, states, v)[0])
    return grads


def _backward(block: Block, inputs: Tensor, grad: Tensor) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor]:
    """One block forward and backward.

    Returns: linear → (input [b, seq, in], gradient at its output [b, seq, out]), and the gradient at the block's input.
    """
    inner: dict[str, Tensor] = {}
    outer: dict[str, Tensor] = {}
    handles = []
    for name, linear in block.linears.items():

        def keep(module: torch.nn.Module, args: tuple[Tensor, ...], output: Tensor, name: str = name) -> None:
            inner[name], outer[name] = args[0].detach(), output

        handles.append(linear.register_forward_hook(keep))
    try:
        inputs = inputs.detach().requires_grad_()
        output = block.run(inputs)
    finally:
        for handle in handles:
            handle.remove()
    names = list(outer)
    *at_outputs, at_inputs = torch.autograd.grad(output, [*(outer[n] for n in names), inputs], grad)
    return {n: (inner[n], g) for n, g in zip(names, at_outputs, strict=True)}, at_inputs
