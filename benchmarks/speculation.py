"""Speculative decoding against plain decoding: speed-ups by form, load and concurrency, on one machine.

    python benchmarks/speculation.py smollm2-135m --int4 ./smollm2-135m-w4g64-rtn --text wiki.test.txt
    python benchmarks/speculation.py smollm2-135m --tenth --text wiki.test.txt

The first measures prompt lookup, a draft model of the first blocks (poor on purpose) and the model's own INT4 artifact
on two loads: texts that repeat their prompt (greedy) and sampled continuations at temperature 1 (which hardly repeat).
All engines work on the same prompts and take turns step by step, so that what else the machine does falls on all of
them; a ratio is the time of the plain engine's steps over that of the speculating one's, over all rounds.

The second builds a target ten times as expensive as MODEL: the same model with further blocks whose output projections
are zero, which leaves its function as it is, and with noise on its weights until MODEL's drafts are accepted at the
wanted rate. Then MODEL drafts for it.

--cpu-time counts the process's CPU time instead of seconds (with one thread: OMP_NUM_THREADS=1), for a machine that is
busy with other things; the engine's own decisions follow the same clock.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the CLI sets it; before torch is imported

import torch
from safetensors.torch import save_file

from qtool.quant.checkpoint import Checkpoint
from qtool.quant.hub import resolve_model
from qtool.runtime.engine.core import EngineCore
from qtool.runtime.engine.kv_cache_manager import KVCacheManager
from qtool.runtime.engine.params import RequestOutput, SamplingParams
from qtool.runtime.engine.speculation import expected
from qtool.runtime.executor.model_runner import ModelRunner
from qtool.runtime.llm import LLM

PASSAGE = 64  # tokens that are repeated
LEAD = 16  # of them, at the start of the repetition, that the prompt gives


def passages(llm: LLM, text: str) -> list[list[int]]:
    """Pieces of PASSAGE tokens."""
    ids = llm.engine.encode(text)
    return [ids[i : i + PASSAGE] for i in range(0, len(ids) - PASSAGE, PASSAGE)]


def repeating(llm: LLM, passage: Sequence[int]) -> list[int]:
    """A prompt that asks for its own text once more."""
    again = llm.engine.encode("\n\nThe same text once more:\n\n")
    return [*passage, *again, *passage[:LEAD]]


@dataclass
class Total:
    """What an engine did over the rounds of one load. Greedy outputs are compared with the plain engine's."""

    seconds: float = 0.0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    equal: int = 0
    outputs: int = 0


class Run:
    """One engine's way through some prompts, step by step."""

    def __init__(self, llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, total: Total) -> None:
        self.engine, self.total, self.tokens = llm.engine, total, 0
        self.outputs: dict[str, RequestOutput] = {}
        for i, prompt in enumerate(prompts):
            self.engine.add_request(f"{i}", prompt, params)

    def step(self) -> None:
        began = time.perf_counter()
        outputs = self.engine.step()
        self.total.seconds += time.perf_counter() - began
        self.outputs |= {output.request_id: output for output in outputs}
        self.tokens = sum(len(o.outputs[0].token_ids) for o in self.outputs.values())

    def finish(self) -> list[tuple[int, ...]]:
        for output in self.outputs.values():
            self.total.drafted += output.metrics.num_drafted_tokens
            self.total.accepted += output.metrics.num_accepted_tokens
        self.total.tokens += self.tokens
        return [self.outputs[name].outputs[0].token_ids for name in sorted(self.outputs, key=int)]


def race(runs: Mapping[str, Run]) -> dict[str, list[tuple[int, ...]]]:
    """All to their ends, always the one that is furthest behind: what else the machine does falls on all of them."""
    while going := [run for run in runs.values() if run.engine.has_unfinished()]:
        min(going, key=lambda run: run.tokens).step()
    return {name: run.finish() for name, run in runs.items()}


def compare(
    engines: Mapping[str, LLM], texts: list[list[int]], load: str, concurrency: int, rounds: int, length: int
) -> dict[str, Total]:
    """Every engine on the same prompts, `rounds` times on new ones, in turns, after a round that does not count: in it
    engines learn what their drafts are worth on this load."""
    temperature = 0.0 if load == "repeats" else 1.0
    params = SamplingParams(max_tokens=length, temperature=temperature, ignore_eos=True)
    totals = {name: Total() for name in engines}
    for number in range(1 + rounds):
        if number == 1:
            totals = {name: Total() for name in engines}
        some = [texts.pop() for _ in range(concurrency)]
        outputs = race(
            {
                name: Run(llm, [repeating(llm, p) for p in some] if load == "repeats" else some, params, totals[name])
                for name, llm in engines.items()
            }
        )
        for name, found in outputs.items():
            totals[name].equal += sum(a == b for a, b in zip(outputs["plain"], found))
            totals[name].outputs += len(found)
    return totals


def row(load: str, concurrency: int, totals: Mapping[str, Total]) -> str:
    plain = totals["plain"]
    cells = [load, str(concurrency), f"{plain.tokens / plain.seconds:.1f}"]
    for name, total in totals.items():
        if name != "plain":
            share = f"{total.accepted / total.drafted:.0%} of {total.drafted}" if total.drafted else "none drafted"
            same = f", {total.equal} of {total.outputs} equal" if load == "repeats" else ""
            cells.append(f"{plain.seconds / total.seconds:.2f} ({share}{same})")
    return "| " + " | ".join(cells) + " |"


# ---- models made for the purpose ----


def first_blocks(source: Path, folder: Path, count: int) -> None:
    """The model cut off after `count` blocks."""
    with Checkpoint(source) as checkpoint:
        kept = {}
        for name in checkpoint.names():
            parts = name.split(".")
            if parts[1] != "layers" or int(parts[2]) < count:
                kept[name] = checkpoint.tensor(name).contiguous()
        _write(source, folder, kept, count)


def perturbed(source: Path, folder: Path, noise: float, extra: int, seed: int = 0) -> None:
    """The model with normal noise on its blocks, `noise` times each matrix's own spread, and `extra` blocks that change
    nothing: their output projections are zero. Only the bytes of the others count: they are random."""
    generator = torch.Generator().manual_seed(seed)
    with Checkpoint(source) as checkpoint:
        tensors = {name: checkpoint.tensor(name).contiguous() for name in checkpoint.names()}
        blocks = checkpoint.config["num_hidden_layers"]
    block = {n.split(".", 3)[3]: t for n, t in tensors.items() if n.startswith("model.layers.0.")}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and ".layers." in name:
            spread = float(tensor.float().std()) * noise
            tensors[name] = (tensor.float() + spread * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
    for i in range(blocks, blocks + extra):
        for name, tensor in block.items():
            zero = name.startswith(("self_attn.o_proj", "mlp.down_proj"))
            tensors[f"model.layers.{i}.{name}"] = torch.zeros_like(tensor) if zero else tensor.clone()
    _write(source, folder, tensors, blocks + extra)


def _write(source: Path, folder: Path, tensors: dict[str, torch.Tensor], blocks: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and not file.name.startswith(("config", "model.")) and file.is_file():
            shutil.copy(file, folder / file.name)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": blocks}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# ---- the two measurements ----


def forms(arguments: argparse.Namespace, work: Path) -> None:
    source = resolve_model(arguments.model)
    chosen = arguments.forms.split(",")
    common: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 16, "prefix_caching": False}
    engines = {"plain": LLM(source, **common)}
    common["dtype"] = str(engines["plain"].engine.dtype).removeprefix("torch.")
    if "prompt-lookup" in chosen:
        engines["prompt-lookup"] = LLM(source, speculative="prompt-lookup", **common)
    if "draft" in chosen:
        first_blocks(source, work / "first", 3)
        engines["draft"] = LLM(source, speculative="draft", draft_model=str(work / "first"), **common)
    if "self" in chosen and arguments.int4:
        engines["self"] = LLM(source, speculative="self", draft_model=arguments.int4, **common)
    texts = passages(engines["plain"], arguments.text.read_text(encoding="utf-8")[:2_000_000])
    for name, llm in engines.items():
        llm.generate([texts.pop()], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        if name != "plain":
            print(f"{name}: {costs(llm)}", flush=True)
    print(
        "| load | concurrency | plain tokens/s | " + " | ".join(n for n in engines if n != "plain") + " |", flush=True
    )
    for load in arguments.loads.split(","):
        for concurrency in map(int, arguments.concurrency.split(",")):
            totals = compare(engines, texts, load, concurrency, arguments.rounds, arguments.length)
            print(row(load, concurrency, totals), flush=True)


def costs(llm: LLM) -> str:
    """The step costs that the engine measured at its start."""
    found = llm.engine._core._speculator.costs
    return "; ".join(
        f"{n} at once: a step {1000 * found.plain[i]:.0f} ms, a token more of each {1000 * found.verify[i]:.1f}, "
        f"a draft of each {1000 * found.propose[i]:.1f}"
        for i, n in enumerate(found.batch)
    )


def each_accepted(share: float, count: int) -> float:
    """With which probability each of `count` drafts must be accepted, where those before it are, so that `share` of all
    of them are."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if expected(middle, count) < share * count:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def agreement(target: Path, draft: Path, texts: Sequence[Sequence[int]], length: int) -> float:
    """Share of the target's greedy tokens that are the draft's likeliest ones after the same text: the acceptance."""
    greedy = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
    found = LLM(target, max_model_len=512, max_num_seqs=8).generate(texts, greedy)
    whole = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in found]
    scored = LLM(draft, max_model_len=512, max_num_seqs=8).generate(
        whole, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    )
    gc.collect()
    ranks = [s.rank for o in scored for s in (o.prompt_logprobs or ())[-length:] if s is not None]
    return sum(rank == 1 for rank in ranks) / len(ranks)


def tenth(arguments: argparse.Namespace, work: Path) -> None:
    source = resolve_model(arguments.model)
    common: dict[str, Any] = {
        "speculative": "draft", "draft_model": str(source), "num_speculative_tokens": 4, "max_model_len": 512,
        "max_num_seqs": 1, "prefix_caching": False,
    }  # fmt: skip
    params = SamplingParams(max_tokens=arguments.length, temperature=0.0, ignore_eos=True)
    texts = passages(LLM(source, max_model_len=512), arguments.text.read_text(encoding="utf-8")[:2_000_000])
    wanted = each_accepted(arguments.acceptance, 4)
    low, high, noise = 0.0, 2 * arguments.noise, arguments.noise
    for _ in range(8):
        perturbed(source, work / "small", noise, 0)
        found = agreement(work / "small", source, texts[:8], arguments.length)
        print(f"noise {noise:.4f}: acceptance {found:.3f}", flush=True)
        if abs(found - wanted) < 0.015:
            break
        low, high = (noise, high) if found > wanted else (low, noise)
        noise = (low + high) / 2
    shutil.rmtree(work / "small")
    perturbed(source, work / "large", noise, arguments.extra)
    engines = {"draft": LLM(work / "large", **common)}
    for name in ("speculative", "draft_model", "num_speculative_tokens"):
        del common[name]
    engines["plain"] = LLM(source, **common)  # stands in until it gets the large model, which is held once
    core, plain = engines["draft"].engine._core, engines["plain"].engine
    plain.runner = ModelRunner(engines["draft"].engine.runner.model, num_blocks=32, block_size=16)
    plain._core = EngineCore(core.scheduler.config, KVCacheManager(32, 16, prefix_caching=False), plain.runner)
    decides = core._speculator
    totals = {"plain": Total(), "draft": Total()}
    for text in texts[: arguments.rounds]:
        outputs = race({name: Run(llm, [text], params, totals[name]) for name, llm in engines.items()})
        totals["draft"].equal += outputs["plain"] == outputs["draft"]
    print(costs(engines["draft"]))
    accepted, looked = decides.num_accepted_tokens, decides.num_verified_tokens
    share = accepted / decides.num_draft_tokens
    print(f"{accepted} of {decides.num_draft_tokens} drafts accepted: {share:.2f}", end="; ")
    print(f"{accepted / looked:.2f} of those that were looked at")
    print(f"{totals['draft'].equal} of {arguments.rounds} outputs equal")
    print(f"speed-up {totals['plain'].seconds / totals['draft'].seconds:.2f} at K = 4 and concurrency 1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True, help="a long plain text")
    parser.add_argument("--int4", help="the model's INT4 artifact, for self-draft")
    parser.add_argument("--forms", default="prompt-lookup,draft,self")
    parser.add_argument("--tenth", action="store_true", help="the second measurement")
    parser.add_argument("--acceptance", type=float, default=0.7, help="share of all drafts that are accepted at K = 4")
    parser.add_argument("--extra", type=int, default=340, help="blocks that change nothing, for ten times the cost")
    parser.add_argument("--noise", type=float, default=0.1, help="where the search for the acceptance begins")
    parser.add_argument("--concurrency", default="1,2,4,8,16")
    parser.add_argument("--loads", default="repeats,sampled")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--length", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time, on a busy machine")
    arguments = parser.parse_args()
    if arguments.cpu_time:
        time.perf_counter = time.process_time
    with tempfile.TemporaryDirectory() as work:
        (tenth if arguments.tenth else forms)(arguments, Path(work))


if __name__ == "__main__":
    main()
