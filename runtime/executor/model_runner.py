"""One step on the device: the scheduled tokens laid out flat, the model, logits where they are needed, sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from qtool.runtime.engine.params import TokenLogprobs
from qtool.runtime.engine.request import ScheduledRequest, StepResult
from qtool.runtime.executor.sampler import SamplingRow, sample, token_logprobs
from qtool.runtime.kernels.attention import plan_attention
from qtool.runtime.models.decoder import Decoder

SCORE_ROWS = 128  # prompt positions whose logits are held at a time


def kv_block_bytes(model: Decoder, block_size: int) -> int:
    """Bytes of one KV block over all layers."""
    config = model.config
    return config.num_layers * block_size * 2 * config.num_kv_heads * config.head_dim * model.dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not garbage: masked slots are multiplied by zero, and NaN times zero is NaN.

    On a CPU they come from numpy, whose zeros take no memory until they are written.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


class ModelRunner:
    """The executor on one device: owns the KV cache, `num_blocks` blocks of `block_size` tokens per layer."""

    def __init__(self, model: Decoder, *, num_blocks: int, block_size: int) -> None:
        self.model = model
        self.block_size = block_size
        self.device = model.embed.device
        config = model.config
        shape = (num_blocks, block_size, 2 * config.num_kv_heads, config.head_dim)
        self.caches = [_zeros(shape, model.dtype, self.device) for _ in range(config.num_layers)]

    @torch.inference_mode()
    def execute(self, batch: Sequence[ScheduledRequest]) -> list[StepResult]:
        """Compute a step; results in the order of `batch`."""
        order = sorted(range(len(batch)), key=lambda i: (batch[i].num_tokens > 1, batch[i].start))
        works = [batch[i] for i in order]
        plan = plan_attention(
            [w.start for w in works],
            [w.num_tokens for w in works],
            [w.block_table for w in works],
            block_size=self.block_size,
            windows=self.model.windows,
            dtype=self.model.dtype,
            device=self.device,
        )
        flat = [t for w in works for t in w.request.token_ids[w.start : w.start + w.num_tokens]]
        hidden = self.model.forward(torch.tensor(flat, device=self.device), plan, self.caches)
        results: list[StepResult] = [StepResult()] * len(batch)
        first_rows: list[int] = []
        row = 0
        for work in works:
            first_rows.append(row)
            row += work.num_tokens
        sampled = self._sample(hidden, works, first_rows)
        for index, work, first in zip(order, works, first_rows):
            token, logprobs = sampled.get(first, (None, None))
            scores, count = self._score(hidden, work, first)
            results[index] = StepResult(token, logprobs, scores, count)
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
        self, hidden: Tensor, work: ScheduledRequest, first: int
    ) -> tuple[tuple[TokenLogprobs | Tensor, ...], int]:
        """Scores of the prompt positions that this piece of work makes known, and how many they are."""
        request = work.request
        if request.score_from is None or work.padding or request.num_scored == request.num_to_score:
            return (), 0
        begin = request.score_from + request.num_scored  # the token scored by the logits one position before it
        end = min(work.start + work.num_tokens, request.score_from + request.num_to_score - 1)
        scores: list[TokenLogprobs | Tensor] = []
        for at in range(begin, end + 1, SCORE_ROWS):
            stop = min(at + SCORE_ROWS, end + 1)
            rows = hidden[first + at - 1 - work.start : first + stop - 1 - work.start]
            logits = self.model.logits(rows)
            if request.score_kind == "logits":
                scores.append(logits)
                continue
            targets = torch.tensor(request.token_ids[at:stop], device=self.device)
            scores += token_logprobs(logits, targets, [request.params.prompt_logprobs or 0] * len(targets))
        return tuple(scores), max(0, end + 1 - begin)
