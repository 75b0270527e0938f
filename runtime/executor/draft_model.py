"""Drafts from a second, cheaper model with a KV cache of its own.

The draft model runs as any other: for each request there is one more `Request` with the same tokens, parameters and
random stream, whose `num_computed_tokens` is set back to the last token that the target model kept. Nothing is copied;
what was refused is overwritten.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from qtool.runtime.engine.kv_cache_manager import KVCacheManager
from qtool.runtime.engine.params import TokenLogprobs
from qtool.runtime.engine.request import Draft, Request, ScheduledRequest
from qtool.runtime.executor.model_runner import ModelRunner
from qtool.runtime.executor.rejection import draw
from qtool.runtime.executor.sampler import SamplingRow, sample
from qtool.runtime.models.decoder import Decoder

CHUNK = 512  # tokens of new contexts in one step
NEW = 4  # from so many tokens behind on, it is a context to catch up with

log = logging.getLogger(__name__)


class DraftModel:
    """The proposer.

    Args:
        model: its vocabulary is the target's, or padded to another size.
        num_blocks, block_size: of its own KV cache.
        vocab_size: of the target model.
        max_model_len: longest text that both models can take.
        coupled: draft with the random numbers that the target will use, as for requests with a seed.
    """

    setup_seconds = 0.0

    def __init__(
        self,
        model: Decoder,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        max_model_len: int,
        prefix_caching: bool = True,
        coupled: bool = False,
    ) -> None:
        self.runner = ModelRunner(model, num_blocks=num_blocks, block_size=block_size, sample_rows=self._sample_rows)
        self.kv = KVCacheManager(num_blocks, block_size, prefix_caching=prefix_caching)
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._coupled = coupled
        self._twins: dict[Request, Request] = {}
        self._confirmed: dict[Request, int] = {}  # tokens of a twin that the target has kept
        self._probs: dict[int, Tensor] = {}  # by id of a twin's token list: what its newest token was drawn from

    def num_known(self, request: Request) -> int:
        twin = self._twins.get(request)
        return 0 if twin is None else twin.num_computed_tokens

    def forget(self, request: Request) -> None:
        twin = self._twins.pop(request, None)
        if twin is not None:
            del self._confirmed[twin]
            self.kv.free(twin)

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, Draft]:
        """At most so many tokens for each request; those for whom its cache has no room are left out."""
        counts: dict[Request, int] = {}  # by twin
        twins: dict[Request, Request] = {}
        for request, count in wanted.items():
            twin = self._twin(request)
            count = min(count, self._max_model_len - twin.num_tokens)
            if count > 0 and self.kv.grow(twin, twin.num_tokens + count - 1):
                counts[twin], twins[request] = count, twin
                twin.matcher = None if request.matcher is None else request.matcher.fork()
        began = time.perf_counter()
        caught_up = self._catch_up(list(counts))
        self.setup_seconds = time.perf_counter() - began if caught_up else 0.0
        lengths = {twin: twin.num_tokens for twin in counts}
        probs: dict[Request, list[Tensor]] = {twin: [] for twin in counts}
        for step in range(max(counts.values(), default=0)):
            self._step([twin for twin, count in counts.items() if count > step and not _complete(twin)], probs)
        out = {}
        for request, twin in twins.items():
            tokens = tuple(twin.token_ids[lengths[twin] :])
            drawn = probs[twin]
            out[request] = Draft(tokens, torch.cat(drawn) if tokens and len(drawn) == len(tokens) else None)
        return out

    def _twin(self, request: Request) -> Request:
        """The request's twin, with the same tokens as the request, and what is still true of its cache."""
        twin = self._twins.get(request)
        if twin is None:
            params = replace(request.params, logprobs=None, prompt_logprobs=None)
            twin = Request(
                request.request_id,
                request.prompt_token_ids,
                params,
                stop_token_ids=request.stop_token_ids,
                bad_words=request.bad_words,
                sample_seed=request.sample_seed,
            )
            twin.token_ids = list(request.token_ids)
            self.kv.admit(twin)
            self._twins[request] = twin
            self._confirmed[twin] = len(twin.token_ids)
            return twin
        kept = self._confirmed[twin]
        while (
            kept < min(len(twin.token_ids), len(request.token_ids)) and twin.token_ids[kept] == request.token_ids[kept]
        ):
            kept += 1
        del twin.token_ids[kept:]
        twin.token_ids += request.token_ids[kept:]
        twin.num_computed_tokens = min(twin.num_computed_tokens, kept)
        self._confirmed[twin] = len(twin.token_ids)
        self.kv.publish(twin, twin.num_computed_tokens)
        return twin

    def _catch_up(self, twins: Sequence[Request]) -> bool:
        """Compute contexts that are new to this model but for their last token, in chunks; False: there are none."""
        behind = [t for t in twins if t.num_tokens - t.num_computed_tokens >= NEW]
        some = bool(behind)
        while behind:
            room, works = CHUNK, []
            for twin in behind:
                count = min(room, twin.num_tokens - 1 - twin.num_computed_tokens)
                if count:
                    works.append(ScheduledRequest(twin, twin.num_computed_tokens, count, twin.block_table, False))
                    room -= count
            for work, result in zip(works, self.runner.collect(self.runner.submit(works))):
                if result.error is not None:
                    raise RuntimeError(f"the draft model fails: {result.error}")
                work.request.num_computed_tokens += work.num_tokens
            behind = [t for t in behind if t.num_computed_tokens < t.num_tokens - 1]
        return some

    def _step(self, twins: Sequence[Request], probs: dict[Request, list[Tensor]]) -> None:
        """One more token for each twin."""
        works = [
            ScheduledRequest(t, t.num_computed_tokens, t.num_tokens - t.num_computed_tokens, t.block_table, True)
            for t in twins
        ]
        if not works:
            return
        self._probs.clear()
        for work, result in zip(works, self.runner.collect(self.runner.submit(works))):
            if result.error is not None or result.token_id is None:
                raise RuntimeError(f"the draft model fails: {result.error}")
            twin = work.request
            if id(twin.token_ids) in self._probs:
                probs[twin].append(self._probs[id(twin.token_ids)])
            twin.num_computed_tokens = twin.num_tokens
            twin.token_ids.append(result.token_id)
            if twin.matcher is not None:
                twin.matcher.accept(result.token_id)

    def _sample_rows(self, logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[list[int], list[TokenLogprobs | None]]:
        """The runner's sampler: as `sample` where the target will make the same choice, else drawn and kept."""
        if logits.shape[1] != self._vocab_size:  # ids beyond the tokenizer's: padding of either model
            missing = self._vocab_size - logits.shape[1]
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        free = [i for i, r in enumerate(rows) if not (r.params.greedy or self._coupled or r.params.seed is not None)]
        tokens: list[int] = [0] * len(rows)
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if len(free) < len(rows):
            tokens, logprobs = sample(logits, rows)
        if free:
            where = torch.tensor(free, device=logits.device)
            ids, probs = draw(logits[where], [rows[i] for i in free])
            for at, (i, token) in enumerate(zip(free, ids.tolist())):
                tokens[i] = token
                self._probs[id(rows[i].token_ids)] = probs[at : at + 1]
        return tokens, logprobs


def _complete(twin: Request) -> bool:
    """Nothing can follow: its output has its form."""
    return twin.matcher is not None and twin.matcher.finished
