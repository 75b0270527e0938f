"""Steps with prompts in padded pieces: hidden states and caches of the same steps run whole; nothing else written."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qtool.runtime.decode_bench import MODES, SHAPES, random_decoder
from qtool.runtime.executor.model_runner import ModelRunner
from qtool.runtime.executor.prompt_graphs import PromptGraphs, token_counts
from qtool.runtime.kernels.kv_cache import KVCache

TINY = SHAPES["llama-3-8b"] | {
    "vocab_size": 160, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
BLOCK, BLOCKS, SENTINEL = 16, 40, 3.0
# (tokens before, tokens) of each sequence in each step: prompts alone, then decodes and chunks, then a small step
STEPS = [[(0, 37), (0, 100)], [(37, 1), (100, 61), (0, 20)], [(38, 1), (161, 2), (20, 3)], [(0, 300)]]


def repeating(work: Callable[[], tuple[Tensor, ...]]) -> tuple[Callable[[], object], tuple[Tensor, ...]]:
    """What a CUDA graph does, on any device: the same work again, its results in the same places."""
    results = tuple(t.clone() for t in work())

    def replay() -> None:
        for place, new in zip(results, work()):
            place.copy_(new)

    return replay, results


def fill(cache: KVCache, value: float) -> None:
    cache.values.fill_(value)
    if cache.scales is not None:
        cache.scales.fill_(value)


def unowned(cache: KVCache, owned: Tensor) -> list[Tensor]:
    parts = [cache.values] if cache.scales is None else [cache.values, cache.scales.transpose(1, 2)]
    return [part.flatten(0, 1)[~owned] for part in parts]


@torch.inference_mode()
def compare(device: str, mode: str, kv: Any, dtype: torch.dtype, tolerance: float) -> None:
    """Every step through the pieces and through Decoder.forward, each with caches of its own."""
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    model = random_decoder(TINY, MODES[mode], dtype=dtype, device=where, max_model_len=512, kv_mode=kv)
    runners = [ModelRunner(model, num_blocks=BLOCKS, block_size=BLOCK) for _ in range(2)]
    for runner in runners:
        for cache in runner.caches:
            fill(cache, SENTINEL)
    recorder = repeating if device == "cpu" else None
    graphs = PromptGraphs(model, runners[0].caches, runners[0].ops, token_counts(320), recorder)
    assert graphs.sizes == [16, 32, 64, 96, 128, 192, 256, 320]
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
    tables = [[order.pop() for _ in range(n)] for n in (4, 11, 2)]
    owned = torch.zeros(BLOCKS * BLOCK, dtype=torch.bool, device=where)
    for step, works in enumerate(STEPS):
        own = tables if step < 3 else [[order.pop() for _ in range(19)]]
        for (start, count), table in zip(works, own):
            for at in range(start, start + count):
                owned[table[at // BLOCK] * BLOCK + at % BLOCK] = True
        ids = [(7 * i + step) % 160 for i in range(sum(n for _, n in works))]
        sides = []
        for runner in runners:
            plan = runner.ops.plan(
                [s for s, _ in works], [n for _, n in works], own, block_size=BLOCK, shape=model.attention_shape,
                windows=model.windows, dtype=dtype, device=where, also=(ids,),
            )  # fmt: skip
            sides.append(plan)
        graphs.ids(len(ids)).copy_(sides[0].also[0])
        graphs._attended.fill_(torch.nan)  # what padding holds must not matter
        got = graphs.forward(len(ids), sides[0]).double()
        want = model.forward(sides[1].also[0], sides[1], runners[1].caches, runners[1].ops).double()
        assert got.shape == want.shape == (len(ids), 256)
        assert float((got - want).norm() / want.norm()) < tolerance, (mode, kv, step)
        for ours, theirs in zip(*(r.caches for r in runners)):
            for part in unowned(ours, owned):
                assert bool((part == SENTINEL).all())
            first, second = (
                c.gather(torch.arange(BLOCKS, device=where), 1, BLOCKS * BLOCK, dtype) for c in (ours, theirs)
            )
            for a, b in zip(first, second):
                a, b = a[0][:, owned].double(), b[0][:, owned].double()
                assert float((a - b).norm() / b.norm()) < tolerance


@pytest.mark.parametrize("kv", ["float", "int8"])
@pytest.mark.parametrize("mode", ["fp16", "w4"])
def test_pieces_give_what_the_whole_step_gives(mode: str, kv: str) -> None:
    compare("cpu", mode, kv, torch.float32, 1e-5 if kv == "float" else 1e-2)


@torch.inference_mode()
def test_all_logits_are_the_logits_of_all_hidden_states() -> None:
    model = random_decoder(TINY, MODES["fp16"], dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
    found = []
    for whole in (True, False):
        runner = ModelRunner(model, num_blocks=4, block_size=BLOCK)
        plan = runner.ops.plan(
            [0], [30], [[2, 0]], block_size=BLOCK, shape=model.attention_shape, windows=model.windows,
            dtype=torch.float32, device=model.embed.device, also=(range(30),),
        )  # fmt: skip
        rest = (plan.also[0], plan, runner.caches, runner.ops)
        found.append(model.all_logits(*rest) if whole else model.logits(model.forward(*rest), runner.ops))
    assert torch.equal(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["float", "int8"])
@pytest.mark.parametrize("mode", MODES)
def test_captured_pieces_give_what_the_whole_step_gives(mode: str, kv: str) -> None:
    # the kernel changes with the number of tokens, and with it the rounding
    compare("cuda", mode, kv, torch.float16, 3e-3 if mode in ("fp16", "w4") and kv == "float" else 2e-2)


@pytest.mark.gpu
def test_too_little_memory_keeps_the_smaller_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    capture = PromptGraphs._capture

    def starved(self: PromptGraphs, size: int, pool: Any) -> Any:
        if size > 64:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return capture(self, size, pool)

    monkeypatch.setattr(PromptGraphs, "_capture", starved)
    device = torch.device("cuda", 0)
    model = random_decoder(TINY, MODES["w4"], dtype=torch.float16, device=device, max_model_len=512)
    runner = ModelRunner(model, num_blocks=BLOCKS, block_size=BLOCK)
    with caplog.at_level(logging.WARNING):
        runner.prepare(2, 512, 128)
    assert runner.prompt_graphs is not None
    assert runner.prompt_graphs.sizes == [16, 32]
    assert "does not suffice for all CUDA graphs: steps of more than 32 tokens with prompts run without" in caplog.text
    assert runner.prompt_graphs.fits(32)
    assert not runner.prompt_graphs.fits(33)


def pool_bytes() -> int:
    """Device memory that pools of CUDA graphs hold, not what torch keeps for others, like workspaces of streams."""
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))


@pytest.mark.gpu
def test_graphs_hold_no_memory_for_each_layer() -> None:
    """The results of one piece give room to the next: eight layers take what two take."""
    taken = []
    for layers in (2, 8):
        device = torch.device("cuda", 0)
        settings = TINY | {"num_hidden_layers": layers}
        model = random_decoder(settings, MODES["fp16"], dtype=torch.float16, device=device, max_model_len=64)
        runner = ModelRunner(model, num_blocks=4, block_size=BLOCK)
        gc.collect()  # pools that nobody uses any more
        torch.cuda.empty_cache()
        before = pool_bytes()
        graphs = PromptGraphs(model, runner.caches, runner.ops, token_counts(2048))
        taken.append(pool_bytes() - before)
        assert graphs.sizes[-1] == 2048
        del graphs, runner, model
    # kept, the hidden states of six more layers would take 57 MB over all sizes, and queries, keys and values 113
    assert taken[1] <= taken[0] + (20 << 20), taken


def test_counts_of_tokens_reach_the_limit_and_no_further() -> None:
    assert token_counts(64) == [64, 32, 16]
    assert token_counts(100) == [100, 96, 64, 32, 16]
    assert token_counts(8192)[:3] == [2048, 1920, 1792]
    assert token_counts(2048) == token_counts(8192)
    assert all(b <= 2 * a for a, b in zip(token_counts(2048)[1:], token_counts(2048)))
