"""`use_beam_search`: the fields of a body, and the search over the server's engine."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, Field

from qtool.quant.errors import QtoolError
from qtool.runtime.beam_search import BeamSearch, BeamSearchParams, joined
from qtool.runtime.engine.params import RequestOutput, SamplingParams
from qtool.runtime.server.engine_client import REQUEST_FAILED, EngineClient
from qtool.runtime.server.errors import ApiError

# What a search has no use for; beams are ranked by the model's own distribution, whatever the temperature.
NOT_SEARCHED = (
    "top_k", "top_p", "min_p", "typical_p", "dynatemp_range", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words", "stop", "stop_token_ids", "min_tokens",
    "prompt_logprobs", "best_of", "structured_outputs",
)  # fmt: skip


class BeamFields(BaseModel):
    """As in vLLM: `n` is the number of beams and of outputs."""

    use_beam_search: bool = False
    length_penalty: float | None = Field(None, ge=-10, le=10, allow_inf_nan=False)
    early_stopping: bool | None = None


def beam_params(body: BeamFields, params: SamplingParams) -> BeamSearchParams:
    """The search that a body asks for. Raises QtoolError where it asks for more than that."""
    plain = SamplingParams(max_tokens=params.max_tokens)
    for name in NOT_SEARCHED:
        if getattr(params, name) != getattr(plain, name):
            raise QtoolError(f"{name} and use_beam_search do not go together: leave one of them out")
    return BeamSearchParams(
        beam_width=params.n,
        max_tokens=params.max_tokens,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=bool(body.early_stopping),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
    )


class Searching:
    """The searches of one body on an engine that others use too.

    Every step is a request of one token for each beam, as in LLM.beam_search; `ids` are those in the engine.
    """

    def __init__(self, engine: EngineClient, searches: Sequence[BeamSearch], name: str) -> None:
        self._engine, self._searches, self._name = engine, searches, name
        self.ids: list[str] = []

    async def run(self) -> list[tuple[RequestOutput, RequestOutput]]:
        """The first and the last step's output of each search. Raises QtoolError and EngineDeadError as `submit`,
        and ApiError where the engine fails on a beam.
        """
        ends: dict[int, tuple[RequestOutput, RequestOutput]] = {}
        step = 0
        while going := [i for i, search in enumerate(self._searches) if not search.done]:
            work = [(i, sequence) for i in going for sequence in self._searches[i].sequences]
            self.ids = [f"{self._name}-{step}-{place}" for place in range(len(work))]
            params = [self._searches[i].sampling_params() for i, _ in work]
            stream = await self._engine.submit(
                {name: (sequence, own) for name, (_, sequence), own in zip(self.ids, work, params)}
            )
            found: dict[int, RequestOutput] = {}
            async for place, output in stream:
                found[place] = output
            for i in going:
                own_outputs = [found[place] for place, (j, _) in enumerate(work) if i == j]
                if any(o.outputs[0].finish_reason not in ("stop", "length") for o in own_outputs):
                    raise ApiError(500, REQUEST_FAILED)
                self._searches[i].advance([o.outputs[0].logprobs[0] for o in own_outputs if o.outputs[0].logprobs])
                ends[i] = (ends[i][0] if i in ends else own_outputs[0], own_outputs[-1])
            step += 1
        return [ends[i] for i in range(len(self._searches))]

    def outputs(self, ends: Sequence[tuple[RequestOutput, RequestOutput]], tokenizer: object) -> list[RequestOutput]:
        """The answers, given what `run` gave."""
        return [
            search.output(f"{self._name}-{i}", tokenizer, joined(first.metrics, last.metrics))
            for i, (search, (first, last)) in enumerate(zip(self._searches, ends))
        ]
