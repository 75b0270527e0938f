"""Rotations: orthogonal at every size, no change of any family's function, and artifacts that other loaders open."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from qtool.quant.algorithms.hessian import Hessian, invert
from qtool.quant.algorithms.rotation import hadamard, hartley, random_rotation, rotate_weight
from qtool.quant.algorithms.rows import row_errors
from qtool.quant.algorithms.rtn import rtn
from qtool.quant.blockwise import Settings, round_weight
from qtool.quant.calibration import CalibrationSet
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.formats import open_reader
from qtool.quant.pipeline import quantize
from qtool.quant.scheme import QuantScheme
from qtool.quant.structure import linear_shapes, structure_of
from qtool.quant.views import RotatedWeights, rotated, untied

TOKENS = torch.randint(1, 300, (4, 32), generator=torch.Generator().manual_seed(0))
CALIBRATION = CalibrationSet(TOKENS, "random tokens", "2" * 64)
W4 = QuantScheme(4, 32)


def matrix(size: int, seed: int = 0) -> torch.Tensor:
    return random_rotation(size, seed).apply(torch.eye(size))


@pytest.mark.parametrize("size", [1, 2, 5, 9, 12, 28, 64, 100, 576, 896])
def test_rotations_are_orthogonal_and_flat(size: int) -> None:
    found = matrix(size)
    torch.testing.assert_close(found @ found.T, torch.eye(size, dtype=torch.float64), rtol=0.0, atol=1e-12)
    assert float(found.abs().max()) <= (2 / size) ** 0.5 + 1e-12
    if size & (size - 1) == 0:  # a true Hadamard matrix
        torch.testing.assert_close(found.abs(), torch.full_like(found, size**-0.5), rtol=1e-12, atol=0.0)


def test_factors_are_the_matrices_of_their_names() -> None:
    from scipy.linalg import dft
    from scipy.linalg import hadamard as sylvester

    assert torch.equal(hadamard(16) * 4, torch.tensor(sylvester(16), dtype=torch.float64))
    fourier = torch.tensor(dft(9, scale="sqrtn"))
    torch.testing.assert_close(hartley(9), fourier.real - fourier.imag, rtol=0.0, atol=1e-12)
    whole = torch.kron(torch.kron(hadamard(8), hadamard(8)), hartley(9))
    rotation = random_rotation(576, 3)
    torch.testing.assert_close(matrix(576, 3), rotation.signs[:, None] * whole, rtol=0.0, atol=1e-12)


def test_seeds_tell_rotations_apart() -> None:
    assert torch.equal(matrix(36, 1), matrix(36, 1))
    assert not torch.equal(matrix(36, 1), matrix(36, 2))


def test_weights_are_rotated_in_bounded_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qtool.quant.algorithms.rotation._CHUNK", 100)
    generator = torch.Generator().manual_seed(0)
    weight, gain = torch.randn(40, 24, generator=generator), torch.randn(24, generator=generator)
    found = rotate_weight(weight, gain=gain, inputs=random_rotation(12, 0), outputs=random_rotation(20, 1))
    per_head = torch.block_diag(matrix(12, 0), matrix(12, 0))
    out = torch.block_diag(matrix(20, 1), matrix(20, 1))
    torch.testing.assert_close(
        found, (out.T @ (weight.double() * gain.double()) @ per_head).float(), rtol=1e-5, atol=1e-5
    )


def logits(config: Any, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """float64 logits of transformers' model with these weights."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    model.load_state_dict(state)
    with torch.no_grad():
        return model(TOKENS).logits


FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"hidden_size": 72, "num_attention_heads": 6, "head_dim": 12, "intermediate_size": 100}),
    ("mistral", {"sliding_window": 8}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "hidden_size": 56, "num_attention_heads": 4}),
    ("qwen3", {"head_dim": 32}),
]


@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_a_rotated_model_is_the_same_function(tiny_model: Any, family: str, changes: dict[str, Any]) -> None:
    folder = tiny_model(family, **changes)
    with Checkpoint(folder) as checkpoint:
        weights = untied(checkpoint, structure_of(checkpoint.config))
        structure = structure_of(weights.config)
        hidden, heads = checkpoint.config["hidden_size"], checkpoint.config["num_attention_heads"]
        turned = rotated(
            weights, structure, head_dim=checkpoint.config.get("head_dim") or hidden // heads, seed=7, exact=()
        )
        plain = {name: weights.tensor(name).double() for name in weights.names()}
        other = {name: turned.tensor(name).double() for name in turned.names()}
        assert {n: t.shape for n, t in other.items()} == {n: t.shape for n, t in plain.items()}
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = False
    want, got = logits(config, plain), logits(config, other)
    assert float((got - want).norm() / want.norm()) < 1e-5
    assert bool((other["model.norm.weight"] == 1).all())
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.1.self_attn.v_proj.weight"):
        assert float((other[name] - plain[name]).norm() / plain[name].norm()) > 0.5  # not the identity


def test_norms_that_add_one_are_folded_with_it(tiny_model: Any) -> None:
    """The same gains stored as gain − 1 give the same linears, and zeros for the norms."""

    class ShiftedNorms(Checkpoint):
        def tensor(self, name: str) -> torch.Tensor:
            found = super().tensor(name)
            return found - 1 if name.endswith("norm.weight") else found

    with Checkpoint(tiny_model()) as plain, ShiftedNorms(tiny_model()) as shifted:
        structure = structure_of(plain.config)
        first = rotated(plain, structure, head_dim=16, seed=0, exact=())
        second = rotated(shifted, replace(structure, norm_offset=1.0), head_dim=16, seed=0, exact=())
        for name in plain.names():
            if name.endswith("norm.weight"):
                assert bool((second.tensor(name) == 0).all())
            else:
                torch.testing.assert_close(second.tensor(name), first.tensor(name), rtol=1e-5, atol=1e-6)


def test_outlier_channels_are_spread() -> None:
    x = torch.randn(50, 576, generator=torch.Generator().manual_seed(0))
    x[:, 17] *= 100
    turned = random_rotation(576, 0).apply(x)
    peak = x.abs().amax(1) / x.norm(dim=1)
    assert float((turned.abs().amax(1) / turned.norm(dim=1)).mean()) < 0.15 * float(peak.mean())


def test_a_tied_head_is_refused_or_untied(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(QtoolError, match="this head is the embedding itself: pass --untie"):
        quantize(tiny_llama, tmp_path / "out", scheme=W4, method="rotation+rtn")
    assert not list(tmp_path.glob("*out*"))
    report = quantize(tiny_llama, tmp_path / "out", scheme=W4, method="rotation+rtn", untie=True)
    assert any("the head is untied" in note for note in report.notes)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["lm_head.weight"].dtype == stored["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert not torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
    assert bool((stored["model.layers.0.input_layernorm.weight"] == 1).all())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    record = json.loads((tmp_path / "out" / "qtool.json").read_text())
    assert record["untied"] is True
    assert record["method"] == "rotation+rtn"


def test_untying_alone_stores_the_same_head_twice(tiny_llama: Path, tmp_path: Path) -> None:
    quantize(tiny_llama, tmp_path / "out", scheme=W4, method="rtn", untie=True)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])


@pytest.mark.parametrize("method", ["rotation+rtn", "rotation+gptq", "rotation+awq+gptq", "rotation+rounding"])
def test_a_rotated_artifact_opens_in_transformers(tiny_llama: Path, tmp_path: Path, method: str) -> None:
    """Its logits there are those of its dequantized weights, and near the model's own: nothing is left unrotated."""
    pytest.importorskip("compressed_tensors")
    tokens = TOKENS % 128
    calibration = CalibrationSet(tokens, "random tokens", "3" * 64)
    out = tmp_path / "out"
    scheme = QuantScheme(8, 32)
    quantize(tiny_llama, out, scheme=scheme, method=method, calibration=calibration, untie=True, seed=4)
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    config = AutoConfig.from_pretrained(out)
    del config.quantization_config
    ours = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with Checkpoint(out) as checkpoint:
        reader = open_reader(checkpoint)
        assert reader is not None
        state = {n: checkpoint.tensor(n).float() for n in ours.state_dict() if n in checkpoint}
        state |= {f"{layer}.weight": reader.read(layer).dequantize() for layer in linear_shapes(checkpoint)}
    ours.load_state_dict(state)
    with torch.no_grad():
        want, a, b = base(tokens).logits, ours(tokens).logits, theirs(tokens).logits
    torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-3 * float(a.abs().max()))
    assert float((a - want).norm() / want.norm()) < 0.15  # plain rounding without a rotation: 0.07


def test_a_resumed_rotation_gives_the_same_bytes(tiny_llama: Path, tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def kill(what: str, done: int, total: int) -> None:
        if what.startswith("quantize"):
            raise Killed

    def run(name: str, **more: Any) -> None:
        calibration = CalibrationSet(TOKENS % 128, "random tokens", "4" * 64)
        quantize(
            tiny_llama, tmp_path / name, scheme=W4, method="rotation+gptq", calibration=calibration, untie=True, **more
        )

    run("whole")
    with pytest.raises(Killed):
        run("resumed", progress=kill)
    run("resumed")
    for path in sorted((tmp_path / "whole").iterdir()):
        if path.name != "qtool_run.json":  # times
            assert path.read_bytes() == (tmp_path / "resumed" / path.name).read_bytes(), path.name


def test_sixteen_bit_layers_are_rotated_too(tiny_model: Any) -> None:
    with Checkpoint(tiny_model()) as checkpoint:
        exact = {"model.layers.0.mlp.up_proj.weight"}
        half = RotatedWeights(
            HalfWeights(tiny_model()),
            structure_of(checkpoint.config),
            random_rotation(64, 0),
            random_rotation(16, 1),
            frozenset(exact),
        )
        assert half.tensor("model.layers.0.mlp.up_proj.weight").dtype == torch.float32
        stored = half.tensor("model.layers.0.mlp.down_proj.weight")
        assert stored.dtype == torch.bfloat16
        want = matrix(64).T @ checkpoint.tensor("model.layers.0.mlp.down_proj.weight").bfloat16().double()
        assert torch.equal(stored, want.float().bfloat16())


class HalfWeights(Checkpoint):
    def tensor(self, name: str) -> torch.Tensor:
        return super().tensor(name).bfloat16()


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["w4g8", "w4g8-asym", "w4", "w8"]),
    inputs=st.sampled_from(["plain", "few", "dead", "zero", "repeated", "outlier"]),
    exponent=st.integers(-12, 12),
    compensate=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_rotated_weights_are_rounded_no_worse_than_plainly(
    name: str, inputs: str, exponent: int, compensate: bool, seed: int, hard_inputs: Callable[..., torch.Tensor]
) -> None:
    scheme = QuantScheme.parse(name)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 24, generator=generator) * 10.0**exponent
    x = hard_inputs(inputs, 10.0 ** (exponent / 2), generator)
    rotation = random_rotation(24, seed)
    turned, x_turned = rotate_weight(weight, inputs=rotation), rotation.apply(x).float()
    product = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T  # of what the sums add up
    assert bool(((x_turned.double() @ turned.double().T - product).abs() <= 1e-5 * size.amax() + 1e-300).all())
    running = Hessian(24)
    running.add(x_turned)
    hessian = running.matrix()
    factor = invert(hessian) if compensate else None
    chosen = Settings(method="rotation+gptq", grid="mse", scale_dtype=torch.bfloat16)
    values = round_weight(turned, scheme, hessian, factor, chosen).weight.dequantize()
    assert bool(torch.isfinite(values).all())
    plain = rtn(turned, scheme).dequantize()
    ours, baseline = row_errors(turned - values, hessian), row_errors(turned - plain, hessian)
    assert bool((ours <= baseline * (1 + 1e-6)).all())
