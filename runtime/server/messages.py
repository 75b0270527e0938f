"""What the server and its engine's process say to each other, in MessagePack (msgspec), each message an array.

Commands go to the engine, reports come from it. A command with a `call` is answered by one `Answer` with the same
number; whatever else the engine reports comes unasked. Both sides are of one version: the messages are no interface for
anybody else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from qtool.quant.errors import QtoolError
from qtool.runtime.engine.core import EngineStats
from qtool.runtime.engine.params import SamplingParams, StructuredOutputsParams
from qtool.runtime.engine.updates import RequestUpdate, StopFound
from qtool.runtime.memory_budget import MemoryBudget


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first element says which message it is."""


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """One prompt, and how to go on from it.

    Attributes:
        arrival: when it came, in seconds of `time.monotonic()`, which all processes of a machine share.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float


class AddRequests(_Message, frozen=True):
    """Queue all of these or none. Prompt log-probabilities, structured output and the steps of a beam search are a
    matter of each request's params."""

    call: int
    requests: list[NewRequest]


class Abort(_Message, frozen=True):
    """Give these up; those that have ended are passed over."""

    request_ids: list[str]


class StopOutputs(_Message, frozen=True):
    """End these outputs: their stop strings are there."""

    stops: list[StopFound]


class CheckForm(_Message, frozen=True):
    """Compile a form, beside the engine's loop, and keep it for the request that will ask for it."""

    call: int
    form: StructuredOutputsParams


class AskStats(_Message, frozen=True):
    call: int


class Shutdown(_Message, frozen=True):
    """End after the present step."""


class Starting(_Message, frozen=True):
    """How far the engine is before it is ready; as ProgressFn's arguments."""

    what: str
    done: int
    total: int


class Ready(_Message, frozen=True):
    """The model is loaded and has run.

    Attributes:
        stats: the engine's counts so far, its warm-up's.
    """

    max_model_len: int
    eos_token_ids: frozenset[int]
    memory: MemoryBudget
    stats: EngineStats


class Refused(_Message, frozen=True):
    """Why the model cannot be served, in one line."""

    message: str


class StepDone(_Message, frozen=True):
    """What one step brought all requests. `time` is `time.monotonic()` at its end, in seconds."""

    updates: list[RequestUpdate]
    stats: EngineStats
    time: float


class Answer(_Message, frozen=True):
    """The answer to a call.

    Attributes:
        error: why it was not done; None: it was.
        refused: the caller can mend it.
        stats: of an AskStats.
    """

    call: int
    error: str | None = None
    refused: bool = False
    stats: EngineStats | None = None


class LogLine(_Message, frozen=True):
    """A record of the engine's log, its traceback included. `level` as in `logging`."""

    logger: str
    level: int
    text: str


class Crashed(_Message, frozen=True):
    """The engine's last words."""

    reason: str


Command = AddRequests | Abort | StopOutputs | CheckForm | AskStats | Shutdown
Report = Starting | Ready | Refused | StepDone | Answer | LogLine | Crashed


def _plain(value: object) -> object:
    """Mappings and collections of other types than MessagePack's."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Collection):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encode(message: Command | Report) -> bytes:
    """The bytes of a message.

    Raises:
        QtoolError: it holds what MessagePack cannot: an integer of more than 64 bits, half a surrogate pair.
    """
    try:
        return _encoder.encode(message)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise QtoolError(f"the request cannot be passed to the engine: {error}") from None


def decode_command(data: bytes) -> Command:
    """A command from its bytes. Raises msgspec.MsgspecError for bytes that are none."""
    return _commands.decode(data)


def decode_report(data: bytes) -> Report:
    """A report from its bytes. Raises msgspec.MsgspecError for bytes that are none."""
    return _reports.decode(data)


def plain_form(form: StructuredOutputsParams) -> StructuredOutputsParams:
    """The same form, a schema as text: JSON has numbers and depths that MessagePack has not. Raises QtoolError."""
    return form if form.form != "json" or isinstance(form.json, str) else replace(form, json=form.text)


def plain_params(params: SamplingParams) -> SamplingParams:
    """The same params with a plain form."""
    form: Any = params.structured_outputs
    return params if form is None else replace(params, structured_outputs=plain_form(form))
