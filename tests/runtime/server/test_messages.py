"""What one side of the engine's process says arrives as it was said."""

from __future__ import annotations

import dataclasses
import json
import math
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.quant.errors import QtoolError
from qtool.runtime.engine.core import EngineStats
from qtool.runtime.engine.params import RequestMetrics, SamplingParams, StructuredOutputsParams, TokenLogprobs
from qtool.runtime.engine.updates import OutputUpdate, RequestUpdate, StopFound
from qtool.runtime.memory_budget import MemoryBudget
from qtool.runtime.server import messages as m

token = st.integers(0, 2**31 - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
number = st.floats(allow_nan=False, width=64)
forms = st.one_of(
    st.builds(StructuredOutputsParams, regex=text.filter(str.strip)),
    st.builds(StructuredOutputsParams, choice=st.lists(text, min_size=1, max_size=3)),
    st.builds(StructuredOutputsParams, json=st.just('{"type": "integer"}'), disable_any_whitespace=st.booleans()),
    st.builds(StructuredOutputsParams, json_object=st.just(True), whitespace_pattern=st.none() | text),
)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(5, 2**40),
    temperature=st.floats(1, 5),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0.1, 1),
    min_p=st.floats(0, 1),
    typical_p=st.floats(0.1, 1),
    dynatemp_range=st.floats(0, 1),
    dynatemp_exponent=st.floats(0.1, 100),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(token, st.floats(-100, 100), max_size=3),
    allowed_token_ids=st.just(None),
    bad_words=st.lists(text, max_size=3),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    stop=st.lists(text, max_size=3),
    stop_token_ids=st.lists(token, max_size=3),
    min_tokens=st.integers(0, 5),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 1024),
    prompt_logprobs=st.none() | st.integers(0, 1024),
    n=st.integers(1, 4),
    best_of=st.none() | st.integers(4, 128),
    priority=st.integers(-100, 100),
    structured_outputs=st.none() | forms,
)
logprobs = st.builds(TokenLogprobs, token, number, st.integers(1, 2**31), st.dictionaries(token, number, max_size=3))
metrics = st.builds(RequestMetrics, number, st.none() | number, st.none() | number, st.none() | number, token)
outputs = st.builds(
    OutputUpdate,
    st.integers(0, 127),
    st.lists(token, max_size=4),
    st.none() | st.lists(logprobs, max_size=3),
    st.sampled_from([None, "stop", "length", "error", "refused"]),
    st.none() | token | text,
)
updates = st.builds(
    RequestUpdate, text, st.lists(outputs, max_size=3), st.none() | st.lists(logprobs, max_size=3), st.none() | metrics
)
stats = st.builds(EngineStats, *[token] * len(dataclasses.fields(EngineStats)))
budget = st.builds(
    MemoryBudget,
    device=text,
    **dict.fromkeys(("limit", "weights", "activations", "graphs", "kv_cache", "kv_tokens", "swap_space"), token),
    activations_measured=st.booleans(),
)
requests = st.builds(m.NewRequest, text, st.lists(token, max_size=20), params, number)
call = st.integers(0, 2**63)
commands = st.one_of(
    st.builds(m.AddRequests, call, st.lists(requests, max_size=2)),
    st.builds(m.Abort, st.lists(text, max_size=3)),
    st.builds(m.StopOutputs, st.lists(st.builds(StopFound, text, token, text), max_size=3)),
    st.builds(m.CheckForm, call, forms),
    st.builds(m.AskStats, call),
    st.just(m.Shutdown()),
)
reports = st.one_of(
    st.builds(m.Ready, token, st.frozensets(token, max_size=3), budget, stats),
    st.builds(m.Refused, text),
    st.builds(m.StepDone, st.lists(updates, max_size=3), stats, number),
    st.builds(m.Answer, call, st.none() | text, st.booleans(), st.none() | stats),
    st.builds(m.LogLine, text, st.integers(0, 50), text),
    st.builds(m.Crashed, text),
)


@settings(max_examples=60, deadline=None)
@given(commands)
def test_commands_arrive_as_they_were(command: m.Command) -> None:
    assert m.decode_command(m.encode(command)) == command


@settings(max_examples=60, deadline=None)
@given(reports)
def test_reports_arrive_as_they_were(report: m.Report) -> None:
    assert m.decode_report(m.encode(report)) == report


def test_every_field_of_the_params_travels() -> None:
    """A field that is added later and forgotten here would be sent as its default."""
    own: dict[str, Any] = {
        "max_tokens": 7, "temperature": 0.9, "top_k": 3, "top_p": 0.8, "min_p": 0.1, "typical_p": 0.7,
        "dynatemp_range": 0.2, "dynatemp_exponent": 2.0, "repetition_penalty": 1.1, "presence_penalty": 0.3,
        "frequency_penalty": 0.4, "logit_bias": {5: 1.5}, "allowed_token_ids": [1, 2], "bad_words": ["x"], "seed": 9,
        "stop": ["y"], "stop_token_ids": [3], "min_tokens": 2, "ignore_eos": True, "logprobs": 4,
        "prompt_logprobs": 5, "n": 2, "best_of": 3, "priority": 6,
    }  # fmt: skip
    assert {field.name for field in dataclasses.fields(SamplingParams)} == {*own, "structured_outputs"}
    sent = m.AddRequests(1, [m.NewRequest("a", [1], SamplingParams(**own), 0.5)])
    arrived = m.decode_command(m.encode(sent))
    assert isinstance(arrived, m.AddRequests)
    got = arrived.requests[0].params
    assert {name: getattr(got, name) for name in own} == own


def test_other_collections_arrive_as_plain_ones() -> None:
    own = SamplingParams(stop=("a", "b"), stop_token_ids=frozenset([4]), logit_bias=MappingProxyType({1: 2.0}))  # type: ignore[arg-type]
    arrived = m.decode_command(m.encode(m.AddRequests(0, [m.NewRequest("a", [1], own, 0.0)])))
    assert isinstance(arrived, m.AddRequests)
    got = arrived.requests[0].params
    assert (got.stop, got.stop_token_ids, got.logit_bias) == (["a", "b"], [4], {1: 2.0})


def test_minus_infinity_travels() -> None:
    entry = TokenLogprobs(1, -math.inf, 300, {2: -math.inf})
    report = m.StepDone([RequestUpdate("a", [OutputUpdate(0, [1], [entry])])], EngineStats(*[0] * 12), 1.0)
    assert m.decode_report(m.encode(report)) == report


def test_a_schema_travels_as_text() -> None:
    """JSON may hold larger numbers and be nested deeper than MessagePack's decoder allows."""
    schema: dict[str, Any] = {"maximum": 10**40}
    for _ in range(300):
        schema = {"properties": {"a": schema}}
    form = StructuredOutputsParams(json=schema)
    arrived = m.decode_command(m.encode(m.CheckForm(3, m.plain_form(form))))
    assert isinstance(arrived, m.CheckForm)
    assert json.loads(arrived.form.text) == schema
    assert m.plain_params(SamplingParams(structured_outputs=form)).structured_outputs == m.plain_form(form)


@pytest.mark.parametrize("bad", [SamplingParams(seed=2**64), SamplingParams(stop=["\ud800"])])
def test_what_cannot_be_sent_is_refused(bad: SamplingParams) -> None:
    with pytest.raises(QtoolError, match="cannot be passed to the engine"):
        m.encode(m.AddRequests(0, [m.NewRequest("a", [1], bad, 0.0)]))
    with pytest.raises(QtoolError, match="cannot be passed to the engine"):
        m.encode(m.AddRequests(0, [m.NewRequest("a", [2**70], SamplingParams(), 0.0)]))


@pytest.mark.parametrize("data", [b"", b"\xc1", m.encode(m.Crashed("x")), m.encode(m.Shutdown())[:-1]])
def test_bytes_that_are_no_command_are_refused(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        m.decode_command(data)


def test_a_step_is_small() -> None:
    """A token of one of 64 requests costs a few tens of bytes, not a text."""
    ids = [f"cmpl-{'0' * 32}-{i}" for i in range(64)]
    report = m.StepDone([RequestUpdate(i, [OutputUpdate(0, [40000])]) for i in ids], EngineStats(*[0] * 12), 1.0)
    assert len(m.encode(report)) < 64 * 64 + 500
