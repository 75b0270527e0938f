"""/v1/completions, /v1/chat/completions and /v1/models: a body in, requests to the engine, choices out."""

from __future__ import annotations

import asyncio
import copy
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from qtool.quant.errors import QtoolError
from qtool.runtime.beam_search import BeamSearch
from qtool.runtime.engine.params import RequestOutput, SamplingParams
from qtool.runtime.server.answers import Answer, ChatAnswer, CompletionAnswer, usage_of
from qtool.runtime.server.beams import Searching, beam_params
from qtool.runtime.server.engine_client import REQUEST_FAILED, EngineClient, EngineDeadError, OutputStream
from qtool.runtime.server.errors import ApiError, error_body
from qtool.runtime.server.schemas import ChatRequest, CompletionRequest, ModelCard, ModelList, SamplingRequest
from qtool.runtime.server.token_text import TokenText

MAX_BODY_BYTES = 16 * 2**20
MAX_OUTPUTS = 1024  # of one body: prompts times n
T = TypeVar("T")
Body = TypeVar("Body", bound=SamplingRequest)


@dataclass(frozen=True)
class Service:
    """What the routes need of a server."""

    engine: EngineClient
    tokenizer: Any  # a copy: the engine's own is in use elsewhere
    token_text: TokenText
    model_name: str
    longest_token: int  # in characters
    created: int
    tokenize_thread: ThreadPoolExecutor  # one thread: fast tokenizers are not to be entered twice at once

    @classmethod
    def of(cls, engine: EngineClient, model_name: str) -> Service:
        tokenizer = copy.deepcopy(engine.tokenizer)
        return cls(
            engine=engine,
            tokenizer=tokenizer,
            token_text=TokenText(tokenizer),
            model_name=model_name,
            longest_token=max(map(len, tokenizer.get_vocab())),
            created=int(time.time()),
            tokenize_thread=ThreadPoolExecutor(1, thread_name_prefix="qtool-tokenize"),
        )

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    @property
    def max_chars(self) -> int:
        """A longer text has more tokens than the context: it is not even tokenized."""
        return self.max_model_len * self.longest_token


def build_router(service: Service) -> APIRouter:
    """The routes of the OpenAI API."""
    router = APIRouter(prefix="/v1")

    @router.post("/completions", openapi_extra=_body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        body = await _parse(request, CompletionRequest, service)
        if (count := len(body.prompt) * body.num_outputs) > MAX_OUTPUTS:
            raise ApiError(400, f"{count} outputs in one request, at most {MAX_OUTPUTS} are allowed", param="n")
        prompts = [prompt if isinstance(prompt, list) else await _encode(service, prompt) for prompt in body.prompt]
        for prompt in prompts:
            _check_length(service, len(prompt), max(body.max_tokens or 1, 1), "max_tokens", "prompt")
        max_tokens = 16 if body.max_tokens is None else body.max_tokens
        longest = max(map(len, prompts))
        if body.max_tokens is None:
            max_tokens = min(max_tokens, service.max_model_len - longest)
        params = body.sampling_params(
            max(max_tokens, 1), logprobs=body.logprobs, prompt_logprobs=body.logprobs if body.echo else None
        )
        echoes = [""] * len(prompts)
        if body.echo:
            echoes = [
                text if isinstance(text, str) else await _off_loop(service, service.tokenizer.decode, text)
                for text in body.prompt
            ]
        answer = CompletionAnswer(
            _new_id("cmpl"),
            int(time.time()),
            service.model_name,
            service.token_text,
            logprobs=body.logprobs,
            echoes=tuple(echoes),
            echo=bool(body.echo),
            outputs_per_prompt=params.n,
        )
        return await _respond(service, request, body, prompts, params, answer, hide_output=max_tokens == 0)

    @router.post("/chat/completions", openapi_extra=_body_schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        body = await _parse(request, ChatRequest, service)
        prompt = await _encode_chat(service, body)
        wanted = body.max_completion_tokens or body.max_tokens
        field = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
        _check_length(service, len(prompt), wanted or 1, field, "messages")
        params = body.sampling_params(
            wanted or service.max_model_len - len(prompt),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        answer = ChatAnswer(
            _new_id("chatcmpl"),
            int(time.time()),
            service.model_name,
            service.token_text,
            top_logprobs=params.logprobs,
        )
        return await _respond(service, request, body, [prompt], params, answer)

    @router.get("/models")
    async def models() -> ModelList:
        return ModelList(data=[_card(service)])

    @router.get("/models/{name:path}")
    async def model(name: str) -> ModelCard:
        _check_model(service, name)
        return _card(service)

    return router


def _card(service: Service) -> ModelCard:
    return ModelCard(id=service.model_name, created=service.created, max_model_len=service.max_model_len)


def _new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def _body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The body in the server's own documentation: it is parsed by us, so that FastAPI does not see it."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


# ---- from a body to token ids ----


async def _parse(request: Request, model: type[Body], service: Service) -> Body:
    """Read and validate a body. Raises ApiError, pydantic.ValidationError."""
    raw = bytearray()
    try:
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > MAX_BODY_BYTES:
                raise ApiError(413, f"the request body is larger than {MAX_BODY_BYTES} bytes")
    except ClientDisconnect:
        raise ApiError(499, "the client went away before its request was whole") from None
    body = model.model_validate_json(bytes(raw))
    _check_model(service, body.model)
    if field := body.unsupported():
        message = f"{field} is not supported by this server; leave it out"
        raise ApiError(400, message, param=field, code="unsupported_parameter")
    await _check_form(service, body)
    return body


async def _check_form(service: Service, body: SamplingRequest) -> None:
    """Refuse a form that cannot be compiled; one that can is kept, so that the engine's loop need not do it."""
    field = None
    try:
        if (found := body.form()) is not None:
            field, form = found
            await service.engine.check_form(form)
    except QtoolError as error:
        raise ApiError(400, str(error), param=field, code="invalid_form") from None
    except EngineDeadError as error:
        raise ApiError(503, str(error)) from error


def _check_model(service: Service, name: str | None) -> None:
    if name not in (None, service.model_name):
        message = f"the model {name[:200]!r} does not exist; this server has {service.model_name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _check_length(service: Service, prompt: int, output: int, output_field: str, prompt_field: str) -> None:
    """Refuse what cannot fit the context, before anything is queued."""
    limit = service.max_model_len
    if prompt == 0:
        raise ApiError(400, "the prompt has no tokens; give at least one", param=prompt_field)
    if prompt + output > limit:
        param = prompt_field if prompt >= limit else output_field
        raise ApiError(
            400,
            f"the model's context is {limit} tokens, but {prompt} in the prompt and {output} to generate were "
            f"asked for; shorten the prompt or lower {output_field}",
            param=param,
            code="context_length_exceeded",
        )


async def _off_loop(service: Service, function: Callable[..., T], *args: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(service.tokenize_thread, function, *args)


def _check_chars(service: Service, text: str, prompt_field: str) -> None:
    """Refuse at once what would take long to tokenize and could not fit."""
    if len(text) > service.max_chars:
        message = f"the model's context is {service.max_model_len} tokens; {len(text)} characters are too many"
        raise ApiError(400, message, param=prompt_field, code="context_length_exceeded")


async def _encode(service: Service, text: str) -> list[int]:
    _check_chars(service, text, "prompt")
    return await _off_loop(service, service.tokenizer.encode, text)


async def _encode_chat(service: Service, body: ChatRequest) -> list[int]:
    """The token ids of a conversation by the model's chat template, the answer's opening included."""
    messages = [message.for_template() for message in body.messages]
    if not service.tokenizer.chat_template:
        raise ApiError(400, "this model has no chat template; use /v1/completions", param="messages")

    def render() -> list[int]:
        text = service.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        _check_chars(service, text, "messages")
        ids: list[int] = service.tokenizer.encode(text, add_special_tokens=False)
        return ids

    try:
        return await _off_loop(service, render)
    except ApiError:
        raise
    except Exception as error:  # templates raise what they like to refuse a conversation
        message = f"the model's chat template refuses these messages: {error}"
        raise ApiError(400, message, param="messages") from error


# ---- from the engine's outputs to a response ----


async def _respond(
    service: Service,
    request: Request,
    body: SamplingRequest,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    answer: Answer,
    *,
    hide_output: bool = False,
) -> Response:
    """Queue the prompts and answer, whole or as a stream of server-sent events."""
    if body.use_beam_search:
        return await _search(service, request, body, prompts, params, answer)
    ids = [f"{answer.id}-{position}" for position in range(len(prompts))]
    requests = {ids[i]: (prompt, _shift_seed(params, i)) for i, prompt in enumerate(prompts)}
    try:
        outputs = await service.engine.submit(requests)
    except EngineDeadError as error:
        raise ApiError(503, str(error)) from error
    finished = _refuse_failed(outputs, hide_output, body)
    if body.stream:
        return _EventStream(_events(finished, answer, body), on_close=lambda: service.engine.abort(ids))
    try:
        final = await _unless_disconnected(request, _collect(finished, len(prompts)))
    except EngineDeadError as error:
        raise ApiError(500, str(error)) from error
    finally:
        service.engine.abort(ids)
    if final is None:  # the client went away: nobody reads this
        return Response(status_code=499)
    return Response(_dump(answer.whole(final)), media_type="application/json")


async def _search(
    service: Service,
    request: Request,
    body: SamplingRequest,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    answer: Answer,
) -> Response:
    """Search the best outputs of the prompts and answer."""
    wanted = beam_params(body, params)
    for prompt in prompts:
        _check_length(service, len(prompt), wanted.max_tokens, "max_tokens", "prompt")
    searching = Searching(
        service.engine, [BeamSearch(prompt, wanted, service.engine.eos_token_ids) for prompt in prompts], answer.id
    )
    try:
        ends = await _unless_disconnected(request, searching.run())
    except EngineDeadError as error:
        raise ApiError(503, str(error)) from error
    finally:
        service.engine.abort(searching.ids)
    if ends is None:
        return Response(status_code=499)
    final = await _off_loop(service, searching.outputs, ends, service.tokenizer)
    return Response(_dump(answer.whole(final)), media_type="application/json")


def _shift_seed(params: SamplingParams, position: int) -> SamplingParams:
    """Prompts of one body draw from streams of their own, the first from the seed itself."""
    return params if params.seed is None or position == 0 else replace(params, seed=params.seed + position)


def _dump(body: BaseModel) -> str:
    """JSON of what was set: a chunk's absent role or usage must be absent, a null finish_reason must be null."""
    return body.model_dump_json(exclude_unset=True)


async def _refuse_failed(
    outputs: OutputStream, hide_output: bool, body: SamplingRequest
) -> AsyncIterator[tuple[int, RequestOutput]]:
    """The outputs; those that are no answer raise: ApiError where the client can mend it, else EngineDeadError."""
    async for position, output in outputs:
        for choice in output.outputs:
            if choice.finish_reason == "refused":  # which forms alone bring about
                field, _ = body.form() or (None, None)
                raise ApiError(400, str(choice.stop_reason), param=field, code="form_too_complex")
        if any(choice.finish_reason not in (None, "stop", "length") for choice in output.outputs):
            raise EngineDeadError(REQUEST_FAILED)
        if hide_output:
            nothing = tuple(
                replace(
                    choice,
                    text="",
                    token_ids=(),
                    logprobs=None if choice.logprobs is None else (),
                    finish_reason=choice.finish_reason and "length",
                    stop_reason=None,
                )
                for choice in output.outputs
            )
            output = replace(output, outputs=nothing)
        yield position, output


async def _collect(outputs: AsyncIterator[tuple[int, RequestOutput]], count: int) -> list[RequestOutput]:
    final: dict[int, RequestOutput] = {}
    async for position, output in outputs:
        final[position] = output
    return [final[position] for position in range(count)]


async def _unless_disconnected(request: Request, work: Awaitable[T]) -> T | None:
    """The result of `work`, or None (and `work` cancelled) where the client goes away first."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        watch.cancel()
        task.cancel()


class _EventStream(StreamingResponse):
    """Server-sent events that let go of their requests however the stream ends, even before its first event."""

    def __init__(self, events: AsyncIterator[str], on_close: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


async def _events(
    outputs: AsyncIterator[tuple[int, RequestOutput]], answer: Answer, body: SamplingRequest
) -> AsyncIterator[str]:
    """A chunk whenever a choice has grown, the usage if asked for, and [DONE]."""
    options = body.stream_options
    newest: dict[int, RequestOutput] = {}
    try:
        async for position, output in outputs:
            newest[position] = output
            for chunk in answer.chunks(position, output):
                if options and options.continuous_usage_stats:
                    chunk.usage = usage_of(newest.values())
                yield f"data: {_dump(chunk)}\n\n"
        if options and options.include_usage:
            yield f"data: {_dump(answer.usage_chunk(usage_of(newest.values())))}\n\n"
    except EngineDeadError as error:
        yield f"data: {json.dumps(error_body(500, str(error)))}\n\n"
    except ApiError as error:
        yield f"data: {json.dumps(error_body(error.status, error.message, error.param, error.code))}\n\n"
    yield "data: [DONE]\n\n"
