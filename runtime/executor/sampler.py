"""Choosing the next token of every row of a step at once, and its log-probabilities. Float32 throughout.

Order of operations: penalties, bias, allowed tokens, the output's form and bans, temperature, typical-p, min-p, top-k,
top-p (as in vLLM, which has no typical-p). Log-probabilities are of the raw distribution, before all of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from qtool.runtime.engine.params import SamplingParams, TokenLogprobs
from qtool.runtime.engine.structured_output import TokenMatcher
from qtool.runtime.executor.structured_output import apply_masks, token_masks

NO_TOKEN = -1
LOWEST_TEMPERATURE = 1e-3  # that a dynamic one comes down to
LEAST_MASS = 1e-30  # that top-p and typical-p keep: what is 0 in float32 would keep no token
CANDIDATES = 1024  # filters look at this many likeliest tokens first, and at all of them only where that is too few


@dataclass(frozen=True)
class SamplingRow:
    """One row of logits to sample from: the request's parameters, its tokens so far, its random stream, its form.

    `drafts`: the last of its tokens, not yet the request's own; the matcher does not know them.
    """

    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt_tokens: int
    stop_token_ids: frozenset[int]
    seed: int
    bad_words: tuple[tuple[int, ...], ...] = ()
    matcher: TokenMatcher | None = None
    drafts: tuple[int, ...] = ()

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def after(self, tokens: Sequence[int]) -> SamplingRow:
        """The row for the token after these, should they come next."""
        return replace(self, token_ids=[*self.token_ids, *tokens], drafts=tuple(tokens))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One number in [0, 1) per (seed, position): splitmix64 (Steele et al. 2014), counter-based.

    The draw depends on nothing else, so a request's tokens do not change with its neighbours or with preemption.
    """
    mask = (1 << 64) - 1
    z = np.array([s & mask for s in seeds], dtype=np.uint64)
    with np.errstate(over="ignore"):
        for value in (np.zeros(len(z), dtype=np.uint64), np.array(positions, dtype=np.uint64)):
            z = (z ^ value) + np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[list[int], list[TokenLogprobs | None]]:
    """The next token of each row of `logits` [rows, vocab_size] float32, and its logprobs where they are asked for.

    A row without a likeliest token (NaN or infinity in its logits) gives NO_TOKEN.
    """
    adjusted = _adjust(logits, rows)
    if all(r.params.greedy for r in rows):
        chosen = adjusted.argmax(dim=-1)
    else:
        chosen = torch.where(_column(rows, lambda p: p.greedy, adjusted), adjusted.argmax(-1, keepdim=True),
                             _draw(adjusted, rows)).squeeze(1)  # fmt: skip
    asked = [i for i, r in enumerate(rows) if r.params.logprobs is not None]
    logprobs: list[TokenLogprobs | None] = [None] * len(rows)
    if asked:
        index = torch.tensor(asked, device=logits.device)
        tops = [rows[i].params.logprobs or 0 for i in asked]
        for i, found in zip(asked, token_logprobs(logits[index], chosen[index], tops)):
            logprobs[i] = found
    return torch.where(logits.amax(dim=-1).isfinite(), chosen, NO_TOKEN).tolist(), logprobs


def distribution(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """What `sample` draws each row's token from: probabilities [rows, vocab_size] float32. No row may be greedy."""
    scaled = _scale(_adjust(logits, rows), rows)
    probs = scaled.softmax(dim=-1)
    index = [i for i, r in enumerate(rows) if _has_filter(r.params)]
    if index:
        where = torch.tensor(index, device=logits.device)
        kept, ids = _filter(scaled[where], [rows[i] for i in index])
        kept = kept / kept.sum(dim=-1, keepdim=True)
        probs[where] = torch.zeros_like(scaled[where]).scatter_(1, ids, kept)
    return probs


def token_logprobs(
    logits: Tensor, tokens: Tensor, tops: Sequence[int], rows: Tensor | None = None
) -> list[TokenLogprobs]:
    """Log-softmax of `logits` [rows, vocab_size] at `tokens` [count], and of the `tops[i]` likeliest beside the i-th.

    Args:
        rows: the row of each token, [count] int64; None: one token a row.
    """
    logprobs = logits.log_softmax(dim=-1)
    if rows is None:
        rows, seen = torch.arange(len(tokens), device=logits.device), logits
    else:
        seen = logits[rows]
    ranks = _ranks(seen, logits[rows, tokens], tokens).tolist()
    values = logprobs[rows, tokens].tolist()
    ids = seen.topk(min(max(tops, default=0), logits.shape[1]), dim=-1).indices
    scores, names = logprobs[rows[:, None], ids].tolist(), ids.tolist()
    return [
        TokenLogprobs(token, value, rank, dict(zip(name[:top], score[:top])))
        for token, value, rank, name, score, top in zip(tokens.tolist(), values, ranks, names, scores, tops)
    ]


def _ranks(logits: Tensor, own: Tensor, tokens: Tensor) -> Tensor:
    """Places [rows] of `tokens` in greedy order, from 1: likelier tokens come before, and equally likely ones of lower
    id (in 16 bits one likeliest token in fourteen has an equal). `own` are their logits.

    In float32 throughout, exact up to 2**24 tokens: on a CPU booleans take eight times as long.
    """
    step = torch.nextafter(own, own.new_tensor(float("-inf"))) - own
    ids = torch.arange(logits.shape[1], dtype=logits.dtype, device=logits.device)
    bar = torch.lt(ids, tokens[:, None].to(ids.dtype), out=torch.empty_like(logits))  # 1 where equals come before
    bar.mul_(step[:, None]).add_(own[:, None])
    return torch.gt(logits, bar, out=bar).sum(dim=1).long() + 1


def _adjust(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Penalties, bias, allowed tokens and bans."""
    return _ban(_steer(_penalize(logits, rows), rows), rows)


def _column(rows: Sequence[SamplingRow], pick: Callable[[SamplingParams], float], like: Tensor) -> Tensor:
    """[rows, 1] of one parameter: bool, int64 or float32 as `pick` gives it."""
    values = [pick(r.params) for r in rows]
    kind = torch.bool if isinstance(values[0], bool) else torch.long if isinstance(values[0], int) else torch.float32
    return torch.tensor(values, dtype=kind, device=like.device)[:, None]


def _penalize(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Repetition (Keskar et al. 2019: over prompt and output), frequency and presence penalties (over the output)."""

    def has_penalty(p: SamplingParams) -> bool:
        return p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0

    where = [i for i, r in enumerate(rows) if has_penalty(r.params)]
    if not where:
        return logits
    chosen = [rows[i] for i in where]
    index = torch.tensor(where, device=logits.device)
    part = logits[index]
    output = _counts([r.token_ids[r.num_prompt_tokens :] for r in chosen], part)
    seen = (_counts([r.token_ids for r in chosen], part)) > 0
    repetition = _column(chosen, lambda p: float(p.repetition_penalty), part)
    part = torch.where(seen, torch.where(part > 0, part / repetition, part * repetition), part)
    part = part - output * _column(chosen, lambda p: float(p.frequency_penalty), part)
    part = part - (output > 0) * _column(chosen, lambda p: float(p.presence_penalty), part)
    return logits.index_copy(0, index, part)


def _counts(tokens: Sequence[Sequence[int]], like: Tensor) -> Tensor:
    """How often each token occurs in each list: [rows, vocab_size] float32."""
    row = torch.tensor([i for i, ids in enumerate(tokens) for _ in ids], dtype=torch.long, device=like.device)
    flat = torch.tensor([t for ids in tokens for t in ids], dtype=torch.long, device=like.device)
    return torch.zeros_like(like).index_put_((row, flat), torch.ones_like(flat, dtype=like.dtype), accumulate=True)


def _steer(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Add each row's bias, then leave it its allowed tokens and those that its form permits."""
    biases = [(i, token, bias) for i, r in enumerate(rows) for token, bias in r.params.logit_bias.items()]
    if biases:
        row, token = torch.tensor([(i, t) for i, t, _ in biases], device=logits.device).T
        logits = logits.index_put((row, token), logits.new_tensor([b for _, _, b in biases]), accumulate=True)
    allowed = [(i, token) for i, r in enumerate(rows) for token in r.params.allowed_token_ids or ()]
    if allowed:
        row, token = torch.tensor(allowed, device=logits.device).T
        free = torch.tensor([r.params.allowed_token_ids is None for r in rows], device=logits.device)
        mask = free[:, None].expand(logits.shape).index_put((row, token), torch.ones_like(row, dtype=torch.bool))
        logits = logits.masked_fill(~mask, float("-inf"))
    formed = [i for i, r in enumerate(rows) if r.matcher is not None]
    if formed:
        logits = apply_masks(logits, formed, _form_masks([rows[i] for i in formed]))
    return logits


def _form_masks(rows: Sequence[SamplingRow]) -> np.ndarray:
    """token_masks of each row, which has a matcher; rows of one draft share theirs."""
    longest: dict[int, SamplingRow] = {}
    for row in rows:
        if id(row.matcher) not in longest or len(row.drafts) > len(longest[id(row.matcher)].drafts):
            longest[id(row.matcher)] = row
    first = dict(zip(longest, np.cumsum([0, *(1 + len(r.drafts) for r in longest.values())]).tolist()))
    masks = token_masks([(r.matcher, r.drafts) for r in longest.values() if r.matcher is not None])
    return masks[[first[id(r.matcher)] + len(r.drafts) for r in rows]]


def _ban(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """No token that would end the output before `min_tokens`, or complete a bad word; where that leaves none, all."""
    pairs = [(i, token) for i, r in enumerate(rows) for token in _banned(r) if token < logits.shape[1]]
    if not pairs:
        return logits
    row, token = torch.tensor(pairs, device=logits.device).T
    banned = logits.index_put((row, token), logits.new_tensor(float("-inf")))
    return torch.where(banned.amax(dim=-1, keepdim=True) == float("-inf"), logits, banned)


def _banned(row: SamplingRow) -> list[int]:
    tokens = list(row.stop_token_ids) if row.num_output_tokens < row.params.min_tokens else []
    for *head, last in row.bad_words:
        if len(head) <= row.num_output_tokens and list(row.token_ids[len(row.token_ids) - len(head) :]) == head:
            tokens.append(last)
    return tokens


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Sampled tokens [rows, 1] (greedy rows get one too; the caller drops it)."""
    scaled = _scale(logits, rows)
    draws = uniforms([r.seed for r in rows], [len(r.token_ids) for r in rows])
    u = torch.from_numpy(draws).to(logits.device, torch.float32)[:, None]
    filtered = [not r.params.greedy and _has_filter(r.params) for r in rows]
    if not any(filtered):
        return invert(scaled.softmax(dim=-1), u)
    out = torch.empty(len(rows), 1, dtype=torch.long, device=logits.device)
    plain = torch.tensor([i for i, f in enumerate(filtered) if not f], dtype=torch.long, device=logits.device)
    if plain.numel():
        out[plain] = invert(scaled[plain].softmax(dim=-1), u[plain])
    index = torch.tensor([i for i, f in enumerate(filtered) if f], dtype=torch.long, device=logits.device)
    kept, ids = _filter(scaled[index], [r for r, f in zip(rows, filtered) if f])
    out[index] = ids.gather(1, invert(kept, u[index]))
    return out


def _scale(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Logits over each row's temperature; greedy rows as they are."""
    temperature = _column(rows, lambda p: float(p.temperature) if not p.greedy else 1.0, logits)
    return logits / _dynamic_temperature(logits, temperature, rows)


def _has_filter(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0 or params.typical_p < 1


def _dynamic_temperature(logits: Tensor, temperature: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """[rows, 1]: each row's temperature, moved within its range by the entropy of its distribution at temperature 1.

    low + (high - low) · (entropy / ln(tokens that can come)) ** exponent, as llama.cpp's sampler computes it.
    """
    if all(r.params.dynatemp_range == 0 for r in rows):
        return temperature
    entropy = _entropy(logits.log_softmax(dim=-1))
    most = (logits > float("-inf")).sum(dim=-1, keepdim=True).clamp(min=2).log()
    spread = _column(rows, lambda p: float(p.dynatemp_range), logits)
    exponent = _column(rows, lambda p: float(p.dynatemp_exponent), logits)
    moved = temperature - spread + 2 * spread * (entropy / most).clamp(0, 1) ** exponent
    return torch.where(spread > 0, moved.clamp(min=LOWEST_TEMPERATURE), temperature)


def _entropy(logprobs: Tensor) -> Tensor:
    """[rows, 1] in nats, of log-probabilities [rows, vocab_size]; impossible tokens count nothing."""
    return -(logprobs.exp() * logprobs).nansum(dim=-1, keepdim=True)


def _typical(scaled: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Only the tokens whose surprise is nearest to the entropy, as many as hold `typical_p` (Meister et al. 2022)."""
    mass = _column(rows, lambda p: max(float(p.typical_p), LEAST_MASS), scaled)
    logprobs = scaled.log_softmax(dim=-1)
    order = (-logprobs - _entropy(logprobs)).abs().argsort(dim=-1, stable=True)
    probs = logprobs.exp().gather(1, order)
    kept = torch.empty_like(order, dtype=torch.bool).scatter_(1, order, probs.cumsum(dim=-1) - probs < mass)
    return scaled.masked_fill(~kept & (mass < 1), float("-inf"))


def _filter(scaled: Tensor, rows: Sequence[SamplingRow]) -> tuple[Tensor, Tensor]:
    """Weights [rows, width] of the tokens that the filters leave (0: none), likeliest first, and their ids."""
    if any(r.params.typical_p < 1 for r in rows):
        scaled = _typical(scaled, rows)
    vocab = scaled.shape[1]
    top_k = _column(rows, lambda p: p.top_k if 0 < p.top_k < vocab else vocab, scaled)
    top_p = _column(rows, lambda p: max(float(p.top_p), LEAST_MASS), scaled)
    min_p = _column(rows, lambda p: float(p.min_p), scaled)
    norm = scaled.logsumexp(dim=-1, keepdim=True)
    for width in (min(CANDIDATES, vocab), vocab):
        values, ids = scaled.topk(width, dim=-1)
        probs = (values - norm).exp()
        rank = torch.arange(width, device=scaled.device)
        kept = probs * ((rank < top_k) & (probs >= min_p * probs[:, :1]))
        before = kept.cumsum(dim=-1) - kept
        # The candidates suffice where no token beyond them counts, or where top-p alone, whose total is then 1, ends
        # among them.
        complete = (top_k <= width) | (kept[:, -1:] == 0)
        total = torch.where(complete, kept.sum(dim=-1, keepdim=True), torch.ones_like(top_p))
        ends = (top_k == vocab) & (min_p == 0) & (before[:, -1:] >= top_p)
        if width == vocab or bool((complete | ends).all()):
            break
    return kept * (before < top_p * total), ids


def invert(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF sampling: the index [rows, 1] where the running sum of `weights` passes u times their total."""
    running = weights.cumsum(dim=-1)
    at = torch.searchsorted(running, u * running[:, -1:], right=True)
    last = (weights > 0).long().cumsum(dim=-1).argmax(dim=-1, keepdim=True)  # rounding must not run past the end
    return torch.minimum(at, last)
