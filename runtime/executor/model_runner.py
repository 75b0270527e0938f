"""One step on the device: the scheduled tokens laid out flat, the model, logits where they are needed, sampling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from qtool.runtime.engine.params import TokenLogprobs
from qtool.runtime.engine.request import ScheduledRequest, StepResult
from qtool.runtime.executor.sampler import NO_TOKEN, SamplingRow, sample, token_logprobs
from qtool.runtime.kernels.dispatch import layer_ops
from qtool.runtime.kernels.kv_cache import kv_bytes_per_token, make_kv_cache
from qtool.runtime.models.decoder import Decoder

SCORE_ROWS = 128  # prompt positions whose logits are held at a time
NOT_FINITE = "the model computed NaN or infinity: its weights are damaged, or too large for its dtype"


def kv_block_bytes(model: Decoder, block_size: int) -> int:
    """Bytes of one KV block over all layers."""
    config = model.config
    token = kv_bytes_per_token(2 * config.num_kv_heads, config.head_dim, model.dtype, model.kv_mode)
    return config.num_layers * block_size * token


class ModelRunner:
    """The executor on one device: owns the KV cache, `num_blocks` blocks of `block_size` tokens per layer."""

    def __init__(self, model: Decoder, *, num_blocks: int, block_size: int) -> None:
        self.model = model
        self.block_size = block_size
        self.device = model.embed.device
        config = model.config
        self.ops = layer_ops(model.attention_shape, config.hidden_size, block_size, model.dtype, self.device)
        self.caches = [
            make_kv_cache(
                num_blocks,
                block_size,
                2 * config.num_kv_heads,
                config.head_dim,
                dtype=model.dtype,
                mode=model.kv_mode,
                device=self.device,
                static_scales=layer.kv_scales,
            )
            for layer in model.layers
        ]

    def collect(self, step: list[StepResult]) -> list[StepResult]:
        return step

    @torch.inference_mode()
    def submit(self, batch: Sequence[ScheduledRequest]) -> list[StepResult]:
        """Compute a step; results in the order of `batch`."""
        order = sorted(range(len(batch)), key=lambda i: (batch[i].num_tokens > 1, batch[i].start))
        works = [batch[i] for i in order]
        plan = self.ops.plan(
            [w.start for w in works],
            [w.num_tokens for w in works],
            [w.block_table for w in works],
            block_size=self.block_size,
            shape=self.model.attention_shape,
            windows=self.model.windows,
            dtype=self.model.dtype,
            device=self.device,
        )
        flat = [t for w in works for t in w.request.token_ids[w.start : w.start + w.num_tokens]]
        hidden = self.model.forward(torch.tensor(flat, device=self.device), plan, self.caches, self.ops)
        broken = ~hidden.abs().amax(dim=-1).isfinite()  # [num_tokens]
        failed = broken.tolist()
        if any(failed):
            for cache in self.caches:
                cache.erase(plan.slot_mapping[broken])
        results: list[StepResult] = [StepResult()] * len(batch)
        first_rows: list[int] = []
        row = 0
        for work in works:
            first_rows.append(row)
            row += work.num_tokens
        sampled = self._sample(hidden, works, first_rows)
        scored = self._score(hidden, works, first_rows)
        for index, work, first, scores in zip(order, works, first_rows, scored):
            token, logprobs = sampled.get(first, (None, None))
            if any(failed[first : first + work.num_tokens]) or token == NO_TOKEN or not all(map(_is_finite, scores)):
                results[index] = StepResult(error=f"{NOT_FINITE} ({str(self.model.dtype).removeprefix('torch.')} here)")
            else:
                results[index] = StepResult(token, logprobs, scores, len(_scored_span(work)))
        return results

    def _sample(
        self, hidden: Tensor, works: Sequence[ScheduledRequest], first_rows: Sequence[int]
    ) -> dict[int, tuple[int, TokenLogprobs | None]]:
        """First row of a piece of work → its next token, for those that are due one. Padding is computed as well."""
        due = [(w, f) for w, f in zip(works, first_rows) if w.sample or w.padding]
        if not due:
            return {}
        last = torch.tensor([f + w.num_tokens - 1 for w, f in due], device=self.device)
        logits = self.model.logits(hidden[last])
        rows = [
            SamplingRow(r.params, r.token_ids, r.num_prompt_tokens, r.stop_token_ids, r.sample_seed)
            for r in (w.request for w, _ in due)
        ]
        tokens, logprobs = sample(logits, rows)
        return {f: (t, p) for (w, f), t, p in zip(due, tokens, logprobs) if w.sample}

    def _score(
        self, hidden: Tensor, works: Sequence[ScheduledRequest], first_rows: Sequence[int]
    ) -> list[tuple[TokenLogprobs | Tensor, ...]]:
        """Per piece of work, the scores of the prompt positions that it makes known.

        Rows of requests that want log-probabilities go through the head together: a multiple-choice item has a handful.
        """
        spans = [_scored_span(work) for work in works]
        # the logits of the row before a token score it
        rows = [[f + at - 1 - w.start for at in span] for w, f, span in zip(works, first_rows, spans)]
        scores: list[tuple[TokenLogprobs | Tensor, ...]] = [()] * len(works)
        together: list[int] = []
        for i, work in enumerate(works):
            if work.request.score_kind == "logits":
                scores[i] = tuple(self._logits(hidden, piece) for piece in _pieces(rows[i]))
            else:
                together.append(i)
        tokens = [works[i].request.token_ids[at] for i in together for at in spans[i]]
        tops = [works[i].request.params.prompt_logprobs or 0 for i in together for _ in spans[i]]
        flat: list[TokenLogprobs] = []
        for piece in _pieces([row for i in together for row in rows[i]]):
            done = slice(len(flat), len(flat) + len(piece))
            targets = torch.tensor(tokens[done], device=self.device)
            flat += token_logprobs(self._logits(hidden, piece), targets, tops[done])
        each = iter(flat)
        for i in together:
            scores[i] = tuple(itertools.islice(each, len(spans[i])))
        return scores

    def _logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        return self.model.logits(hidden[torch.tensor(rows, device=self.device)])


def _scored_span(work: ScheduledRequest) -> range:
    """Positions of the tokens that this piece of work gets scored (one past the prompt's end for its last logits)."""
    request = work.request
    if request.score_from is None or work.padding or request.num_scored == request.num_to_score:
        return range(0)
    begin = request.score_from + request.num_scored
    return range(begin, min(work.start + work.num_tokens, request.score_from + request.num_to_score - 1) + 1)


def _is_finite(score: TokenLogprobs | Tensor) -> bool:
    return math.isfinite(score.logprob) if isinstance(score, TokenLogprobs) else bool(score.isfinite().all())


def _pieces(rows: Sequence[int]) -> list[Sequence[int]]:
    return [rows[at : at + SCORE_ROWS] for at in range(0, len(rows), SCORE_ROWS)]
