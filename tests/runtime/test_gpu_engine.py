"""The same engine and loader on a GPU: greedy tokens equal to the CPU's in float32, plain and quantized."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.quant.formats import writer
from qtool.quant.numerics import find_grid, quantize
from qtool.quant.scheme import QuantPlan, QuantScheme
from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.llm import LLM

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 6, 7], list(range(1, 80)), [300], list(range(1, 60)), [9, 8] * 20]


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    """No TF32: float32 is to mean float32."""
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


def quantized(folder: Path, target: Path, scheme: QuantScheme) -> Path:
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    layers = [n.removesuffix(".weight") for n in weights if n.endswith("_proj.weight")]
    form = writer("compressed-tensors")
    for layer in layers:
        weight = weights.pop(f"{layer}.weight")
        weights |= form.tensors(layer, quantize(weight, find_grid(weight, scheme), scheme))
    save_file({n: t.contiguous() for n, t in weights.items()}, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = form.quantization_config(QuantPlan(dict.fromkeys(layers, scheme)), "lm_head")
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("scheme", [None, "w4g32", "w4g64-asym", "w8", "w8g32"])
def test_greedy_tokens_are_those_of_the_cpu(tiny_model: Any, tmp_path: Path, scheme: str | None) -> None:
    folder = tiny_model()
    if scheme is not None:
        folder = quantized(folder, tmp_path / "q", QuantScheme.parse(scheme))
    params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
    outputs = {}
    logits = {}
    for device in ("cpu", "cuda"):
        limits = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "kv_cache_memory": 1 << 22}
        llm = LLM(folder, device=device, dtype="float32", **limits)
        outputs[device] = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
        logits[device] = [t.cpu() for t in llm.prompt_logits(PROMPTS)]
        assert llm.engine.stats().kv_blocks_used == 0
    for ours, theirs in zip(logits["cuda"], logits["cpu"], strict=True):
        assert (ours - theirs).abs().max() < 1e-3
    assert outputs["cuda"] == outputs["cpu"]


def test_seeded_samples_are_those_of_the_cpu(tiny_model: Any) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True)
    found = [
        [o.outputs[0].token_ids for o in LLM(tiny_model(), device=d, dtype="float32").generate(PROMPTS, params)]
        for d in ("cpu", "cuda")
    ]
    assert found[0] == found[1]


def test_sixteen_bit_runs_in_its_own_dtype(tiny_model: Any) -> None:
    llm = LLM(tiny_model(), device="cuda", dtype="bfloat16")
    assert all(c.values.dtype == torch.bfloat16 and c.values.device.type == "cuda" for c in llm.engine.runner.caches)
    exact = LLM(tiny_model(), device="cpu", dtype="float32")
    for got, want in zip(llm.prompt_logits(PROMPTS), exact.prompt_logits(PROMPTS), strict=True):
        assert torch.nn.functional.cosine_similarity(got.cpu(), want, dim=-1).min() > 0.99
