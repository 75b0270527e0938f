"""Which of the proposed tokens stand: exact speculative sampling, so that the output is distributed as without it.

A draft that was drawn from a distribution q is accepted with probability min(1, p / q), and where it is refused the
token comes from max(0, p - q) instead; after the last draft one more token comes from p (Leviathan et al. 2023, arXiv
2211.17192, Algorithm 1; Chen et al. 2023, arXiv 2302.01318, Algorithm 2). p and q are what `sample` draws from: after
penalties, bans, temperature and filters.

A draft that was not drawn (copied, likeliest, or chosen by the request's own random numbers) has a q of one token: then
it is as exact to draw from p as ever and to see whether the draft was hit. That way greedy requests and those with a
seed get the very tokens that they get without speculation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qtool.runtime.engine.params import TokenLogprobs
from qtool.runtime.engine.request import Draft
from qtool.runtime.executor.sampler import NO_TOKEN, SamplingRow, distribution, invert, token_logprobs, uniforms

SampleRows = Callable[[Tensor, Sequence[SamplingRow]], tuple[list[int], list[TokenLogprobs | None]]]

DRAW, ACCEPT, REPLACE = 0x5851F42D4C957F2D, 0x14057B7EF767814F, 0x2545F4914F6CDD1D
"""Random streams beside the one that `sample` uses: each position has a number of its own in each."""


class Verified(NamedTuple):
    """What a request gets: the drafts that stand and one token more. NO_TOKEN in it: its logits were no numbers."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


def draft_rows(row: SamplingRow, tokens: Sequence[int]) -> list[SamplingRow]:
    """The row itself, and the rows after each of the draft's tokens."""
    return [row, *(row.after(tokens[: i + 1]) for i in range(len(tokens)))]


def draw(logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[Tensor, Tensor]:
    """A draft token for each row: ids [rows], and the distribution it comes from [rows, vocab_size]."""
    probs = distribution(logits, rows)
    return invert(probs, _uniforms(rows, DRAW, probs)).squeeze(1), probs


def verify(
    logits: Tensor, rows: Sequence[SamplingRow], drafts: Sequence[Draft], sample_rows: SampleRows
) -> list[Verified]:
    """For each draft, the tokens to append.

    Args:
        logits: [sum of (1 + drafted tokens), vocab_size] float32, each draft's rows one after another.
        rows: as many, see `draft_rows`.
    """
    firsts, at = [], 0
    for draft in drafts:
        firsts.append(at)
        at += 1 + len(draft.token_ids)
    spans = [range(f, f + 1 + len(d.token_ids)) for f, d in zip(firsts, drafts)]
    drawn = [i for i, d in enumerate(drafts) if d.probs is not None]
    hit = [i for i, d in enumerate(drafts) if d.probs is None]
    found: dict[int, Verified] = {}
    for some, judge in ((hit, _match), (drawn, _reject)):
        where = [at for i in some for at in spans[i]]
        if where:
            part = logits if len(where) == len(rows) else logits[torch.tensor(where, device=logits.device)]
            own = [drafts[i] for i in some]
            found.update(zip(some, judge(part, [rows[at] for at in where], own, sample_rows)))
    return [found[i] for i in range(len(drafts))]


def _match(
    logits: Tensor, rows: Sequence[SamplingRow], drafts: Sequence[Draft], sample_rows: SampleRows
) -> list[Verified]:
    """Draw every row's token; a draft stands as long as it is what was drawn."""
    tokens, logprobs = sample_rows(logits, rows)
    out, at = [], 0
    for draft in drafts:
        count = 0
        while count < len(draft.token_ids) and tokens[at + count] == draft.token_ids[count]:
            count += 1
        out.append(Verified(tokens[at : at + count + 1], logprobs[at : at + count + 1]))
        at += 1 + len(draft.token_ids)
    return out


def _reject(
    logits: Tensor, rows: Sequence[SamplingRow], drafts: Sequence[Draft], sample_rows: SampleRows
) -> list[Verified]:
    target = distribution(logits, rows)
    proposed = torch.zeros_like(target)  # past a draft's end there is nothing to take away
    guess = torch.zeros(len(rows), 1, dtype=torch.long, device=target.device)
    at = 0
    for draft in drafts:
        count = len(draft.token_ids)
        proposed[at : at + count] = draft.probs[:count]
        guess[at : at + count, 0] = torch.tensor(draft.token_ids, device=target.device)
        at += 1 + count
    chance, asked = target.gather(1, guess), proposed.gather(1, guess)
    stands = (_uniforms(rows, ACCEPT, target) * asked < chance).squeeze(1).tolist()
    rest = (target - proposed).clamp_(min=0)
    # p = q but for rounding: then nothing is refused, and there is nothing left to draw from
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, target)
    instead = invert(rest, _uniforms(rows, REPLACE, target)).squeeze(1)
    replaced = torch.where(logits.amax(dim=-1).isfinite(), instead, NO_TOKEN).tolist()
    out: list[Verified] = []
    kept: list[int] = []
    at = 0
    for draft in drafts:
        count = 0
        while count < len(draft.token_ids) and stands[at + count]:
            count += 1
        tokens = [*draft.token_ids[:count], replaced[at + count]]
        kept += range(at, at + count + 1)
        out.append(Verified(tokens, [None] * len(tokens)))
        at += 1 + len(draft.token_ids)
    return _with_logprobs(out, logits, [rows[i] for i in kept], kept)


def _with_logprobs(
    found: list[Verified], logits: Tensor, rows: Sequence[SamplingRow], kept: Sequence[int]
) -> list[Verified]:
    """Add the log-probabilities of the raw distribution where they are asked for; `rows` of `logits` are `kept`."""
    tokens = [t for v in found for t in v.token_ids]
    asked = [i for i, r in enumerate(rows) if r.params.logprobs is not None and tokens[i] != NO_TOKEN]
    if not asked:
        return found
    scores: list[TokenLogprobs | None] = [None] * len(rows)
    where = torch.tensor([kept[i] for i in asked], device=logits.device)
    chosen = torch.tensor([tokens[i] for i in asked], device=logits.device)
    for i, score in zip(asked, token_logprobs(logits[where], chosen, [rows[i].params.logprobs or 0 for i in asked])):
        scores[i] = score
    out, at = [], 0
    for verified in found:
        count = len(verified.token_ids)
        out.append(Verified(verified.token_ids, scores[at : at + count]))
        at += count
    return out


def _uniforms(rows: Sequence[SamplingRow], stream: int, like: Tensor) -> Tensor:
    draws = uniforms([r.seed ^ stream for r in rows], [len(r.token_ids) for r in rows])
    return torch.from_numpy(draws).to(like.device, torch.float32)[:, None]
