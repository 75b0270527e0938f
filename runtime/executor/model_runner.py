"""One step on the device: the scheduled tokens laid out flat, the model, logits where they are needed, sampling."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from qtool.quant.progress import ProgressFn, silent
from qtool.runtime.engine.params import NOT_FINITE, SamplingParams, TokenLogprobs
from qtool.runtime.engine.request import Request, ScheduledRequest, StepResult
from qtool.runtime.engine.swap import BlockCopy, SwapCosts
from qtool.runtime.executor.batch_invariant import invariant_model, invariant_ops, sample_apart
from qtool.runtime.executor.host_cache import HostCache
from qtool.runtime.executor.prompt_graphs import MOST_TOKENS, PromptGraphs, token_counts
from qtool.runtime.executor.rejection import SampleRows, Verified, draft_rows, verify
from qtool.runtime.executor.sampler import NO_TOKEN, SamplingRow, sample, token_logprobs
from qtool.runtime.kernels.attention import SHORT
from qtool.runtime.kernels.dispatch import layer_ops
from qtool.runtime.kernels.kv_cache import kv_bytes_per_token, make_kv_cache
from qtool.runtime.kernels.layer_ops import StepPlan
from qtool.runtime.models.decoder import Decoder

if TYPE_CHECKING:
    from qtool.runtime.executor.decode_graphs import DecodeGraphs

T = TypeVar("T")

SCORE_ROWS = 128  # prompt positions whose logits are held at a time
_NOTHING = Verified([], [])
PROMPT_TOKENS = 32  # tokens for each request of a step from which on it counts as prompts


def kv_block_bytes(model: Decoder, block_size: int) -> int:
    """Bytes of one KV block over all layers."""
    config = model.config
    token = kv_bytes_per_token(2 * config.num_kv_heads, config.head_dim, model.dtype, model.kv_mode)
    return config.num_layers * block_size * token


@dataclass(frozen=True)
class _InFlight:
    """A step on the device: its sampled tokens arrive in `tokens`, one for each piece of work that samples."""

    batch: Sequence[ScheduledRequest]
    rows: dict[Request, int]
    tokens: Tensor  # pinned
    arrived: torch.cuda.Event


@dataclass(frozen=True, slots=True)
class _Asked:
    """A token to score with the logits of a row of the step, and how many of the likeliest tokens beside it."""

    row: int
    token: int
    top: int


class ModelRunner:
    """The executor on one device: owns the KV cache, `num_blocks` blocks of `block_size` tokens per layer.

    Args:
        deterministic: what a request gets does not depend on what else is in a step, see batch_invariant.py; CPU only.
        sample_rows: how tokens are chosen where not by the likeliest of the raw logits alone.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        num_blocks: int,
        block_size: int,
        deterministic: bool = False,
        sample_rows: SampleRows = sample,
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.device = model.embed.device
        config = model.config
        self.ops = layer_ops(model.attention_shape, config.hidden_size, block_size, model.dtype, self.device)
        self._sample_rows = sample_rows
        if deterministic:
            self.ops = invariant_ops(self.ops)
            self.model = invariant_model(model)
            self._sample_rows = sample_apart
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
        self.graphs: DecodeGraphs | None = None
        self.prompt_graphs: PromptGraphs | None = None
        self._sampled = torch.empty(0, dtype=torch.int32, device=self.device)  # by the last step, in order of its rows
        self._rows: dict[Request, int] = {}  # of `_sampled`
        self._host: HostCache | None = None
        self._swap_costs: SwapCosts | None = None

    @property
    def runs_ahead(self) -> bool:
        """Steps can be submitted before the tokens of the step before are known."""
        return self.ops.on_device

    @torch.inference_mode()
    def prepare(
        self,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int = MOST_TOKENS,
        *,
        sizes: Sequence[int] | None = None,
        prompt_sizes: Sequence[int] | None = None,
        progress: ProgressFn = silent,
    ) -> None:
        """Make room for steps of up to `max_num_seqs` sequences and `max_num_batched_tokens` tokens and, where the
        device has CUDA graphs, capture them.

        Args:
            sizes: numbers of sequences whose decode is captured, descending; None: as decode_graphs.graph_sizes names.
            prompt_sizes: numbers of tokens for steps with prompts; None: as prompt_graphs.token_counts names.
        """
        if not self.ops.on_device:
            return
        from qtool.runtime.executor.decode_graphs import DecodeGraphs
        from qtool.runtime.kernels.cuda.precompile import precompile

        self._sampled = torch.zeros(max_num_seqs, dtype=torch.int32, device=self.device)
        with torch.cuda.device(self.device):
            progress("compiling kernels", 0, 1)
            precompile(self.model.linears, {id(layer.gate_up) for layer in self.model.layers}, self.device)
            progress("compiling kernels", 1, 1)
            progress("capturing CUDA graphs", 0, 2)
            self.graphs = DecodeGraphs(
                self.model,
                self.caches,
                self.ops,
                self._sampled,
                max_num_seqs=max_num_seqs,
                max_blocks=-(-max_model_len // self.block_size),
                sizes=sizes,
            )
            progress("capturing CUDA graphs", 1, 2)
            counts = token_counts(max_num_batched_tokens) if prompt_sizes is None else prompt_sizes
            self.prompt_graphs = PromptGraphs(self.model, self.caches, self.ops, counts) if counts else None
            progress("capturing CUDA graphs", 2, 2)
        self._rehearse(max_num_seqs)

    def _rehearse(self, max_num_seqs: int) -> None:
        """A step of a prompt alone and one beside a decode, so that no request waits for what is compiled at first use.

        They write to the first KV block, which nobody owns yet.
        """
        request = Request("rehearsal", [0, 0], SamplingParams(max_tokens=1, temperature=0.0))
        prompt = ScheduledRequest(request, 0, 2, [0], sample=True)
        decode = ScheduledRequest(request, 1, 1, [0], sample=True)
        for batch in ([prompt], [decode, prompt][:max_num_seqs]):
            self.collect(self.submit(batch))

    @torch.inference_mode()
    def open_swap_space(self, num_blocks: int, prefill_s: float | None) -> SwapCosts:
        """Make room for `num_blocks` KV blocks in host memory, while the cache is still empty.

        Args:
            prefill_s: seconds for a token of a prompt; None: measured in steps to come.
        """
        self._host = HostCache(self.caches, num_blocks)
        self._swap_costs = SwapCosts(self._host.measure(), prefill_s)
        return self._swap_costs

    @torch.inference_mode()
    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy KV blocks from and to the swap space."""
        assert self._host is not None
        if self.device.type != "cuda":
            self._host.copy(copies)
            return
        with torch.cuda.device(self.device):
            self._host.copy(copies)

    @torch.inference_mode()
    def submit(self, batch: Sequence[ScheduledRequest]) -> list[StepResult] | _InFlight:
        """Begin a step; where the host has to see it all, compute it."""
        if not self.ops.on_device:
            return self._compute_timed(batch)
        with torch.cuda.device(self.device):
            plain = all(w.request.may_run_ahead and not w.padding and not w.draft.token_ids for w in batch)
            decodes = all(w.num_tokens == 1 and w.sample and not _scored_span(w) for w in batch)
            if decodes and self.graphs is not None and self.graphs.fits(len(batch)):
                logits = self._replay(batch)
                return self._in_flight(batch, batch) if plain else self._sampled_results(batch, logits)
            return self._run_ahead(batch) if plain else self._compute(batch)

    def collect(self, step: list[StepResult] | _InFlight) -> list[StepResult]:
        """Results in the order of the batch."""
        if isinstance(step, list):
            return step
        step.arrived.synchronize()
        tokens = step.tokens.tolist()
        results = []
        for work in step.batch:
            row = step.rows.get(work.request)
            failed = row is not None and tokens[row] == NO_TOKEN
            results.append(self._failure() if failed else StepResult(None if row is None else tokens[row]))
        return results

    def _failure(self, scores: tuple[Any, ...] = ()) -> StepResult:
        error = f"{NOT_FINITE} ({str(self.model.dtype).removeprefix('torch.')} here)"
        return StepResult(prompt_scores=scores, error=error)

    def _replay(self, batch: Sequence[ScheduledRequest]) -> Tensor:
        assert self.graphs is not None
        tokens, sources = self._inputs(batch)
        return self.graphs.replay(tokens, sources, [w.start for w in batch], [w.block_table for w in batch])

    def _inputs(self, works: Sequence[ScheduledRequest]) -> tuple[list[int], list[int]]:
        """Token ids of the step, and where a token is known to the device alone: its row of `_sampled`, else -1."""
        tokens: list[int] = []
        sources: list[int] = []
        for work in works:
            end = work.start + work.num_tokens
            known = work.request.token_ids[work.start : end]
            known += work.draft.token_ids
            tokens += known
            sources += [-1] * len(known)
            if len(known) < work.num_tokens:
                tokens.append(0)
                sources.append(self._rows[work.request])
        return tokens, sources

    def _in_flight(self, batch: Sequence[ScheduledRequest], due: Sequence[ScheduledRequest]) -> _InFlight:
        """The tokens of `due` are the first of `_sampled`: bring them to the host when they are there."""
        self._rows = {work.request: row for row, work in enumerate(due)}
        tokens = torch.empty(len(due), dtype=torch.int32, pin_memory=True)
        tokens.copy_(self._sampled[: len(due)], non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return _InFlight(batch, self._rows, tokens, arrived)

    def _run_ahead(self, batch: Sequence[ScheduledRequest]) -> _InFlight:
        """A step of greedy requests, none of whose tokens the host has to see before the next."""
        from qtool.runtime.kernels.cuda.tokens import greedy

        works = [batch[i] for i in _row_order(batch)]
        due, last, row = [], [], 0
        for work in works:
            row += work.num_tokens
            if work.sample:
                due.append(work)
                last.append(row - 1)
        hidden, plan = self._forward(works, last)
        if due:
            logits = self.model.logits(hidden.index_select(0, plan.also[-1]), self.ops)
            if len(due) > len(self._sampled):
                self._sampled = torch.empty(len(due), dtype=torch.int32, device=self.device)
            greedy(logits, self._sampled)
        return self._in_flight(batch, due)

    def _index(self, rows: Sequence[int]) -> Tensor:
        index = torch.tensor(rows, dtype=torch.long, pin_memory=self.device.type == "cuda")
        return index.to(self.device, non_blocking=True)

    def _forward(self, works: Sequence[ScheduledRequest], rows: Sequence[int] = ()) -> tuple[Tensor, StepPlan]:
        """Hidden states of the tokens of `works` (in row order), good until the next step; and the step's plan, with
        `rows` as the last of what it brought along."""
        tokens, sources = self._inputs(works)
        plan = self.ops.plan(
            [w.start for w in works],
            [w.num_tokens for w in works],
            [w.block_table for w in works],
            block_size=self.block_size,
            shape=self.model.attention_shape,
            windows=self.model.windows,
            dtype=self.model.dtype,
            device=self.device,
            also=(tokens, sources, rows),
        )
        ids, count = plan.also[0], len(tokens)
        graphs = self.prompt_graphs
        if graphs is not None and not graphs.fits(count):
            graphs = None
        if self.ops.on_device:
            from qtool.runtime.kernels.cuda.tokens import feed

            ids = feed(ids, plan.also[1], self._sampled, None if graphs is None else graphs.ids(count))
        if graphs is not None:
            return graphs.forward(count, plan), plan
        return self.model.forward(ids, plan, self.caches, self.ops), plan

    def _compute_timed(self, batch: Sequence[ScheduledRequest]) -> list[StepResult]:
        """As `_compute`; steps that are prompts for the most part say what recomputing would cost."""
        began = time.perf_counter()
        results = self._compute(batch)
        tokens = sum(work.num_tokens for work in batch)
        if self._swap_costs is not None and tokens >= PROMPT_TOKENS * len(batch):
            self._swap_costs.observe(tokens, time.perf_counter() - began)
        return results

    def _compute(self, batch: Sequence[ScheduledRequest]) -> list[StepResult]:
        """A step whose results the host needs at once; in the order of `batch`."""
        order = _row_order(batch)
        works = [batch[i] for i in order]
        hidden, plan = self._forward(works)
        broken = ~hidden.abs().amax(dim=-1).isfinite()  # [num_tokens]
        failed = broken.tolist()
        if any(failed):
            if not self.ops.on_device:
                for cache in self.caches:
                    cache.erase(plan.slot_mapping[broken])
            hidden[broken] = torch.nan  # infinity could still become a score that looks finite
        results: list[StepResult] = [StepResult()] * len(batch)
        first_rows: list[int] = []
        row = 0
        for work in works:
            first_rows.append(row)
            row += work.num_tokens
        sampled = self._sample(hidden, works, first_rows)
        scored = self._score(hidden, works, first_rows)
        for index, work, first, scores in zip(order, works, first_rows, scored):
            tokens, logprobs = sampled.get(first, _NOTHING)
            failure = any(failed[first : first + work.num_tokens]) or not all(map(_is_finite, scores))
            if failure or NO_TOKEN in tokens:
                logits = scores if work.request.score_kind == "logits" else ()  # they show where it broke
                results[index] = self._failure(logits)
            elif not tokens:
                results[index] = StepResult(None, None, scores, len(_scored_span(work)))
            else:
                results[index] = StepResult(
                    tokens[-1],
                    logprobs[-1],
                    scores,
                    len(_scored_span(work)),
                    accepted=len(tokens) - 1,
                    accepted_logprobs=tuple(logprobs[:-1]),
                )
        return results

    def _sampled_results(self, batch: Sequence[ScheduledRequest], logits: Tensor) -> list[StepResult]:
        """Results of a step of decodes alone."""
        tokens, logprobs = self._sample_rows(logits.float(), _sampling_rows(batch))
        return [self._failure() if t == NO_TOKEN else StepResult(t, p) for t, p in zip(tokens, logprobs)]

    def _sample(
        self, hidden: Tensor, works: Sequence[ScheduledRequest], first_rows: Sequence[int]
    ) -> dict[int, Verified]:
        """First row of a piece of work → its next tokens, for those that are due one. Padding is computed as well."""
        due = [(w, f) for w, f in zip(works, first_rows) if w.sample or w.padding]
        if not due:
            return {}
        drafts = [w.draft for w, _ in due]
        ends = [f + w.num_tokens for w, f in due]
        logits = self._logits(hidden, [at for e, d in zip(ends, drafts) for at in range(e - 1 - len(d.token_ids), e)])
        each = zip(_sampling_rows([w for w, _ in due]), drafts)
        rows = [row for own, draft in each for row in draft_rows(own, draft.token_ids)]
        return {f: v for (w, f), v in zip(due, verify(logits, rows, drafts, self._sample_rows)) if w.sample}

    def _score(
        self, hidden: Tensor, works: Sequence[ScheduledRequest], first_rows: Sequence[int]
    ) -> list[tuple[TokenLogprobs | Tensor, ...]]:
        """Per piece of work, the scores of the prompt positions that it makes known.

        Rows of requests that want log-probabilities go through the head together: a multiple-choice item has a handful.
        """
        scores: list[tuple[TokenLogprobs | Tensor, ...]] = [()] * len(works)
        asked: list[_Asked] = []
        counts: dict[int, int] = {}
        for i, (work, first) in enumerate(zip(works, first_rows)):
            span = _scored_span(work)
            if not span:
                continue
            row = first - 1 - work.start  # the logits of the row before a token score it
            if work.request.score_kind == "logits":
                pieces = _pieces([row + at for at in span])
                scores[i] = tuple(self._logits(hidden, piece) for piece in pieces)
                continue
            tokens, top = work.request.token_ids, work.request.params.prompt_logprobs or 0
            before = len(asked)
            for at in span:
                asked.append(_Asked(row + at, tokens[at], top))
                asked += [_Asked(row + at, rival, 0) for rival in work.request.rivals.get(at, ())]
            counts[i] = len(asked) - before
        each = iter([found for piece in _pieces(asked) for found in self._token_logprobs(hidden, piece)])
        for i, count in counts.items():
            scores[i] = tuple(itertools.islice(each, count))
        return scores

    def _token_logprobs(self, hidden: Tensor, asked: Sequence[_Asked]) -> list[TokenLogprobs]:
        """A token of each row, or several: rows that follow one another and are the same go through the head once."""
        rows = [row for row, _ in itertools.groupby(asked, key=lambda a: a.row)]
        places = [i for i, (_, own) in enumerate(itertools.groupby(asked, key=lambda a: a.row)) for _ in own]
        return token_logprobs(
            self._logits(hidden, rows),
            self._index([a.token for a in asked]),
            [a.top for a in asked],
            None if len(rows) == len(asked) else self._index(places),
        )

    def _logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        return self.model.logits(hidden[self._index(rows)], self.ops).float()


def _row_order(batch: Sequence[ScheduledRequest]) -> list[int]:
    """Pieces of one token first, then the drafts by their length, each in ascending order of their context, then the
    prompts: what LayerOps.plan wants."""

    def place(work: ScheduledRequest) -> tuple[int, int]:
        short = work.num_tokens == 1 or (work.start > 0 and work.num_tokens <= SHORT)
        return work.num_tokens if short else SHORT + 1, work.start

    return sorted(range(len(batch)), key=lambda i: place(batch[i]))


def _sampling_rows(works: Sequence[ScheduledRequest]) -> list[SamplingRow]:
    return [
        SamplingRow(r.params, r.token_ids, r.num_prompt_tokens, r.stop_token_ids, r.sample_seed, r.bad_words, r.matcher)
        for r in (w.request for w in works)
    ]


def _scored_span(work: ScheduledRequest) -> range:
    """Positions of the tokens that this piece of work gets scored (one past the prompt's end for its last logits)."""
    request = work.request
    if request.score_from is None or work.padding or request.num_scored == request.num_to_score:
        return range(0)
    begin = request.score_from + request.num_scored
    return range(begin, min(work.start + work.num_tokens, request.score_from + request.num_to_score - 1) + 1)


def _is_finite(score: TokenLogprobs | Tensor) -> bool:
    return math.isfinite(score.logprob) if isinstance(score, TokenLogprobs) else bool(score.isfinite().all())


def _pieces(rows: Sequence[T]) -> list[Sequence[T]]:
    return [rows[at : at + SCORE_ROWS] for at in range(0, len(rows), SCORE_ROWS)]
