"""How many tokens to propose for whom: from the acceptance that was seen and the step costs that were measured.

A step with drafts computes 1 + K tokens of a request instead of one and yields 1 to 1 + K of them (Leviathan et al.
2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318). K follows the acceptance: one more above 80 %, one less
below 50 %. The j-th draft is accepted with probability α^j, which must be worth its cost; so with a large batch, where
a token more costs as much as a token, nothing is proposed. An account is kept of what drafting won and lost: once
it is overdrawn, nothing is drafted until time without drafts has paid its share into it. No torch here.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from qtool.quant.errors import QtoolError
from qtool.runtime.engine.request import Draft, Request, ScheduledRequest, StepResult

METHODS = ("prompt-lookup", "draft", "self")

FIRST = 4  # drafts of a new request
MOST = 16  # drafts in one step, ever
RAISE, LOWER = 0.8, 0.5
MARGIN = 1.25  # what a draft must be worth, over its cost: for what is not known of either
PRIOR = 0.6  # acceptance, before any was seen: of what is copied
MODEL_PRIOR = 0.8  # and of what a model drafts
MEMORY = 0.9  # of a request's acceptance, for each draft looked at
ENGINE_MEMORY = 0.95
WEIGHT = 3.0  # drafts that the other requests' acceptance counts as
RELAX = 0.02  # how far each new request lets the engine's acceptance go back to the prior
FIRST_PAUSE, LONGEST_PAUSE = 16, 256  # tokens; doubled each time that a trial after a pause fails
REFRESH = 50  # steps with drafts between two without, so that these stay measured
LENGTH = 64.0  # tokens of an output, before any has ended
ALLOWED_LOSS = 0.01  # of all time: what trials may cost that bring nothing
FIRST_CREDIT, MOST_CREDIT = 4.0, 16.0  # steps of one sequence; nor is more than the latter ever owed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpeculationConfig:
    """What to draft with.

    Attributes:
        method: prompt-lookup (what followed these tokens before), draft (a smaller model), self (the same model, more
            coarsely quantized).
        draft_model: folder or name of the model that drafts; for `draft` and `self`.
        num_speculative_tokens: always so many drafts, where any pay; None: as many as the acceptance suggests.

    Raises:
        QtoolError: an unknown method; a draft model missing or too many; a number out of range.
    """

    method: str
    draft_model: str | None = None
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise QtoolError(f"speculative must be one of {', '.join(METHODS)}, got {self.method!r}")
        if self.method == "prompt-lookup" and self.draft_model is not None:
            raise QtoolError("speculative prompt-lookup copies from the text and takes no draft_model: leave it out")
        if self.method != "prompt-lookup" and self.draft_model is None:
            what = "a smaller model" if self.method == "draft" else "the model's own INT4 artifact"
            raise QtoolError(f"speculative {self.method} needs draft_model, {what} with the same tokenizer")
        count = self.num_speculative_tokens
        if count is not None and not 1 <= count <= MOST:
            raise QtoolError(f"num_speculative_tokens must be between 1 and {MOST}, got {count}")


def speculation_config(
    method: str | None, draft_model: str | None, num_speculative_tokens: int | None, static_batching: bool = False
) -> SpeculationConfig | None:
    """An engine's arguments, checked; None: no speculation. Raises QtoolError as SpeculationConfig."""
    if method is not None:
        if static_batching:
            raise QtoolError("speculative does not go with static_batching, which computes one token a step: drop one")
        return SpeculationConfig(method, draft_model, num_speculative_tokens)
    for name, value in (("draft_model", draft_model), ("num_speculative_tokens", num_speculative_tokens)):
        if value is not None:
            raise QtoolError(f"{name} is for speculation: set speculative too ({', '.join(METHODS)})")
    return None


class Proposer(Protocol):
    """Where drafts come from.

    Attributes:
        setup_seconds: what the last proposals took beyond a draft's own cost: contexts that were new to the proposer.
    """

    setup_seconds: float

    def num_known(self, request: Request) -> int:
        """Tokens of a request that the proposer need not compute any more."""
        ...

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, Draft]:
        """At most so many tokens for each request; requests may be left out."""
        ...

    def forget(self, request: Request) -> None:
        """The request has ended: free what is kept for it."""
        ...


@dataclass(frozen=True)
class StepCosts:
    """Measured seconds at some numbers of sequences; between them straight lines, above the last its slope goes on.

    Attributes:
        batch: the numbers of sequences, ascending.
        plain: a step of one token each.
        verify: what one more token of each adds.
        propose: one draft token for each.
        catch_up: one token of a context that the proposer has not seen.
    """

    batch: tuple[int, ...]
    plain: tuple[float, ...]
    verify: tuple[float, ...]
    propose: tuple[float, ...]
    catch_up: float = 0.0

    def at(self, values: Sequence[float], count: float) -> float:
        """One of the lines at a number of sequences."""
        if len(values) == 1:
            return values[0] * max(1.0, count / self.batch[0])
        i = min(max(1, bisect_left(self.batch, count)), len(values) - 1)
        x0, x1 = self.batch[i - 1], self.batch[i]
        return max(values[i - 1] + (values[i] - values[i - 1]) * (count - x0) / (x1 - x0), 0.0)


def expected(acceptance: float, count: int) -> float:
    """Mean number of `count` drafts that are accepted, each with this probability where those before it are."""
    return float(sum(acceptance**j for j in range(1, count + 1)))


def worthwhile(acceptance: float, cost: float, most: int) -> int:
    """Drafts of which each is worth its cost, given as a share of what a token costs without."""
    count, chance = 0, acceptance
    while count < most and chance >= cost * MARGIN:
        count += 1
        chance *= acceptance
    return count


@dataclass(slots=True)
class _Pace:
    """What is known of one request: its drafts looked at and accepted, the older the less, its K, and how long it sits
    out."""

    count: int
    looked: float = 0.0
    accepted: float = 0.0
    resume_at: int = 0
    pause: int = FIRST_PAUSE
    trial: bool = False


@dataclass(slots=True)
class _Drift:
    """How far the steps of today are from the measured costs: with context, load on the machine, hidden costs."""

    plain: float = 1.0
    drafted: float = 1.0
    num_plain: int = 0
    since_plain: int = REFRESH


class Speculator:
    """Decides, asks the proposer, and learns from what becomes of it.

    Args:
        fixed: always this K where it pays; None: by acceptance.
        prior: acceptance to begin with.
    """

    def __init__(self, proposer: Proposer, costs: StepCosts, *, fixed: int | None = None, prior: float = PRIOR) -> None:
        self.proposer = proposer
        self.costs = costs
        self.acceptance = self._prior = prior
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_verified_tokens = 0  # those after one that was refused are not
        self._fixed = fixed
        self._paces: dict[Request, _Pace] = {}
        self._drift: dict[int, _Drift] = {}
        self._found = 1.0  # share of the wanted tokens that are proposed
        self._length = LENGTH
        self._broken = False
        self._credit = FIRST_CREDIT * costs.plain[0]  # seconds that drafting may still lose

    # ---- before a step ----

    def wanted(self, requests: Collection[Request]) -> dict[Request, int]:
        """Drafts for each of the requests that the next step decodes; empty where none pay."""
        batch = len(requests)
        if not batch or self._broken or self._credit <= 0:
            return {}
        plain = self.costs.at(self.costs.plain, batch)
        cost = (self.costs.at(self.costs.verify, batch) + self.costs.at(self.costs.propose, batch)) / plain
        if cost * MARGIN >= 1:
            return {}
        each, credit = plain / batch, self._credit
        wanted = {}
        for request in requests:
            if count := self._count(request, cost, each):
                credit -= self._lag(request) * self.costs.catch_up
                if credit > 0:
                    wanted[request] = count
        sure = {r: k for r, k in wanted.items() if not self._paces[r].trial}
        return wanted if not sure or self._pays(sure, batch) else {r: k for r, k in wanted.items() if r not in sure}

    def _count(self, request: Request, cost: float, each: float) -> int:
        """K of one request; `each` is what a token costs without drafts."""
        room = request.max_num_tokens - request.num_tokens - 1
        if room < 1:
            return 0
        pace = self._paces.get(request)
        if pace is None:
            self.acceptance += RELAX * (self._prior - self.acceptance)
            pace = self._paces[request] = _Pace(self._fixed or FIRST)
        if request.num_tokens < pace.resume_at:
            return 0
        acceptance = self._chance(pace)
        if pace.trial:
            count = 1
        elif self._fixed is not None:
            count = self._fixed if expected(acceptance, self._fixed) > self._fixed * cost * MARGIN else 0
        else:
            count = worthwhile(acceptance, cost, pace.count)
        if count == 0:
            self._sit_out(request, pace)
            return 0
        count = min(count, room)
        lag = self._lag(request)
        if lag:  # the proposer has to read the context first: will there be output enough to make it good?
            accepted = expected(acceptance, count)
            steps = min(room, self._length) / (1 + accepted)
            if lag * self.costs.catch_up > (accepted - count * cost) * each * steps:
                return 0
        return count

    def _lag(self, request: Request) -> int:
        """Tokens of a context that the proposer would have to read before it can draft; a few are part of drafting."""
        return max(request.num_tokens - self.proposer.num_known(request) - MOST, 0)

    def _chance(self, pace: _Pace) -> float:
        """That a request's next draft is accepted: by what became of its own, and of the others' while it has few."""
        return (pace.accepted + WEIGHT * self.acceptance) / (pace.looked + WEIGHT)

    @staticmethod
    def _sit_out(request: Request, pace: _Pace) -> None:
        pace.resume_at = request.num_tokens + pace.pause
        pace.pause = min(2 * pace.pause, LONGEST_PAUSE)
        pace.trial = True
        pace.count = 1

    def _pays(self, wanted: Mapping[Request, int], batch: int) -> bool:
        """The step as a whole yields more tokens a second than one without drafts, as both are measured here."""
        drift = self._drift.setdefault(_bucket(batch), _Drift())
        if drift.since_plain >= REFRESH:
            return False
        gained = self._found * sum(expected(self._chance(self._paces[r]), k) for r, k in wanted.items())
        plain = self.costs.at(self.costs.plain, batch)
        took = self._predict(batch, len(wanted), max(wanted.values()), self._found * sum(wanted.values()))
        return (1 + gained / batch) * plain * drift.plain > took * drift.drafted

    def _predict(self, batch: int, drafting: int, longest: int, drafts: float) -> float:
        costs = self.costs
        verify = costs.at(costs.verify, batch) / batch
        propose = costs.at(costs.propose, drafting) * longest if drafting else 0.0
        return costs.at(costs.plain, batch) + verify * drafts + propose

    def propose(self, requests: Collection[Request]) -> dict[Request, Draft] | None:
        """Drafts for the next step, in which `requests` decode; None where none pay."""
        wanted = self.wanted(requests)
        if not wanted:
            return None
        try:
            found = {r: _in_form(r, d) for r, d in self.proposer.propose(wanted).items()}
        except Exception:  # of a proposer, which may be anyone's: no request fails for it
            log.exception("proposing tokens failed; the engine goes on without speculation")
            self._broken = True
            return None
        drafts = {r: d for r, d in found.items() if d.token_ids}
        asked, got = sum(wanted.values()), sum(len(d.token_ids) for d in drafts.values())
        self._found += 0.1 * (got / asked - self._found)
        return drafts

    # ---- after a step ----

    def observe(
        self, scheduled: Sequence[ScheduledRequest], results: Sequence[StepResult], seconds: float, *, proposed: bool
    ) -> None:
        """Learn from a step; `seconds` is all that it took, with `proposed` what proposing did too."""
        counts = []
        for work, result in zip(scheduled, results):
            if work.draft.token_ids and result.error is None:
                self._learn(work.request, len(work.draft.token_ids), result.accepted)
            counts.append(len(work.draft.token_ids))
        batch = len(scheduled)
        self._credit += ALLOWED_LOSS * seconds
        if any(w.num_tokens != 1 + k for w, k in zip(scheduled, counts)):
            if proposed:
                self._credit -= self.proposer.setup_seconds
            return  # a step with prompts in it says nothing else of decodes
        drift = self._drift.setdefault(_bucket(batch), _Drift())
        if not proposed:
            drift.num_plain += 1
            share = max(0.25, 1 / drift.num_plain)
            drift.plain = _toward(drift.plain, seconds / self.costs.at(self.costs.plain, batch), share)
            drift.drafted += 0.02 * (drift.plain - drift.drafted)  # so that it is tried again some time
            drift.since_plain = 0
        else:
            gained = sum(r.accepted for r in results) / batch
            without = (1 + gained) * self.costs.at(self.costs.plain, batch) * drift.plain
            most = MOST_CREDIT * self.costs.plain[0]
            self._credit = max(-most, min(self._credit + without - seconds, most))
            drafting = sum(k > 0 for k in counts)
            expect = self._predict(batch, drafting, max(counts), sum(counts))
            drift.drafted = _toward(drift.drafted, (seconds - self.proposer.setup_seconds) / expect, 0.1)
            drift.since_plain += 1

    def _learn(self, request: Request, drafted: int, accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        looked = min(accepted + 1, drafted)  # those after the first that is refused were not looked at
        self.num_verified_tokens += looked
        share = accepted / looked
        self.acceptance += (1 - ENGINE_MEMORY**looked) * (share - self.acceptance)
        pace = self._paces.get(request)
        if pace is None:
            return
        for right in (True,) * accepted + (False,) * (looked - accepted):
            pace.looked = MEMORY * pace.looked + 1
            pace.accepted = MEMORY * pace.accepted + right
        if pace.trial:
            pace.trial = False
            if accepted:
                pace.pause, pace.count = FIRST_PAUSE, self._fixed or 1
                pace.looked = pace.accepted = 1.0  # what was before it is over
            else:
                self._sit_out(request, pace)
        elif self._fixed is None:
            acceptance = self._chance(pace)
            if acceptance > RAISE and drafted >= pace.count:
                pace.count = min(pace.count + 1, MOST)
            elif acceptance < LOWER:
                pace.count = max(pace.count - 1, 1)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        if self._paces.pop(request, None) is not None:
            self._length += 0.1 * (request.num_output_tokens - self._length)
        self.proposer.forget(request)


def _in_form(request: Request, draft: Draft) -> Draft:
    """A draft up to the first token that the output's form forbids. Not where it was drawn: what is drawn must be
    verified, or the next token's distribution would depend on it."""
    if request.matcher is None or draft.probs is not None:
        return draft
    return Draft(draft.token_ids[: request.matcher.count_permitted(draft.token_ids)])


def _toward(mean: float, seen: float, share: float) -> float:
    """A running mean; one measurement far above it (the machine was busy) counts no more than twice the mean."""
    return mean + share * (min(seen, 2 * mean) - mean)


def _bucket(batch: int) -> int:
    return (batch - 1).bit_length()


def decoding(requests: Iterable[Request]) -> list[Request]:
    """Those whose next step is a decode of one token that the host knows."""
    return [r for r in requests if r.generate and not r.num_in_flight and len(r.token_ids) - r.num_computed_tokens == 1]
