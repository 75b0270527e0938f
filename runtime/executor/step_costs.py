"""What a step costs by its size, measured on the machine when an engine starts that speculates."""

from __future__ import annotations

import time
from collections.abc import Sequence

from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.engine.request import Draft, Request, ScheduledRequest
from qtool.runtime.engine.speculation import StepCosts
from qtool.runtime.executor.model_runner import ModelRunner

BATCHES = (1, 4, 16, 64)
DRAFTS = 4  # in the steps that are measured
CONTEXT = 256  # tokens before them
CHUNK = 128  # tokens of a new context
SECONDS = 2.0  # after which no more than ENOUGH sequences are measured
ENOUGH = 16
LEAST, MOST, EACH = 2, 6, 0.5  # rounds for a number of sequences: so many, until this many seconds have passed


def measure_step_costs(
    runner: ModelRunner, draft: ModelRunner | None, *, num_blocks: int, max_num_seqs: int, max_model_len: int
) -> StepCosts:
    """Measure decodes, verification and drafts. Overwrites the KV caches: nothing may run or be cached yet."""
    context = max(1, min(CONTEXT, max_model_len - DRAFTS - 1))
    batch: list[int] = []
    plain: list[float] = []
    verify: list[float] = []
    propose: list[float] = []
    began = time.perf_counter()
    for count in BATCHES:
        if count > max_num_seqs or (count > ENOUGH and time.perf_counter() - began > SECONDS):
            break
        steps = [(runner, context, 1), (runner, context, 1 + DRAFTS)]
        steps += [] if draft is None else [(draft, context, 1)]
        one, more, *drafted = _seconds(steps, count, num_blocks)
        batch.append(count)
        plain.append(one)
        verify.append(max(more - one, 0.0) / DRAFTS)
        propose.append(drafted[0] if drafted else 0.0)
    catch_up = 0.0
    if draft is not None:
        chunk = max(1, min(CHUNK, max_model_len - 1))
        catch_up = _seconds([(draft, 0, chunk)], 1, num_blocks)[0] / chunk
    return StepCosts(tuple(batch), tuple(plain), tuple(verify), tuple(propose), catch_up)


def _seconds(steps: Sequence[tuple[ModelRunner, int, int]], count: int, num_blocks: int) -> list[float]:
    """For each of (runner, context, tokens), the quickest of some steps of `count` sequences. They take turns, so that
    what else the machine does falls on all of them."""
    works = [_works(count, start, tokens, runner.block_size, num_blocks) for runner, start, tokens in steps]
    best = [float("inf")] * len(steps)
    began = time.perf_counter()
    for turn in range(1 + MOST):
        for i, (runner, _, _) in enumerate(steps):
            at = time.perf_counter()
            runner.collect(runner.submit(works[i]))
            if turn or count > 1:  # the very first compiles and allocates
                best[i] = min(best[i], time.perf_counter() - at)
        if turn + 1 >= LEAST and time.perf_counter() - began > EACH:
            break
    return best


def _works(count: int, start: int, tokens: int, block_size: int, num_blocks: int) -> Sequence[ScheduledRequest]:
    need = -(-(start + tokens) // block_size)
    works = []
    for i in range(count):
        table = [(i * need + j) % num_blocks for j in range(need)]
        prompt = start == 0
        request = Request(f"measured-{i}", [0] * (start + (tokens if prompt else 1)), SamplingParams(temperature=0.0))
        draft = Draft() if prompt else Draft((0,) * (tokens - 1))
        works.append(ScheduledRequest(request, start, tokens, table, not prompt, draft=draft))
    return works
