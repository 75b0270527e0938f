"""Quantized checkpoints in the runtime: what the peers' own loaders computed, and mixes inside a fused group."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qtool.quant.errors import QtoolError
from qtool.quant.formats import writer
from qtool.quant.numerics import find_grid, quantize
from qtool.quant.scheme import QuantPlan, QuantScheme
from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.llm import LLM

FIXTURES = [
    "autoawq-w4g128-gemm", "autoawq-w4g64-gemm", "autogptq-w4g64-sym", "autogptq-w4g128-asym",
    "autogptq-w4g64-asym-descact", "autogptq-w8g128-sym", "gptqmodel-w4g64-sym-v2", "gptqmodel-w8g128-asym",
    "llmcompressor-w4a16-g64-asym-gptq", "llmcompressor-w4a16-g64-sym-actweight", "llmcompressor-w8a16-g128-sym-gptq",
]  # fmt: skip


@pytest.mark.parametrize("name", FIXTURES)
def test_logits_are_those_of_the_peer(shared: Path, tmp_path: Path, name: str) -> None:
    source = shared / "fixtures" / name
    folder = tmp_path / "model"
    folder.mkdir()
    for file in source.iterdir():
        if file.name != "reference_logits.safetensors":
            shutil.copy(file, folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shared / "fixtures" / "source" / file, folder)
    with safe_open(source / "reference_logits.safetensors", "pt") as handle:
        ids, want = handle.get_tensor("input_ids").tolist(), handle.get_tensor("logits")
    exact = LLM(folder, device="cpu", dtype="float32")
    for got, reference in zip(exact.prompt_logits(ids), want, strict=True):
        assert (got - reference).norm() / reference.norm() < 2e-3  # some peers dequantize in float16
    packed = LLM(folder, device="cpu")
    assert packed.engine.dtype == torch.bfloat16
    for got, reference in zip(packed.prompt_logits(ids), want, strict=True):
        assert torch.nn.functional.cosine_similarity(got, reference, dim=-1).min() > 0.995


def test_quantized_activations_are_those_of_the_peer(shared: Path, tmp_path: Path) -> None:
    """W8A8 against transformers with compressed-tensors. The two sum in another order; where an activation then lies on
    the other side of a half, its code is another one, which makes a third of what quantizing activations does here."""
    pytest.importorskip("compressed_tensors")
    folder = tmp_path / "model"
    source = shared / "fixtures" / "llmcompressor-w8a8-int8-gptq"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("reference_logits.safetensors"))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shared / "fixtures" / "source" / file, folder)
    with safe_open(source / "reference_logits.safetensors", "pt") as handle:
        ids, weight_only = handle.get_tensor("input_ids"), handle.get_tensor("logits")
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
    ours = torch.stack(list(LLM(folder, device="cpu", dtype="float32").prompt_logits(ids.tolist())))
    assert (ours - theirs).norm() / theirs.norm() < 8e-3
    assert (weight_only - theirs).norm() / theirs.norm() > 1.2e-2  # of a runtime that left activations as they are
    packed = torch.stack(list(LLM(folder, device="cpu").prompt_logits(ids.tolist())))
    assert torch.nn.functional.cosine_similarity(packed, theirs, dim=-1).min() > 0.995


def quantized_copy(folder: Path, target: Path, plan: dict[str, QuantScheme | None]) -> dict[str, torch.Tensor]:
    """Write `folder` quantized by `plan` (layer of a block → scheme) to `target`; returns the dequantized weights."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    layers = [n.removesuffix(".weight") for n in weights if n.endswith("_proj.weight")]
    full = QuantPlan({n: plan[n.rsplit(".", 1)[1]] for n in layers})
    form = writer("compressed-tensors")
    dense = dict(weights)
    for layer in layers:
        scheme = full[layer]
        if scheme is not None:
            weight = weights.pop(f"{layer}.weight")
            quantized = quantize(weight, find_grid(weight, scheme), scheme)
            dense[f"{layer}.weight"] = quantized.dequantize()
            weights |= form.tensors(layer, quantized)
    save_file({n: t.contiguous() for n, t in weights.items()}, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = form.quantization_config(full, "lm_head")
    (target / "config.json").write_text(json.dumps(config))
    return dense


W4, W8 = QuantScheme(4, 32), QuantScheme(8)
PLANS: dict[str, dict[str, QuantScheme | None]] = {
    "int4": dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), W4),
    "int8": dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), W8),
    "mixed inside the fused groups": {
        "q_proj": W4, "k_proj": W8, "v_proj": None, "o_proj": W4, "gate_proj": W8, "up_proj": W4, "down_proj": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_our_artifact_runs_as_its_dequantized_weights(tiny_model: Any, tmp_path: Path, name: str, family: str) -> None:
    folder = tiny_model(family)
    dense = quantized_copy(folder, tmp_path / "q", PLANS[name])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(dense)
    ids = list(range(3, 43))
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
        greedy = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)[0, 40:]
    llm = LLM(tmp_path / "q", device="cpu", dtype="float32")
    assert (next(llm.prompt_logits([ids])) - want).abs().max() < 1e-3
    (output,) = llm.generate([ids], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    assert list(output.outputs[0].token_ids) == greedy.tolist()
    packed = next(LLM(tmp_path / "q", device="cpu").prompt_logits([ids]))
    assert torch.nn.functional.cosine_similarity(packed, want, dim=-1).min() > 0.99


def test_weights_stay_packed(tiny_model: Any, tmp_path: Path) -> None:
    quantized_copy(tiny_model(), tmp_path / "q", PLANS["int4"])
    for dtype in ("float32", "bfloat16"):
        decoder = LLM(tmp_path / "q", device="cpu", dtype=dtype).engine.runner.model
        for layer in decoder.layers:
            for linear, elements in ((layer.qkv, 128 * 64), (layer.gate_up, 256 * 64), (layer.down, 64 * 128)):
                codes = linear.packed[0]  # type: ignore[attr-defined]
                assert codes.numel() * codes.element_size() == elements // 2


LAYER = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("weight_packed", lambda t: t.float()),  # whose bytes would pass for codes
        ("weight_packed", lambda t: t[:-1]),
        ("weight_packed", lambda t: t.flatten()),
        ("weight_scale", lambda t: t.flatten()[:-3]),
        ("weight_scale", lambda t: t * float("nan")),
        ("weight_shape", lambda t: t[:1]),
        ("weight_g_idx", lambda t: torch.zeros(1, 64, dtype=torch.int32)),
        ("weight_g_idx", lambda t: torch.zeros(0, dtype=torch.int32)),
    ],
)
def test_a_damaged_layer_is_named(tiny_model: Any, tmp_path: Path, part: str, change: Any) -> None:
    quantized_copy(tiny_model(), tmp_path / "q", PLANS["int4"])
    weights = load_file(tmp_path / "q" / "model.safetensors")
    name = f"{LAYER}.{part}"
    weights[name] = change(weights.get(name)).contiguous()
    save_file(weights, tmp_path / "q" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QtoolError, match=LAYER):
        LLM(tmp_path / "q", device="cpu")


@pytest.mark.parametrize(
    "section",
    [
        {"config_groups": {"group_0": None}},
        {"config_groups": {"group_0": {"targets": None, "weights": {"strategy": "channel", "num_bits": 4}}}},
        {"config_groups": {"group_0": {"targets": ["re:("], "weights": {"strategy": "channel", "num_bits": 4}}}},
        {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"strategy": "group", "num_bits": 4}}}},
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": ["q_proj"]},
    ],
)
def test_a_damaged_quantization_config_is_one_line(tiny_model: Any, tmp_path: Path, section: dict[str, Any]) -> None:
    quantized_copy(tiny_model(), tmp_path / "q", PLANS["int4"])
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    config["quantization_config"] |= section
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    with pytest.raises(QtoolError) as refusal:
        LLM(tmp_path / "q", device="cpu")
    assert str(tmp_path / "q") in str(refusal.value)
    assert "\n" not in str(refusal.value)
