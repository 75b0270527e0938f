"""The offline face of the runtime: many prompts in, all outputs back, in order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtool.quant.errors import QtoolError
from qtool.quant.progress import ProgressFn, silent
from qtool.runtime.beam_search import BeamSearch, BeamSearchParams, joined
from qtool.runtime.engine.params import FAILURES, NOT_FINITE, RequestOutput, SamplingParams, TokenLogprobs
from qtool.runtime.engine.request import Request
from qtool.runtime.llm_engine import LLMEngine
from qtool.runtime.scoring import WAVE_FOLLOWERS, Piece, scoring_waves, whole_piece

_NO_SCORE = TokenLogprobs(token_id=-1, logprob=math.nan, rank=0)


@dataclass(frozen=True)
class Loglikelihood:
    """log p of each continuation token given all before it (natural logarithm, float32 log-softmax), and whether
    greedy decoding would have produced the continuation."""

    logprobs: tuple[float, ...]
    greedy: bool

    @property
    def total(self) -> float:
        return sum(self.logprobs)


class LLM:
    """A model for offline work. Arguments as LLMEngine.

    A model that computes NaN or infinity is an error. With `keep_broken` its results are given all the same.
    """

    def __init__(self, model: str | Path, **engine_args: Any) -> None:
        self.engine = LLMEngine(model, **engine_args)
        self._ids = itertools.count()

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    @property
    def config(self) -> dict[str, Any]:
        return self.engine.config

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        keep_broken: bool = False,
        progress: ProgressFn = silent,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts, which are batched as memory allows.

        With `keep_broken` those that broke off have the finish_reason `error`.

        Raises:
            QtoolError: a prompt that cannot be run, nothing is computed then; or the model failed on one, or
                its form is too complex to be followed to the end.
        """
        if isinstance(prompts, str):
            raise QtoolError("prompts must be a list of prompts, got one string")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise QtoolError(f"{len(prompts)} prompts, but {len(each)} sampling params: give one, or one for each")
        ids = [f"generate-{next(self._ids)}" for _ in prompts]
        with self._no_leftovers(ids):
            for request_id, prompt, own in zip(ids, prompts, each):
                self.engine.add_request(request_id, prompt, own)
            done = self._run(len(ids), "generating", progress)
        outputs = [done[i] for i in ids]
        for number, output in enumerate(outputs):
            for one in output.outputs:
                if one.finish_reason in FAILURES and not (keep_broken and _not_finite(one.stop_reason)):
                    raise QtoolError(f"prompt {number}: generating failed: {one.stop_reason}")
        return outputs

    def beam_search(
        self, prompts: Sequence[str | Sequence[int]], params: BeamSearchParams, *, progress: ProgressFn = silent
    ) -> list[RequestOutput]:
        """The `beam_width` best outputs of each prompt, best first, by the rules of beam_search.BeamSearch.

        Beams are requests of one token each that find what they share in the prefix cache: without prefix caching every
        step computes them anew.

        Raises:
            QtoolError: as generate; a prompt too long for `max_tokens` more.
        """
        if isinstance(prompts, str):
            raise QtoolError("prompts must be a list of prompts, got one string")
        searches = []
        for number, prompt in enumerate(prompts):
            ids = self.engine.encode(prompt) if isinstance(prompt, str) else list(prompt)
            if len(ids) + params.max_tokens > self.max_model_len:
                raise QtoolError(
                    f"prompt {number} has {len(ids)} tokens, {params.max_tokens} are to be generated, and the context "
                    f"is {self.max_model_len} tokens: shorten the prompt or lower max_tokens"
                )
            searches.append(BeamSearch(ids, params, self.engine.eos_token_ids))
        first: dict[int, RequestOutput] = {}
        last: dict[int, RequestOutput] = {}
        while going := [i for i, search in enumerate(searches) if not search.done]:
            work = [(i, sequence) for i in going for sequence in searches[i].sequences]
            outputs = self.generate([s for _, s in work], [searches[i].sampling_params() for i, _ in work])
            for i in going:
                own = [output for (j, _), output in zip(work, outputs) if i == j]
                searches[i].advance([output.outputs[0].logprobs[0] for output in own if output.outputs[0].logprobs])
                first.setdefault(i, own[0])
                last[i] = own[-1]
            progress("searching", len(searches) - len(going), len(searches))
        return [
            search.output(f"beam-search-{i}", self.tokenizer, joined(first[i].metrics, last[i].metrics))
            for i, search in enumerate(searches)
        ]

    def loglikelihood(
        self,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        keep_broken: bool = False,
        progress: ProgressFn = silent,
    ) -> list[Loglikelihood]:
        """log p(continuation | context) of (context, continuation) token pairs, batched, in order.

        With `keep_broken` a pair in whose text the model computes no finite numbers has NaN for every token.

        Raises:
            QtoolError: an empty context or continuation, or both together longer than `max_model_len` + 1 (the last
                token is scored, but not computed); or the model failed.
        """
        for i, (context, continuation) in enumerate(pairs):
            if not context or not continuation:
                raise QtoolError(f"pair {i}: context and continuation need at least one token each")
            try:
                self.engine.check_scoring([*context, *continuation])
            except QtoolError as error:
                raise QtoolError(f"pair {i}: {error}") from None
        found: list[list[TokenLogprobs]] = [[] for _ in pairs]
        done = 0
        apart: set[int] = set()  # pairs whose piece broke, maybe at another pair's token: each is scored by itself
        for wave in scoring_waves(pairs):
            for piece, scores in zip(wave, self._scores(wave, keep_broken)):
                if scores is None:
                    apart.update(piece.pairs)
                    continue
                each = iter(scores)
                for users, rivals in zip(piece.users, piece.rivals):
                    for own in (users, *rivals.values()):
                        score = next(each)
                        for i in own:
                            found[i].append(score)
                            done += len(found[i]) == len(pairs[i][1])
            progress("scoring", done, len(pairs))
        alone = [whole_piece(i, *pairs[i]) for i in sorted(apart)]
        for at in range(0, len(alone), WAVE_FOLLOWERS):
            wave = alone[at : at + WAVE_FOLLOWERS]
            for piece, scores in zip(wave, self._scores(wave, keep_broken)):
                (i,) = piece.pairs
                found[i] = [_NO_SCORE] * len(pairs[i][1]) if scores is None else scores
            progress("scoring", done + at + len(wave), len(pairs))
        return [Loglikelihood(tuple(s.logprob for s in own), all(s.rank == 1 for s in own)) for own in found]

    def _scores(self, wave: Sequence[Piece], keep_broken: bool) -> list[list[TokenLogprobs] | None]:
        """Of every piece its tokens in order, each with its rivals after it; None where it broke."""
        ids = [f"score-{next(self._ids)}" for _ in wave]
        with self._no_leftovers(ids):
            requests = []
            for request_id, piece in zip(ids, wave):
                start = len(piece.context)
                rivals = {start + i: list(tokens) for i, tokens in enumerate(piece.rivals) if tokens}
                text = [*piece.context, *piece.tokens]
                requests.append(self.engine.add_scoring_request(request_id, text, score_from=start, rivals=rivals))
            self._run(len(ids), "scoring", silent)
        return [request.prompt_scores if _is_whole(request, keep_broken) else None for request in requests]

    def prompt_logits(self, sequences: Sequence[Sequence[int]], *, keep_broken: bool = False) -> Iterator[Tensor]:
        """Logits after every token of every sequence: [len(sequence), vocab_size] float32, one sequence at a time.

        With `keep_broken` rows are NaN where the model computes no finite numbers, or none that can be told from them:
        all before the first of these are right.

        Raises:
            QtoolError: a sequence that is empty or longer than `max_model_len`.
        """
        for sequence in sequences:
            logits, whole = self._logits(sequence, keep_broken)
            yield logits if whole else self._up_to_the_first_broken(sequence, logits)

    def _logits(self, sequence: Sequence[int], keep_broken: bool) -> tuple[Tensor, bool]:
        """Logits of the steps up to one that broke, [at most len(sequence), vocab_size], and whether none did."""
        request_id = f"logits-{next(self._ids)}"
        with self._no_leftovers([request_id]):
            request = self.engine.add_scoring_request(request_id, sequence, kind="logits")
            self._run(1, "scoring", silent)
        whole = _is_whole(request, keep_broken)
        return torch.cat(request.prompt_scores), whole

    def _up_to_the_first_broken(self, sequence: Sequence[int], computed: Tensor) -> Tensor:
        """Logits of a sequence that broke, from those that were `computed`.

        Within one step NaN reaches tokens before it as well (a probability of 0 times NaN is NaN), so beginnings of the
        sequence are computed anew until the longest that is whole is found.
        """
        logits = computed.new_full((len(sequence), computed.shape[1]), math.nan)
        finite = computed.isfinite().all(dim=1)
        logits[: len(computed)][finite] = computed[finite]
        good = int(finite.cumprod(0).sum())  # the longest beginning that is known to be whole
        bad, step = len(computed), 1
        while bad - good > 1:
            length = min(good + step, (good + bad) // 2)
            beginning, whole = self._logits(sequence[:length], keep_broken=True)
            if whole:
                good, step = length, 2 * step
                logits[:good] = beginning
            else:
                bad, step = length, bad
        return logits

    def _no_leftovers(self, ids: Sequence[str]) -> _AbortOnError:
        return _AbortOnError(self.engine, ids)

    def _run(self, total: int, what: str, progress: ProgressFn) -> dict[str, RequestOutput]:
        done: dict[str, RequestOutput] = {}
        while self.engine.has_unfinished():
            for output in self.engine.step():
                if output.finished:
                    done[output.request_id] = output
                    progress(what, len(done), total)
        return done


class _AbortOnError:
    """Takes requests out of the engine when the work on them is broken off (an error, Ctrl-C)."""

    def __init__(self, engine: LLMEngine, ids: Sequence[str]) -> None:
        self._engine, self._ids = engine, ids

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: object) -> None:
        if kind is not None:
            for request_id in self._ids:
                self._engine.abort_request(request_id)


def _is_whole(request: Request, keep_broken: bool) -> bool:
    """False for a text that broke, where that is no error."""
    if request.finish_reason != "error":
        return True
    if keep_broken and _not_finite(request.stop_reason):
        return False
    raise QtoolError(f"scoring failed: {request.stop_reason}")


def _not_finite(stop_reason: int | str | None) -> bool:
    return str(stop_reason).startswith(NOT_FINITE)
