"""Who gets how many drafts, what becomes of them in the scheduler, and where copied ones come from. No model here."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.runtime.engine.core import EngineCore
from qtool.runtime.engine.kv_cache_manager import KVCacheManager
from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.engine.prompt_lookup import PromptLookup, copy_from, find_repeat
from qtool.runtime.engine.request import Draft, Request, ScheduledRequest, Status, StepResult
from qtool.runtime.engine.scheduler import SchedulerConfig
from qtool.runtime.engine.speculation import (
    ALLOWED_LOSS,
    FIRST_CREDIT,
    MOST,
    MOST_CREDIT,
    Speculator,
    StepCosts,
    expected,
    worthwhile,
)

BLOCK = 8
FREE = StepCosts((1,), (1.0,), (0.0,), (0.0,))


def next_token(tokens: Sequence[int]) -> int:
    """The 'model': the next token depends on all tokens before it."""
    value = 7
    for token in tokens:
        value = (value * 31 + token) % 10_007
    return value % 50


class Guesser:
    """A proposer that is right about as often as it is told to be."""

    setup_seconds = 0.0

    def __init__(self, rng: random.Random, right: float) -> None:
        self.rng, self.right = rng, right
        self.forgotten: list[Request] = []

    def num_known(self, request: Request) -> int:
        return request.num_tokens

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, Draft]:
        found = {}
        for request, count in wanted.items():
            tokens = list(request.token_ids)
            for _ in range(self.rng.randint(0, count)):
                good = next_token(tokens)
                tokens.append(good if self.rng.random() < self.right else (good + 1) % 50)
            found[request] = Draft(tuple(tokens[len(request.token_ids) :]))
        return found

    def forget(self, request: Request) -> None:
        self.forgotten.append(request)


class Always(Speculator):
    """Speculates whatever the clock says."""

    def _pays(self, wanted: Mapping[Request, int], batch: int) -> bool:
        return True


class FakeExecutor:
    """Keeps the token in each slot, as a KV cache would, and answers from that alone."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self.kv: KVCacheManager | None = None
        self.most_tokens = 0
        self.last: dict[Request, int] = {}  # sampled by the step before

    def submit(self, batch: Sequence[ScheduledRequest]) -> list[StepResult]:
        assert self.kv is not None
        self.most_tokens = max(self.most_tokens, sum(w.num_tokens for w in batch))
        results = []
        for work in batch:
            known = [*work.request.token_ids, *work.draft.token_ids]
            if work.start == len(known):
                known.append(self.last[work.request])
            for position in range(work.start, work.start + work.num_tokens):
                block = work.block_table[position // BLOCK]
                assert self.kv.pool.blocks[block].refs == 1, "a block that is written is shared"
                assert self.kv.pool.blocks[block].digest is None, "a block that others may read is written"
                self.slots[block * BLOCK + position % BLOCK] = known[position]
            self.last.pop(work.request, None)
            if not work.sample:
                results.append(StepResult())
                continue
            context = [self.slots[work.block_table[p // BLOCK] * BLOCK + p % BLOCK] for p in range(len(known))]
            count = len(known) - len(work.draft.token_ids)
            accepted = 0
            while (
                accepted < len(work.draft.token_ids)
                and next_token(context[: count + accepted]) == known[count + accepted]
            ):
                accepted += 1
            token = self.last[work.request] = next_token(context[: count + accepted])
            results.append(StepResult(token, accepted=accepted, accepted_logprobs=(None,) * accepted))
        return results

    def collect(self, step: list[StepResult]) -> list[StepResult]:
        return step


def expected_output(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(2, 24),
    budget=st.integers(4, 40),
    seqs=st.integers(1, 6),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    ahead=st.booleans(),
    prefix=st.booleans(),
)
def test_every_request_ends_right_under_random_traffic(
    seed: int, num_blocks: int, budget: int, seqs: int, right: float, ahead: bool, prefix: bool
) -> None:
    """Arrivals, aborts, preemptions and drafts right or wrong: outputs are what each prompt alone gives."""
    rng = random.Random(seed)
    executor, proposer = FakeExecutor(), Guesser(rng, right)
    kv = executor.kv = KVCacheManager(num_blocks, BLOCK, prefix_caching=prefix)
    config = SchedulerConfig(seqs, max(budget, seqs), max_model_len=256)
    core = EngineCore(config, kv, executor, run_ahead=ahead, speculator=Always(proposer, FREE))
    shared = [rng.randrange(50) for _ in range(40)]
    room = num_blocks * BLOCK
    requests: list[Request] = []
    alive: dict[str, Request] = {}
    for step in range(2000):
        if step < 60 and rng.random() < 0.4:
            prompt = [*shared[: rng.randrange(1, 40)], rng.randrange(50)][: room - 1]
            # with penalties no step runs ahead, so that drafts are always due
            params = SamplingParams(max_tokens=rng.randrange(1, 30), temperature=0, presence_penalty=rng.choice([0, 1]))
            request = Request(f"r{step}", prompt, params, stop_token_ids=frozenset(rng.sample(range(50), 2)))
            core.add_request(request)
            alive[request.request_id] = request
            requests.append(request)
        if alive and rng.random() < 0.05:
            core.abort(alive.pop(rng.choice(sorted(alive))).request_id)
        for request in core.step():
            if request.status is Status.FINISHED:
                del alive[request.request_id]
        core.check_integrity()
        if step >= 60 and not alive:
            break
    assert not alive, "an admitted request never ended"
    for request in requests:
        if request.finish_reason == "abort":
            continue
        count = min(request.params.max_tokens, room - request.num_prompt_tokens, 256 - request.num_prompt_tokens)
        want = expected_output(request.prompt_token_ids, count)
        end = next((i for i, token in enumerate(want) if token in request.stop_token_ids), None)
        assert request.output_token_ids == (want if end is None else want[: end + 1])
        assert request.finish_reason == ("length" if end is None else "stop")
        assert 0 <= request.num_accepted <= request.num_drafted
        if right in (0.0, 1.0):
            assert request.num_accepted == 0 or right == 1.0
    assert core.kv.pool.num_used == 0
    assert executor.most_tokens <= max(budget, seqs)
    assert set(proposer.forgotten) == set(requests)


def test_right_drafts_save_steps() -> None:
    executor = FakeExecutor()
    kv = executor.kv = KVCacheManager(64, BLOCK)
    speculator = Always(Guesser(random.Random(0), 1.0), FREE, fixed=4)
    speculator.proposer.rng.randint = lambda low, high: high  # type: ignore[attr-defined]
    core = EngineCore(SchedulerConfig(2, 64, 256), kv, executor, speculator=speculator)
    core.add_request(request := Request("r", [1, 2, 3], SamplingParams(max_tokens=41, temperature=0)))
    while core.has_unfinished():
        core.step()
    stats = core.stats()
    assert request.output_token_ids == expected_output([1, 2, 3], 41)
    assert stats.num_steps == 1 + 8  # one token with the prompt, then five in every step
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (8, 32, 32)


# ---- how many ----


def running(count: int, length: int = 1000) -> list[Request]:
    found = [Request(f"r{i}", [1, 2, 3], SamplingParams(max_tokens=length, temperature=0)) for i in range(count)]
    for request in found:
        request.max_num_tokens = 3 + length
    return found


def verified(speculator: Speculator, requests: Sequence[Request], accepted: Mapping[Request, int] | int) -> int:
    """One step of these requests; returns the drafts of the first."""
    wanted = speculator.wanted(requests)
    works, results = [], []
    for request in requests:
        count = wanted.get(request, 0)
        draft = Draft((1,) * count)
        right = min(count, accepted if isinstance(accepted, int) else accepted[request])
        works.append(ScheduledRequest(request, request.num_tokens - 1, 1 + count, [], True, False, draft))
        results.append(StepResult(1, accepted=right))
        request.token_ids += [1] * (1 + right)
    counts = wanted.values()
    seconds = speculator._predict(len(requests), len(wanted), max(counts, default=0), sum(counts))
    speculator.observe(works, results, seconds, proposed=bool(wanted))
    return wanted.get(requests[0], 0)


def test_expected_tokens_are_the_geometric_sum() -> None:
    """Leviathan et al. 2023, equation 1, less the token that comes anyway: (1 - α^(K+1)) / (1 - α) - 1."""
    assert expected(0.7, 4) == pytest.approx((1 - 0.7**5) / 0.3 - 1)


@pytest.mark.parametrize(
    ("acceptance", "cost", "count"), [(0.7, 0.1, 5), (0.7, 0.5, 1), (0.7, 0.6, 0), (0.5, 0.19, 2), (0.99, 0.01, 8)]
)
def test_a_draft_must_be_worth_its_cost(acceptance: float, cost: float, count: int) -> None:
    assert worthwhile(acceptance, cost, 8) == count


def test_k_goes_up_above_eighty_percent_and_down_below_fifty() -> None:
    speculator, (request,) = Speculator(Guesser(random.Random(0), 1.0), FREE), running(1)
    first = verified(speculator, [request], MOST)
    for _ in range(30):
        last = verified(speculator, [request], MOST)
    assert last == MOST > first
    for _ in range(200):
        last = verified(speculator, [request], 0)
    assert last <= 1


def test_k_stays_in_between() -> None:
    speculator, (request,) = Speculator(Guesser(random.Random(0), 1.0), FREE), running(1)
    counts = [verified(speculator, [request], i % 2 + 1) for i in range(100)]  # of those looked at: three in five
    assert set(counts) == {4, 0}
    assert counts.count(0) == 2, "a step without at first and one later, so that it stays measured"


def test_a_fixed_k_stays_fixed() -> None:
    speculator, (request,) = Speculator(Guesser(random.Random(0), 1.0), FREE, fixed=3), running(1)
    verified(speculator, [request], 0)  # a step without comes first
    assert {verified(speculator, [request], i % 4) for i in range(45)} == {3}


def test_speculation_ends_where_the_batch_makes_it_slow() -> None:
    # one sequence: a token more is nearly free; 16: it costs nearly as much as a token
    costs = StepCosts((1, 16), (1.0, 2.0), (0.05, 1.8), (0.0, 0.0))
    few = Speculator(Guesser(random.Random(0), 1.0), costs)
    many = Speculator(Guesser(random.Random(0), 1.0), costs)
    for speculator, count, pays in ((few, 1, True), (many, 16, False)):
        requests = running(count)
        assert not verified(speculator, requests, 0), "the first step of a size is one without"
        assert bool(speculator.wanted(requests)) == pays


def test_a_request_whose_drafts_fail_sits_out_longer_and_longer() -> None:
    costs = StepCosts((1,), (1.0,), (0.3,), (0.0,))
    speculator, (request,) = Speculator(Guesser(random.Random(0), 1.0), costs), running(1, 9000)
    drafted = [verified(speculator, [request], 0) for _ in range(500)]
    assert sum(k > 0 for k in drafted[100:]) <= 4
    counts = [verified(speculator, [request], MOST) for _ in range(300)]
    assert counts[-1] > 1 or counts[-2] > 1, "and comes back when they are right"


def test_steps_that_take_longer_than_was_measured_end_it() -> None:
    costs = StepCosts((1,), (1.0,), (0.05,), (0.0,))
    speculator, (request,) = Speculator(Guesser(random.Random(0), 1.0), costs), running(1)
    verified(speculator, [request], 0)
    works = [ScheduledRequest(request, request.num_tokens - 1, 5, [], True, False, Draft((1,) * 4))]
    assert speculator.wanted([request])
    for _ in range(40):
        speculator.observe(works, [StepResult(1, accepted=2)], 10.0, proposed=True)
    assert not speculator.wanted([request])


def test_a_long_context_for_a_short_answer_is_not_read_by_the_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = StepCosts((1,), (1.0,), (0.05,), (0.1,), catch_up=0.05)

    class Unread(Guesser):
        def num_known(self, request: Request) -> int:
            return 0

    def wants(prompt: int, output: int) -> bool:
        request = Request("r", [1] * prompt, SamplingParams(max_tokens=output, temperature=0))
        request.max_num_tokens = prompt + output
        speculator = Speculator(Unread(random.Random(0), 1.0), costs)
        verified(speculator, [request], 0)
        return bool(speculator.wanted([request]))

    assert wants(80, 60)
    assert not wants(200, 60), "more than an engine may lose that has seen nothing"
    monkeypatch.setattr("qtool.runtime.engine.speculation.FIRST_CREDIT", 1000.0)
    assert wants(200, 60)
    assert not wants(2000, 60)


@pytest.mark.parametrize("batch", [1, 8])
def test_drafts_that_fail_cost_no_more_than_is_allowed(batch: int) -> None:
    """Time with drafts that are always refused, over time without: one percent, and the first credit."""
    costs = StepCosts((1, 8), (1.0, 2.0), (0.1, 0.5), (0.1, 0.2), catch_up=0.01)
    speculator = Speculator(Guesser(random.Random(0), 1.0), costs)
    steps, lost = 5000, 0.0
    requests: list[Request] = []
    for _ in range(steps):
        requests = [r for r in requests if r.num_tokens < r.max_num_tokens] or running(batch, 40)
        wanted = speculator.wanted(requests)
        works = [
            ScheduledRequest(r, r.num_tokens - 1, 1 + wanted.get(r, 0), [], True, False, Draft((1,) * wanted.get(r, 0)))
            for r in requests
        ]
        for request in requests:
            request.token_ids.append(1)
        plain = costs.at(costs.plain, len(requests))
        longest = max(wanted.values(), default=0)
        seconds = plain + longest * (
            costs.at(costs.verify, len(requests)) + costs.at(costs.propose, max(len(wanted), 1))
        )
        lost += seconds - plain
        speculator.observe(works, [StepResult(1)] * len(works), seconds, proposed=bool(wanted))
    everything = steps * costs.at(costs.plain, batch)
    assert speculator.num_drafts > 10, "it goes on trying"
    assert lost < 0.015 * everything + FIRST_CREDIT * costs.plain[0] + 2


def test_a_step_that_the_machine_held_up_is_forgiven() -> None:
    """An hour's pause costs as much credit as there can be: it is paid back by one percent of steps without drafts."""
    speculator = Speculator(Guesser(random.Random(0), 1.0), StepCosts((1,), (1.0,), (0.1,), (0.0,)))
    requests = running(1, 10**6)

    def step(pause: float = 0.0) -> bool:
        count = speculator.wanted(requests).get(requests[0], 0)
        work = ScheduledRequest(requests[0], 0, 1 + count, [], True, False, Draft((1,) * count))
        result = StepResult(1, accepted=count)  # drafts are always right
        speculator.observe([work], [result], 1.0 + 0.1 * count + pause * (count > 0), proposed=count > 0)
        return count > 0

    while not step(pause=3600.0):
        pass
    waited = next(i for i in range(10_000) if step())
    assert waited <= MOST_CREDIT / ALLOWED_LOSS + 1


# ---- prompt lookup ----


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_the_latest_of_the_longest_repeats_is_found(tokens: list[int]) -> None:
    want = None
    for size in (4, 3, 2):
        ends = [e for e in range(size, len(tokens)) if size < len(tokens) and tokens[e - size : e] == tokens[-size:]]
        if ends:
            want = ends[-1]
            break
    assert find_repeat(array("i", tokens).tobytes()) == want


def test_matches_that_straddle_two_tokens_are_no_matches() -> None:
    # bytes of 1 and 256 look alike when they are shifted by one
    assert find_repeat(array("i", [0, 256, 256, 7, 1, 1]).tobytes()) is None


def test_a_copy_goes_on_past_the_end() -> None:
    assert copy_from([5, 1, 2, 3], 1, 7) == (1, 2, 3, 1, 2, 3, 1)


def test_prompt_lookup_follows_a_growing_text() -> None:
    proposer = PromptLookup()
    (request,) = running(1)
    request.token_ids = [7, 8, 9, 10, 11, 7, 8]
    assert proposer.propose({request: 3})[request].token_ids == (9, 10, 11)
    request.token_ids += [9, 50]
    assert proposer.propose({request: 3}) == {}
    request.token_ids += [8, 9]
    assert proposer.propose({request: 2})[request].token_ids == (50, 8)
    proposer.forget(request)
    assert not proposer._packed
