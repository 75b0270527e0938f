"""KL divergence to second order in the weights, by backward passes: what each scheme of each group would cause.

For a small change δz of a position's logits, KL(p ‖ q) changes by (q − p)ᵀδz + ½ δzᵀ(diag q − qqᵀ)δz. One random vector
v with that covariance is drawn for every position and sent backward; g = ∂(Σ vᵀz)/∂y at a linear's output y then gives,
for an error ΔY of that output, E[(Σ g·ΔY)²] = δzᵀ(diag q − qqᵀ)δz summed over positions. One weight error acts on every
token, so the g_t·ΔY_t of neighbours add up (most so in q,k,v), while products of distant tokens have a small mean and a
large noise: the second-order term is ½ Σ_runs (Σ_{t in run} g_t·ΔY_t)², in nats, over runs of RUN tokens. Scoring by
(g·ΔY)² is the idea of NVIDIA's Model-Optimizer (auto_quantize), there with labels from data and each output on its own.

With ΔY = X ΔWᵀ a run's sum is ⟨ΔW, G⟩, G = Σ_{t in run} g_t x_tᵀ the run's own weight gradient. It is made once for all
schemes, so that their number costs next to nothing: forward, forward again with a graph, backward, weight gradients are
four forward passes in all.

Around the 16-bit model q = p, and only the second-order term is left: the metric `fisher`. Around a plan the
first-order term counts too: it holds how the error of one group adds to, or cancels, the errors of all others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from qtool.quant.calibration import Block, BlockWalker
from qtool.quant.progress import ProgressFn
from qtool.quant.scheme import QuantPlan, QuantScheme, scheme_name
from qtool.sensitivity.candidates import Group, fake_quantize

Damage = dict[str, dict[str, float]]  # group name → scheme name → damage

RUN = 32  # rank correlation with the measured KL on SmolLM2-135M: runs of 1 token 0.86, of 32 0.91
FORWARD_PASSES = 4  # what it costs, in forward passes of the blocks
_GRADIENT_ELEMENTS = 1 << 24  # of weight gradients held at a time
_SEED = 0


def fisher_damage(walker: BlockWalker, groups: list[Group], progress: ProgressFn) -> Damage:
    """Predicted KL (nats, mean over tokens) when one group alone is quantized."""
    return expand(walker, groups, None, progress)


def expand(
    walker: BlockWalker,
    groups: Sequence[Group],
    plan: QuantPlan | None,
    progress: ProgressFn,
    *,
    base: Sequence[Tensor] = (),
) -> Damage:
    """Predicted change of KL (nats, mean over tokens) when one group goes from the plan's scheme to another.

    Forward once and keep every block's inputs, then backward block by block, each recomputed with its graph. Memory:
    one block with its graph for a batch, and the hidden states of all samples for each block.

    Args:
        walker: at its start.
        groups: whose candidates are tried; 16-bit too where the group keeps it and the plan does not have it.
        plan: what to expand around, rounded to nearest; None: the 16-bit model.
        base: with a plan, the 16-bit model's hidden states after the last block, for each batch.
    """
    prefix = []
    for block in walker:
        prefix.append(list(block.inputs))
        round_block(block, plan)
        progress("probe (forward)", block.index + 1, len(walker))
    cotangents = _head_cotangents(walker, base)
    tokens = sum(states.shape[0] * states.shape[1] for states in walker.states)
    damage: Damage = {}
    for index in reversed(range(len(walker))):
        mine = [g for g in groups if g.block == index]
        block = walker.block(index, prefix.pop())
        deltas = {name: values for g in mine for name, values in _deltas(block, g, plan).items()}
        round_block(block, plan)
        for i, inputs in enumerate(block.inputs):
            taps, cotangents[i] = _backward(block, inputs, cotangents[i])
            for group in mine:
                # of each cotangent: [schemes, runs], over the whole group, whose errors act together
                curved, *sloped = (
                    torch.stack([_run_changes(taps[n][0], taps[n][1][k], deltas[n]) for n in group.members]).sum(0)
                    for k in range(len(cotangents[i]))
                )
                change = 0.5 * curved.double().square().sum(1) + sum(runs.double().sum(1) for runs in sloped)
                of_group = damage.setdefault(group.name, {})
                for scheme, nats in zip(_tried(group, plan), change.tolist(), strict=True):
                    name = scheme_name(scheme)
                    of_group[name] = of_group.get(name, 0.0) + nats / tokens
        progress("probe (backward)", len(walker) - index, len(walker))
    return damage


def round_block(block: Block, plan: QuantPlan | None) -> None:
    """Leave the plan's weights, rounded to nearest, in the block."""
    for name, linear in block.linears.items():
        if plan is not None and (scheme := plan[name]) is not None:
            linear.weight.data = fake_quantize(name, linear.weight.data, scheme)


def _tried(group: Group, plan: QuantPlan | None) -> list[QuantScheme | None]:
    """The group's candidates; 16-bit among them where it is one and is not what is expanded around."""
    return [*([None] if group.keeps_float and plan is not None else []), *group.schemes]


def _deltas(block: Block, group: Group, plan: QuantPlan | None) -> dict[str, Tensor]:
    """Member → [schemes tried, N * K] change of its weight from the plan's; the block still holds 16-bit weights."""

    def rounded(name: str, scheme: QuantScheme | None) -> Tensor:
        weight = block.linears[name].weight.data
        return weight if scheme is None else fake_quantize(name, weight, scheme)

    return {
        name: torch.stack([rounded(name, s) for s in _tried(group, plan)])
        .sub_(rounded(name, None if plan is None else plan[name]))
        .flatten(1)
        for name in group.members
    }


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


def _head_cotangents(walker: BlockWalker, base: Sequence[Tensor]) -> list[list[Tensor]]:
    """For every batch, at the final hidden states [b, seq, hidden]: ∂(Σ vᵀz), v drawn with covariance diag q − qqᵀ at
    every position; then, where `base` is given, ∂(Σ KL) of the positions, q − p at the logits."""
    head = walker.head()
    generator = torch.Generator().manual_seed(_SEED)
    found = []
    for i, states in enumerate(walker.states):
        states = states.detach().requires_grad_()
        logits = head(states)
        with torch.no_grad():
            q = logits.softmax(-1)
            signs = torch.randint(0, 2, q.shape, generator=generator, dtype=torch.int8).to(q.device)
            v = q.sqrt().mul_(signs.mul_(2).sub_(1))
            v.sub_(q * v.sum(-1, keepdim=True))
            slope = [q.sub_(head(base[i]).softmax(-1))] if base else []
        found.append([at_states for (at_states,) in _gradients(logits, [states], [v, *slope])])
    return found


def _gradients(output: Tensor, inputs: list[Tensor], cotangents: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """For each cotangent, the gradients of Σ cotangent · output at all inputs."""
    last = len(cotangents) - 1
    return [torch.autograd.grad(output, inputs, c, retain_graph=i < last) for i, c in enumerate(cotangents)]


def _backward(
    block: Block, inputs: Tensor, cotangents: list[Tensor]
) -> tuple[dict[str, tuple[Tensor, list[Tensor]]], list[Tensor]]:
    """One block forward and backward.

    Returns: linear → (input [b, seq, in], for each cotangent the gradient at its output [b, seq, out]), and for each
    cotangent the gradient at the block's input.
    """
    inner: dict[str, Tensor] = {}
    outer: dict[str, Tensor] = {}
    handles = []
    for name, linear in block.linears.items():

        def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor, name: str = name) -> None:
            inner[name], outer[name] = args[0].detach(), output

        handles.append(linear.register_forward_hook(keep))
    try:
        inputs = inputs.detach().requires_grad_()
        output = block.run(inputs)
    finally:
        for handle in handles:
            handle.remove()
    found = _gradients(output, [*outer.values(), inputs], cotangents)
    taps = {name: (inner[name], [grads[k] for grads in found]) for k, name in enumerate(outer)}
    return taps, [grads[-1] for grads in found]
