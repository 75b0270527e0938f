"""SmoothQuant: the published formula, no change of the float function, and W8A8 artifacts closer to the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from qtool.quant.algorithms.awq import absorb_into_norm
from qtool.quant.algorithms.hessian import Hessian, invert
from qtool.quant.algorithms.rows import row_errors
from qtool.quant.algorithms.rtn import rtn
from qtool.quant.algorithms.smoothquant import smoothing_scale
from qtool.quant.blockwise import Settings, round_weight
from qtool.quant.calibration import BlockWalker, CalibrationSet
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.pipeline import quantize
from qtool.quant.scheme import QuantPlan, QuantScheme
from qtool.quant.smoothing import smooth_channels
from qtool.quant.structure import linear_shapes, structure_of

W8A8 = QuantScheme(8, act_bits=8)
TOKENS = torch.randint(1, 300, (4, 32), generator=torch.Generator().manual_seed(0))
CALIBRATION = CalibrationSet(TOKENS, "random tokens", "5" * 64)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_scales_follow_the_formula_up_to_a_common_factor(alpha: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, 12, generator=generator) for n in (5, 3)]
    x_max = torch.rand(12, generator=generator) * 10
    w_max = torch.cat(weights).abs().amax(0)
    found, want = smoothing_scale(x_max, weights, alpha), x_max**alpha / w_max ** (1 - alpha)
    torch.testing.assert_close(found / found[0], want / want[0])
    torch.testing.assert_close(found.amax() * found.amin(), torch.tensor(1.0))


def test_at_one_all_channels_of_the_activations_become_alike() -> None:
    x_max, weight = torch.tensor([1.0, 50.0, 0.01]), torch.ones(2, 3)
    scaled = x_max / smoothing_scale(x_max, [weight], alpha=1.0)
    torch.testing.assert_close(scaled, scaled[:1].expand(3))


def test_channels_without_activations_or_weights_keep_theirs() -> None:
    weight = torch.ones(2, 4)
    weight[:, 1] = 0
    scale = smoothing_scale(torch.tensor([0.0, 3.0, 2.0, 8.0]), [weight])
    assert scale[:2].tolist() == [1.0, 1.0]
    assert bool((smoothing_scale(torch.zeros(4), [weight]) == 1).all())


@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("qwen2", {}), ("qwen3", {}), ("mistral", {})])
def test_smoothing_changes_no_float_output(tiny_model: Any, family: str, changes: dict[str, Any]) -> None:
    with Checkpoint(tiny_model(family, **changes)) as checkpoint:
        structure = structure_of(checkpoint.config)
        plan: dict[str, QuantScheme | None] = dict.fromkeys(linear_shapes(checkpoint), W8A8)
        for block in BlockWalker(checkpoint, TOKENS):
            before = block.run(block.inputs[0])
            weights = {name: linear.weight.data.clone() for name, linear in block.linears.items()}
            peaks = input_peaks(block)
            done = smooth_channels(block, structure, plan, alpha=0.5, head_dim=16, dtype=torch.bfloat16)
            torch.testing.assert_close(block.run(block.inputs[0]), before, rtol=1e-4, atol=1e-4)
            # the two groups that a norm feeds, and no other
            moved = {n.rpartition(".")[2] for n, w in weights.items() if not torch.equal(block.linears[n].weight, w)}
            assert moved == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
            assert set(done.changed) == {
                f"{block.name}.input_layernorm.weight",
                f"{block.name}.post_attention_layernorm.weight",
            }
            after = input_peaks(block)
            assert after["q_proj"] < peaks["q_proj"]


def input_peaks(block: Any) -> dict[str, float]:
    """How far the largest channel of each linear's input stands out from the median one."""
    found: dict[str, float] = {}

    def observe(name: str, x: torch.Tensor) -> None:
        largest = x.abs().amax(0)
        found[name.rpartition(".")[2]] = float(largest.max() / largest.median())

    block.capture(block.linears, observe)
    return found


def test_layers_without_quantized_activations_are_left_alone(tiny_model: Any) -> None:
    with Checkpoint(tiny_model()) as checkpoint:
        structure = structure_of(checkpoint.config)
        plan: dict[str, QuantScheme | None] = dict.fromkeys(linear_shapes(checkpoint), W8A8)
        plan |= {n: QuantScheme(8) for n in plan if "gate" in n or "up" in n}
        block = next(iter(BlockWalker(checkpoint, TOKENS)))
        done = smooth_channels(block, structure, plan, alpha=0.5, head_dim=16, dtype=torch.bfloat16)
    assert set(done.changed) == {"model.layers.0.input_layernorm.weight"}


def with_outliers(folder: Path, target: Path) -> Path:
    """The model with two channels of every norm thirty times as large, and what reads them as much smaller."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for norm, linears in (
                (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                norm.weight[3:5] *= 30
                for linear in linears:
                    linear.weight[:, 3:5] /= 30
    model.save_pretrained(target)
    return target


def served(artifact: Path) -> torch.Tensor:
    """Logits of transformers with compressed-tensors, activations quantized."""
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(artifact, dtype=torch.float32)(TOKENS).logits


def test_smoothing_makes_8_bit_activations_bearable(tiny_model: Any, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    source = with_outliers(tiny_model(), tmp_path / "source")
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(TOKENS).logits
    errors = {}
    for method in ("rtn", "gptq", "smoothquant", "smoothquant+gptq", "smoothquant+rounding"):
        quantize(source, tmp_path / method, scheme=W8A8, method=method, calibration=CALIBRATION)
        errors[method] = float((served(tmp_path / method) - base).norm() / base.norm())
    assert errors["smoothquant"] < 0.4 * errors["rtn"]
    assert errors["smoothquant+gptq"] < 0.4 * errors["gptq"]
    assert errors["smoothquant+gptq"] < 1.1 * errors["smoothquant"]
    assert errors["smoothquant+rounding"] < 1.1 * errors["smoothquant"]
    record = json.loads((tmp_path / "smoothquant" / "qtool.json").read_text())
    assert record["alpha"] == 0.5
    section = json.loads((tmp_path / "smoothquant" / "config.json").read_text())["quantization_config"]
    assert section["format"] == "int-quantized"
    assert section["config_groups"]["group_0"]["input_activations"]["dynamic"] is True


def test_a_mix_of_quantized_and_16_bit_activations(tiny_model: Any, tmp_path: Path) -> None:
    folder = tiny_model()
    with Checkpoint(folder) as checkpoint:
        plan = QuantPlan({n: W8A8 if "self_attn" in n else QuantScheme(8, 32) for n in linear_shapes(checkpoint)})
    report = quantize(folder, tmp_path / "out", plan=plan, method="smoothquant+gptq", calibration=CALIBRATION)
    assert {r.scheme for r in report.layers.values()} == {"w8a8", "w8g32"}


@settings(max_examples=60, deadline=None)
@given(
    inputs=st.sampled_from(["plain", "few", "dead", "zero", "repeated", "outlier"]),
    weights=st.sampled_from(["plain", "dead", "zero", "outlier"]),
    exponent=st.integers(-15, 15),
    alpha=st.floats(0, 1),
    compensate=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_smoothed_weights_keep_the_function_and_are_rounded_no_worse_than_plainly(
    inputs: str,
    weights: str,
    exponent: int,
    alpha: float,
    compensate: bool,
    seed: int,
    hard_inputs: Callable[..., torch.Tensor],
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 24, generator=generator) * 10.0**exponent
    x = hard_inputs(inputs, 10.0 ** (exponent / 3), generator)
    if weights == "dead":
        weight[:, 1::2] = 0
    elif weights == "zero":
        weight = weight * 0
    elif weights == "outlier":
        weight[:, 7] *= 1e3
    scale = smoothing_scale(x.abs().amax(0), [weight], alpha)
    assert bool((torch.isfinite(scale) & (scale > 0)).all())
    gain = torch.rand(24, generator=generator) + 0.5  # of the norm that x has been through
    stored, effective = absorb_into_norm(gain, scale, 0.0, torch.bfloat16)
    smooth_x, smooth_weight = x / gain * stored.float(), weight * effective
    product, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    got = smooth_x.double() @ smooth_weight.double().T
    assert bool(((got - product).abs() <= 1e-5 * size + 1e-300).all())
    running = Hessian(24)
    running.add(smooth_x)
    hessian = running.matrix()
    factor = invert(hessian) if compensate else None
    chosen = Settings(method="smoothquant+gptq", grid="mse", scale_dtype=torch.bfloat16)
    values = round_weight(smooth_weight, W8A8, hessian, factor, chosen).weight.dequantize()
    assert bool(torch.isfinite(values).all())
    plain = rtn(smooth_weight, W8A8).dequantize()
    ours, baseline = row_errors(smooth_weight - values, hessian), row_errors(smooth_weight - plain, hessian)
    assert bool((ours <= baseline * (1 + 1e-6)).all())


@pytest.mark.parametrize("power", [-60, 0, 60])
def test_errors_of_huge_and_tiny_weights_are_those_of_middling_ones(power: int) -> None:
    generator = torch.Generator().manual_seed(0)
    delta, x = torch.randn(7, 24, generator=generator), torch.randn(50, 24, generator=generator)
    hessian = x.T @ x
    plain = ((delta @ hessian) * delta).sum(-1, dtype=torch.float64)  # what float32 gives where nothing overflows
    assert torch.equal(row_errors(delta * 2.0**power, hessian), plain * 4.0**power)
    assert bool((row_errors(delta * 0, hessian) == 0).all())
