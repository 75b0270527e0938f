"""Engines with an int8 KV cache: batching, memory, checkpoints that bring scales of their own, refusals."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from qtool.cli.engine_options import check_kv_cache_dtype
from qtool.evalsets.metrics import token_scores
from qtool.evalsets.windows import text_windows
from qtool.quant.errors import QtoolError
from qtool.quant.formats import compressed_tensors
from qtool.quant.numerics import find_grid, quantize
from qtool.quant.scheme import QuantPlan, QuantScheme
from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.llm import LLM

PROMPTS = ["hello", "a longer prompt, with words in it", "x", "the same beginning: one", "the same beginning: two"]
GREEDY = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
INT8_BLOCK = 2 * 16 * 2 * 2 * (16 + 2)  # layers, tokens, keys and values, KV heads, head size and scale


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 4, "max_num_batched_tokens": 7},
        {"prefix_caching": False},
        {"block_size": 32},
        {"kv_cache_memory": 8 * INT8_BLOCK, "max_model_len": 128},
    ],
    ids=lambda s: next(iter(s)),
)
def test_tokens_do_not_depend_on_how_they_are_batched(tiny_model: Any, settings: dict[str, Any]) -> None:
    want = tokens(LLM(tiny_model(), device="cpu", kv_cache_dtype="int8"))
    other = LLM(tiny_model(), device="cpu", kv_cache_dtype="int8", **settings)
    assert tokens(other) == want
    assert tokens(other) == want, "a second time, from the warm prefix cache"
    other.engine.check_integrity()
    assert other.engine.stats().kv_blocks_used == 0
    if "kv_cache_memory" in settings:
        assert other.engine.stats().kv_blocks_total == 8
        assert other.engine.stats().num_preemptions > 0


def test_several_outputs_share_blocks_and_stay_apart(tiny_model: Any) -> None:
    llm = LLM(tiny_model(), device="cpu", kv_cache_dtype="int8")
    params = SamplingParams(max_tokens=20, n=3, seed=1, ignore_eos=True)
    (together,) = llm.generate([PROMPTS[1]], params)
    alone = LLM(tiny_model(), device="cpu", kv_cache_dtype="int8", max_num_seqs=1, prefix_caching=False)
    (apart,) = alone.generate([PROMPTS[1]], params)
    assert [o.token_ids for o in together.outputs] == [o.token_ids for o in apart.outputs]
    assert len({o.token_ids for o in together.outputs}) == 3


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 1.93), ("float32", 3.87)])
def test_the_same_memory_holds_as_many_more_blocks_as_its_bytes_allow(
    tiny_model: Any, dtype: str, least: float
) -> None:
    """head_dim 64: 128 bytes in bfloat16 against 64 codes and a scale of 2."""
    folder = tiny_model(hidden_size=256, head_dim=64, max_position_embeddings=2048)
    blocks = {}
    for kind in ("float", "int8"):
        llm = LLM(folder, device="cpu", dtype=dtype, kv_cache_dtype=kind, kv_cache_memory=1 << 20, max_num_seqs=64)
        blocks[kind] = llm.engine.stats().kv_blocks_total
        assert sum(cache.num_bytes for cache in llm.engine.runner.caches) <= 1 << 20
    assert least < blocks["int8"] / blocks["float"] < least * 1.02


class Scaled(DynamicCache):
    """transformers' cache, with keys and values put through compressed-tensors' own static quantization."""

    def __init__(self, scales: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.scales = scales

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        from compressed_tensors.quantization import QuantizationArgs
        from compressed_tensors.quantization.lifecycle.forward import fake_quantize

        args_ = QuantizationArgs(num_bits=8, symmetric=True, strategy="tensor")
        k, v = (
            torch.cat([fake_quantize(x[:, h : h + 1], s[h : h + 1], None, args_) for h in range(x.shape[1])], dim=1)
            for x, s in zip((keys, values), self.scales[layer])
        )
        found: tuple[Tensor, Tensor] = super().update(k, v, layer, *args, **kwargs)
        return found


def with_scales(folder: Path, target: Path, per_head: bool, **scheme: Any) -> tuple[Path, list[tuple[Tensor, Tensor]]]:
    """The model in w8 with static KV scales, as llm-compressor stores them; and the scales of each layer's heads."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    layers = [n.removesuffix(".weight") for n in weights if n.endswith("_proj.weight")]
    for layer in layers:
        weight = weights.pop(f"{layer}.weight")
        weights |= compressed_tensors.tensors(layer, quantize(weight, find_grid(weight, W8), W8))
    scales = []
    for i in range(2):
        # exact in bfloat16, large enough that nothing is clipped
        own = [torch.tensor(s) / 64 for s in (([8.0, 10.0], [6.0, 9.0]) if per_head else ([8.0, 8.0], [6.0, 6.0]))]
        scales.append((own[0], own[1]))
        for name, values in zip(("k_scale", "v_scale"), own):
            stored = values.view(-1, 1, 1) if per_head else values[:1]
            weights[f"model.layers.{i}.self_attn.{name}"] = stored.clone()
    save_file({n: t.contiguous() for n, t in weights.items()}, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    section = compressed_tensors.quantization_config(QuantPlan(dict.fromkeys(layers, W8)), "lm_head")
    strategy = "attn_head" if per_head else "tensor"
    section["kv_cache_scheme"] = {**compressed_tensors.KV_CACHE_INT8, "strategy": strategy, **scheme}
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    return target, scales


W8 = QuantScheme(8)


@pytest.mark.parametrize("per_head", [False, True], ids=["tensor", "attn_head"])
def test_a_checkpoints_own_scales_are_used(
    tiny_model: Any, tmp_path: Path, per_head: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Logits are those of transformers with compressed-tensors' numerics on keys and values."""
    pytest.importorskip("compressed_tensors")
    caplog.set_level(logging.INFO, "qtool")
    folder, scales = with_scales(tiny_model(), tmp_path / "q", per_head)
    ids = list(range(3, 90))
    ours = {
        kind: next(iter(LLM(folder, device="cpu", dtype="float32", kv_cache_dtype=kind).prompt_logits([ids])))
        for kind in ("auto", "float", "int8")
    }
    assert "the checkpoint's own scales" in caplog.text
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        plain = model(torch.tensor([ids])).logits[0]
        quantized = model(torch.tensor([ids]), past_key_values=Scaled(scales)).logits[0]
    assert (ours["float"] - plain).abs().max() < 1e-4
    # a key that lies on the edge between two codes may fall to either side
    assert (ours["auto"] - quantized).norm() / quantized.norm() < 1e-3
    assert (ours["auto"] - plain).norm() / plain.norm() > 1e-2, "the scales are coarse: they must show"
    assert (ours["int8"] - plain).norm() < (ours["auto"] - plain).norm()


def change_scales(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("change", ["missing", "zero", "count"])
def test_damaged_scales_are_named(tiny_model: Any, tmp_path: Path, change: str) -> None:
    folder, _ = with_scales(tiny_model(), tmp_path / "q", per_head=False)
    name = "model.layers.1.self_attn.v_scale"
    bad: dict[str, Callable[[dict[str, Tensor]], Any]] = {
        "missing": lambda w: w.pop(name),
        "zero": lambda w: w.update({name: torch.zeros(1)}),
        "count": lambda w: w.update({name: torch.ones(3)}),
    }
    change_scales(folder, bad[change])
    with pytest.raises(QtoolError, match=name):
        LLM(folder, device="cpu")
    LLM(folder, device="cpu", kv_cache_dtype="int8")


@pytest.mark.parametrize(
    "scheme",
    [{"type": "float"}, {"num_bits": 4}, {"symmetric": False}, {"dynamic": True}, {"strategy": "channel"}],
    ids=lambda s: next(iter(s)),
)
def test_schemes_that_cannot_be_served_as_they_are_meant_are_refused(
    tiny_model: Any, tmp_path: Path, scheme: dict[str, Any]
) -> None:
    folder, _ = with_scales(tiny_model(), tmp_path / "q", per_head=False, **scheme)
    with pytest.raises(QtoolError, match=r"kv_cache_scheme .* is not supported; set kv_cache_dtype to int8"):
        LLM(folder, device="cpu")
    for kind in ("int8", "float"):
        LLM(folder, device="cpu", kv_cache_dtype=kind)


def test_other_values_are_refused(tiny_model: Any) -> None:
    with pytest.raises(QtoolError, match="kv_cache_dtype 'fp8' is not supported: use auto, int8, float"):
        LLM(tiny_model(), kv_cache_dtype="fp8")
    with pytest.raises(QtoolError, match="--kv-cache-dtype must be auto, int8 or float, got 'fp8'"):
        check_kv_cache_dtype("fp8")


@pytest.mark.model
@pytest.mark.slow
def test_int8_costs_the_default_model_less_than_a_hundredth_of_a_nat(default_model: Path, shared: Path) -> None:
    base = LLM(default_model, device="cpu", dtype="float32")
    text = text_windows(base.tokenizer, shared / "evalsets/wikitext2_raw_test.txt", windows=2, context=384).tokens
    want = list(base.prompt_logits(text.tolist()))
    del base
    # chunks of 128: three quarters of the tokens read keys and values from blocks written before
    llm = LLM(default_model, device="cpu", dtype="float32", kv_cache_dtype="int8", max_num_batched_tokens=128)
    scores = [token_scores(b[:-1], c[:-1], t[1:]) for b, c, t in zip(want, llm.prompt_logits(text.tolist()), text)]
    kl = torch.cat([s.kl for s in scores]).double()
    assert 1e-6 < kl.mean() < 0.01
