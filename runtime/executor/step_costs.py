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
REPEATS = 3
SLOW = 0.1  # seconds: a step that takes longer is measured once


def measure_step_costs(
    runner: ModelRunner, draft: ModelRunner | None, *, num_blocks: int, max_num_seqs: int, max_model_len: int
) -> StepCosts:
    """Measure decodes, verification and drafts. Overwrites the KV caches: nothing may run or be cached yet."""
    context = max(1, min(CONTEXT, max_model_len - DRAFTS - 1))
    batch: list[int] = []
    plain: list[float] = []
    verify: list[float] = []
    propose: list[float] = []
    spent = 0.0
    for count in BATCHES:
        if count > max_num_seqs or (count > ENOUGH and spent > SECONDS):
            break
        began = time.perf_counter()
        one = _seconds(runner, count, context, 1, num_blocks)
        more = _seconds(runner, count, context, 1 + DRAFTS, num_blocks)
        batch.append(count)
        plain.append(one)
        verify.append(max(more - one, 0.0) / DRAFTS)
        propose.append(0.0 if draft is None else _seconds(draft, count, context, 1, num_blocks))
        spent += time.perf_counter() - began
    catch_up = 0.0
    if draft is not None:
        chunk = max(1, min(CHUNK, max_model_len - 1))
        catch_up = _seconds(draft, 1, 0, chunk, num_blocks) / chunk
    return StepCosts(tuple(batch), tuple(plain), tuple(verify), tuple(propose), catch_up)


def _seconds(runner: ModelRunner, count: int, start: int, tokens: int, num_blocks: int) -> float:
    """The quickest of some steps of `count` sequences with `tokens` tokens each."""
    works = _works(count, start, tokens, runner.block_size, num_blocks)

    def once() -> float:
        began = time.perf_counter()
        runner.collect(runner.submit(works))
        return time.perf_counter() - began

    first = once()
    if first > SLOW and count > 1:
        return first
    return min(once() for _ in range(REPEATS))


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
