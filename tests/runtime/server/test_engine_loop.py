"""The engine's side of the two processes, here in threads, on the real engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from qtool.runtime.engine.params import SamplingParams, StructuredOutputsParams
from qtool.runtime.engine.updates import StopFound
from qtool.runtime.llm_engine import LLMEngine
from qtool.runtime.server import messages as m
from qtool.runtime.server.engine_main import EngineLoop, LogForwarder, Outbox, command_address, report_address
from qtool.runtime.server.remote_engine import RestartPolicy


class Peer:
    """The server's two sockets, and the loop that answers them."""

    def __init__(self, engine: LLMEngine, folder: str) -> None:
        self.engine = engine
        self.context: zmq.Context[Any] = zmq.Context()
        self.commands, self.reports = self.context.socket(zmq.PUSH), self.context.socket(zmq.PULL)
        self.commands.bind(command_address(folder))
        self.reports.bind(report_address(folder))
        self.reports.set(zmq.RCVTIMEO, 60_000)
        inner = self.context.socket(zmq.PULL)
        inner.connect(command_address(folder))
        self.outbox = Outbox(self.context, folder)
        loop = EngineLoop(engine, self.outbox)
        self.error: BaseException | None = None

        def run() -> None:
            try:
                loop.run()
            except BaseException as error:
                self.error = error

        self.threads = [threading.Thread(target=loop.receive, args=(inner,)), threading.Thread(target=run)]
        for thread in self.threads:
            thread.start()

    def say(self, command: m.Command) -> None:
        self.commands.send(m.encode(command))

    def hear(self) -> m.Report:
        return m.decode_report(self.reports.recv())

    def add(self, call: int, *requests: tuple[str, list[int], SamplingParams]) -> None:
        self.say(m.AddRequests(call, [m.NewRequest(name, ids, own, 1.5) for name, ids, own in requests]))


@pytest.fixture(scope="module")
def engine(tiny_model: Any) -> LLMEngine:
    return LLMEngine(tiny_model(), device="cpu", dtype="float32", max_num_seqs=8, kv_cache_memory=1 << 22)


@pytest.fixture
def peer(engine: LLMEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    found = Peer(engine, str(tmp_path_factory.mktemp("s")))
    yield found
    found.say(m.Shutdown())
    for thread in found.threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    found.outbox.close()
    found.context.destroy(linger=0)
    engine.check_integrity()


def test_tokens_come_once_and_in_order(peer: Peer) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, prompt_logprobs=0, logprobs=1)
    peer.engine.add_request("want", [5, 6, 7], params)
    want = None
    while peer.engine.has_unfinished():
        for output in peer.engine.step():
            want = output
    assert want is not None
    peer.add(7, ("a", [5, 6, 7], params))
    assert peer.hear() == m.Answer(7)
    tokens: list[int] = []
    entries: list[Any] = []
    scores: list[Any] = []
    while True:
        report = peer.hear()
        assert isinstance(report, m.StepDone)
        (update,) = report.updates
        (output,) = update.outputs
        tokens += output.token_ids
        entries += output.logprobs or []
        scores += update.prompt_logprobs or []
        if len(tokens) == len(output.token_ids):
            assert update.metrics is not None
            assert update.metrics.arrival == 1.5  # the client's moment, not the engine's
        if output.finish_reason:
            break
    assert output.finish_reason == "length"
    assert tuple(tokens) == want.outputs[0].token_ids
    assert tuple(entries) == want.outputs[0].logprobs
    assert (None, *scores) == want.prompt_logprobs
    assert not peer.engine.has_unfinished()


def test_a_long_prompt_is_heard_of_while_it_is_computed(tiny_model: Any, tmp_path_factory: Any) -> None:
    """Each of its steps is a sign of life, although none but the last brings a token."""
    engine = LLMEngine(tiny_model(), device="cpu", dtype="float32", max_num_seqs=8, max_num_batched_tokens=8)
    peer = Peer(engine, str(tmp_path_factory.mktemp("s")))
    peer.add(1, ("a", [5] * 40, SamplingParams(max_tokens=1)))
    assert peer.hear() == m.Answer(1)
    steps = [peer.hear() for _ in range(5)]
    assert [len(step.updates) for step in steps if isinstance(step, m.StepDone)] == [0, 0, 0, 0, 1]
    peer.say(m.Shutdown())
    for thread in peer.threads:
        thread.join(timeout=60)
    peer.outbox.close()
    peer.context.destroy(linger=0)


def test_all_requests_or_none(peer: Peer) -> None:
    own = SamplingParams(max_tokens=3)
    peer.add(1, ("a", [5], own), ("b", [10**6], own))
    answer = peer.hear()
    assert isinstance(answer, m.Answer)
    assert (answer.call, answer.refused) == (1, True)
    assert "outside the vocabulary" in (answer.error or "")
    assert not peer.engine.has_unfinished()


def test_abort_and_stop_end_requests(peer: Peer) -> None:
    long = SamplingParams(max_tokens=200, ignore_eos=True, n=2)
    peer.add(1, ("a", [5], long), ("b", [6], long))
    assert peer.hear() == m.Answer(1)
    peer.say(m.StopOutputs([StopFound("a", 0, "x"), StopFound("a", 1, "x"), StopFound("gone", 0, "x")]))
    peer.say(m.Abort(["b", "gone"]))
    peer.say(m.AskStats(2))
    while not isinstance(report := peer.hear(), m.Answer):
        assert isinstance(report, m.StepDone)
    assert report.stats is not None
    assert (report.call, report.stats.num_running, report.stats.kv_blocks_used) == (2, 0, 0)
    assert not peer.engine.has_unfinished()


def test_forms_are_compiled_beside_the_loop(peer: Peer) -> None:
    peer.say(m.CheckForm(1, StructuredOutputsParams(regex="[ab]{2}")))
    assert peer.hear() == m.Answer(1)
    peer.say(m.CheckForm(2, StructuredOutputsParams(regex="(")))
    refused = peer.hear()
    assert isinstance(refused, m.Answer)
    assert (refused.call, refused.refused) == (2, True)


def test_a_command_that_is_none_ends_the_engine(engine: LLMEngine, tmp_path_factory: pytest.TempPathFactory) -> None:
    peer = Peer(engine, str(tmp_path_factory.mktemp("s")))
    peer.commands.send(b"\xc1")
    for thread in peer.threads:
        thread.join(timeout=60)
    assert peer.error is not None
    peer.outbox.close()
    peer.context.destroy(linger=0)


def test_log_records_travel_with_their_traceback(peer: Peer) -> None:
    logger = logging.Logger("some.where")
    logger.addHandler(LogForwarder(peer.outbox))
    try:
        raise ValueError("deep")
    except ValueError:
        logger.warning("hello %s", "you", exc_info=True)
    line = peer.hear()
    assert isinstance(line, m.LogLine)
    assert (line.logger, line.level) == ("some.where", logging.WARNING)
    assert line.text.startswith("hello you\nTraceback")
    assert line.text.endswith("ValueError: deep")


def test_restarts_wait_longer_each_time_and_come_to_an_end() -> None:
    policy = RestartPolicy(most=4, window_s=100, first_delay_s=1, longest_delay_s=3)
    assert [policy.next_delay(float(now)) for now in range(5)] == [1, 2, 3, 3, None]
    assert policy.next_delay(99.0) is None
    assert policy.next_delay(101.5) == 3  # the first two are forgotten
    assert policy.next_delay(1000.0) == 1
