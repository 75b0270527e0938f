"""Updates of any size give the client the text that the whole output has, and a stop string ends it once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.runtime.engine.params import RequestMetrics, RequestOutput, SamplingParams, TokenLogprobs
from qtool.runtime.engine.updates import OutputUpdate, RequestUpdate, StopFound
from qtool.runtime.output_processor import OutputProcessor

METRICS = RequestMetrics(1.0, 2.0, 3.0)


class Bytes:
    """A token is a byte."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = True, clean_up_tokenization_spaces: Any = None) -> str:
        return bytes(token_ids).decode(errors="replace")


def run(
    tokens: list[int], sizes: list[int], params: SamplingParams, reason: str | None = "length"
) -> tuple[list[RequestOutput], list[StopFound]]:
    """Feed tokens in pieces of these sizes; the last piece ends for `reason`."""
    processor = OutputProcessor(Bytes())
    processor.add("a", [104, 105], params)
    outputs, stops, at = [], [], 0
    for i, size in enumerate(sizes):
        piece = tokens[at : at + size] if i < len(sizes) - 1 else tokens[at:]
        at += size
        end = reason if i == len(sizes) - 1 else None
        new, found = processor.process([RequestUpdate("a", [OutputUpdate(0, piece, None, end)], None, METRICS)])
        outputs += new
        stops += found
    return outputs, stops


texts = st.text("ab€🙂é", max_size=20)


@settings(max_examples=50, deadline=None)
@given(texts, st.lists(st.integers(1, 4), min_size=1, max_size=12), st.sampled_from(["ab", "€a", "🙂", "bb"]))
def test_any_division_gives_the_same_text(text: str, sizes: list[int], stop: str) -> None:
    tokens = list(text.encode())
    outputs, stops = run(tokens, sizes, SamplingParams(max_tokens=100, stop=[stop]))
    last = outputs[-1].outputs[0]
    assert last.text == text.partition(stop)[0]
    assert outputs[-1].finished
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert (last.finish_reason, last.stop_reason) == (("stop", stop) if stop in text else ("length", None))
    until = len((text.partition(stop)[0] + stop).encode()) if stop in text else len(tokens)
    assert list(last.token_ids) == tokens[:until]
    assert len(stops) <= 1
    shown = [o.outputs[0].text for o in outputs]
    assert all(b.startswith(a) for a, b in pairwise(shown))


def test_a_stop_string_is_told_once_and_what_comes_after_is_passed_over() -> None:
    processor = OutputProcessor(Bytes())
    processor.add("a", [1], SamplingParams(max_tokens=50, stop=["END"], n=2))

    def feed(index: int, text: str, reason: str | None = None) -> tuple[list[RequestOutput], list[StopFound]]:
        update = OutputUpdate(index, list(text.encode()), None, reason)
        return processor.process([RequestUpdate("a", [update], None, METRICS)])

    (output,), stops = feed(0, "oneEND")
    assert (output.outputs[0].text, output.finished, stops) == ("one", False, [StopFound("a", 0, "END")])
    assert feed(1, "two")[1] == []
    assert feed(0, " more")[1] == []  # the engine had not heard of it yet
    outputs, stops = feed(1, "!", "length")
    assert stops == []
    assert [(c.text, c.finish_reason) for c in outputs[0].outputs] == [("one", "stop"), ("two!", "length")]
    assert outputs[0].finished
    assert feed(0, "late") == ([], [])


def test_a_stop_string_gives_the_end_a_moment() -> None:
    outputs, stops = run(list(b"abcX"), [4], SamplingParams(max_tokens=9, stop=["X"]), reason=None)
    assert stops == [StopFound("a", 0, "X")]
    assert outputs[0].finished
    assert outputs[0].metrics.finished is not None


def test_min_tokens_hide_a_stop_string() -> None:
    outputs, _ = run(list(b"aXbXc"), [1] * 5, SamplingParams(max_tokens=9, stop=["X"], min_tokens=3))
    assert outputs[-1].outputs[0].text == "aXb"


def test_the_token_that_ends_an_output_is_no_text() -> None:
    processor = OutputProcessor(Bytes())
    processor.add("a", [1], SamplingParams(max_tokens=9, stop_token_ids=[90]))
    update = OutputUpdate(0, [90, 65, 90], None, "stop", 90)
    ((output,), stops) = processor.process([RequestUpdate("a", [update], None, METRICS)])
    assert (output.outputs[0].text, output.outputs[0].stop_reason, stops) == ("ZA", 90, [])


def test_the_best_by_mean_logprob_come_at_the_end_alone() -> None:
    processor = OutputProcessor(Bytes())
    processor.add("a", [1], SamplingParams(max_tokens=9, n=1, best_of=3))
    values = {0: [-1.0, -3.0], 1: [-1.5, -1.5], 2: [-0.1]}
    outputs: list[RequestOutput] = []
    for index, scores in values.items():
        reason = "error" if index == 2 else "length"
        entries = [TokenLogprobs(65 + index, score, 1) for score in scores]
        update = OutputUpdate(index, [65 + index] * len(scores), entries, reason)
        outputs += processor.process([RequestUpdate("a", [update], None, METRICS)])[0]
    assert [[c.text for c in o.outputs] for o in outputs] == [["BB"]]
    assert outputs[0].outputs[0].logprobs is None


def test_prompt_logprobs_grow_from_none() -> None:
    processor = OutputProcessor(Bytes())
    processor.add("a", [1, 2, 3, 4], SamplingParams(prompt_logprobs=0))
    scores = [TokenLogprobs(t, -float(t), 1) for t in (2, 3, 4)]
    processor.process([RequestUpdate("a", [OutputUpdate(0, [65])], scores[:1], METRICS)])
    ((output,), _) = processor.process([RequestUpdate("a", [OutputUpdate(0, [66], None, "length")], scores[1:])])
    assert output.prompt_logprobs == (None, *scores)
    assert output.metrics == replace(METRICS, finished=output.metrics.finished)  # as in the update before


@pytest.mark.parametrize("known", [True, False])
def test_updates_of_dropped_requests_are_passed_over(known: bool) -> None:
    processor = OutputProcessor(Bytes())
    if known:
        processor.add("a", [1], SamplingParams())
        processor.drop("a")
    assert processor.process([RequestUpdate("a", [OutputUpdate(0, [65])], None, METRICS)]) == ([], [])
