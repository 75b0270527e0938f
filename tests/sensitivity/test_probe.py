"""Every metric against the same quantity computed on the whole model in transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from qtool.quant.algorithms.rtn import rtn
from qtool.quant.calibration import BlockWalker, CalibrationSet
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.scheme import QuantScheme
from qtool.quant.structure import linear_shapes, structure_of
from qtool.sensitivity.candidates import candidate_groups, parse_candidates
from qtool.sensitivity.fisher import fisher_damage
from qtool.sensitivity.probe import analyze
from qtool.sensitivity.record import Sensitivity

SCHEMES = ("fp16", "w8", "w4g32")
BLOCKS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    config = AutoConfig.for_model(
        "llama",
        vocab_size=48,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.15,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    vocab = {f"t{i}": i for i in range(48)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token="t1").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def calibration() -> CalibrationSet:
    tokens = torch.randint(48, (24, 48), generator=torch.Generator().manual_seed(3))
    return CalibrationSet(tokens, "random tokens", "c" * 64)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def run(folder: Path, calibration: CalibrationSet, metric: str) -> Sensitivity:
    return analyze(folder, schemes=SCHEMES, metric=metric, calibration=calibration, device="cpu")


class Quantized:
    """A context in which some linears of the whole model hold their rounded weights."""

    def __init__(self, model: Any, members: tuple[str, ...], scheme: str) -> None:
        self.linears = [model.get_submodule(name) for name in members]
        self.scheme = QuantScheme.parse(scheme)

    def __enter__(self) -> None:
        self.saved = [linear.weight.data for linear in self.linears]
        for linear in self.linears:
            linear.weight.data = rtn(linear.weight.data, self.scheme, search="signed").dequantize()

    def __exit__(self, *_: object) -> None:
        for linear, weight in zip(self.linears, self.saved):
            linear.weight.data = weight


@torch.no_grad()
def measured_kl(model: Any, tokens: torch.Tensor, members: tuple[str, ...], scheme: str) -> float:
    p = model(tokens).logits.double().log_softmax(-1)
    with Quantized(model, members, scheme):
        q = model(tokens).logits.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_kl_is_that_of_the_whole_model(folder: Path, calibration: CalibrationSet, whole: Any) -> None:
    result = run(folder, calibration, "kl")
    assert [g.name for g in result.groups[:5]] == [
        "model.layers.0.qkv",
        "model.layers.0.o",
        "model.layers.0.gate_up",
        "model.layers.0.down",
        "model.layers.1.qkv",
    ]
    variants = sum(len(g.damage) - 1 for g in result.groups)
    assert result.forward_passes == 1 + 8 * (3 + 2 + 1) / BLOCKS  # 8 variants a block, each run from there on
    assert result.forward_passes / variants < 0.75  # (BLOCKS + 1) / (2 * BLOCKS): 0.52 where there are 30
    for group in result.groups:
        assert set(group.damage) == set(SCHEMES)
        assert group.damage["fp16"] == 0
        for scheme in SCHEMES[1:]:
            want = measured_kl(whole, calibration.tokens, group.members, scheme)
            assert group.damage[scheme] == pytest.approx(want, rel=0.02, abs=2e-7)


def test_output_error_is_that_of_the_real_inputs(folder: Path, calibration: CalibrationSet, whole: Any) -> None:
    result = run(folder, calibration, "output")
    inputs: dict[str, torch.Tensor] = {}
    handles = [
        whole.get_submodule(name).register_forward_pre_hook(
            lambda module, args, name=name: inputs.__setitem__(name, args[0].flatten(0, 1))
        )
        for name in result.shapes
    ]
    with torch.no_grad():
        whole(calibration.tokens)
    for handle in handles:
        handle.remove()
    for group in result.groups:
        for scheme in SCHEMES[1:]:
            error = total = 0.0
            for name in group.members:
                weight = whole.get_submodule(name).weight.detach()
                delta = rtn(weight, QuantScheme.parse(scheme), search="signed").dequantize() - weight
                error += float((inputs[name] @ delta.T).square().sum())
                total += float((inputs[name] @ weight.T).square().sum())
            assert group.damage[scheme] == pytest.approx(error / total, rel=1e-3)


def test_weight_error(folder: Path, calibration: CalibrationSet, whole: Any) -> None:
    result = run(folder, calibration, "weight")
    group = result.groups[3]
    weight = whole.get_submodule(group.members[0]).weight.detach()
    delta = rtn(weight, QuantScheme.parse("w4g32"), search="signed").dequantize() - weight
    assert group.damage["w4g32"] == pytest.approx(float(delta.square().sum() / weight.square().sum()), rel=1e-5)
    assert result.weight_error[group.members[0]]["w4g32"] == pytest.approx(group.damage["w4g32"] ** 0.5, rel=1e-5)
    assert result.other_bytes == sum(
        p.numel() * p.element_size()
        for name, p in whole.named_parameters()
        if name.removesuffix(".weight") not in result.shapes
    )


def test_fisher_predicts_the_measured_kl(folder: Path, calibration: CalibrationSet, whole: Any) -> None:
    """Where the theory is exact but for sampling noise (small errors, last MLP), and in rank everywhere."""
    fisher = run(folder, calibration, "fisher")
    assert fisher.forward_passes <= 6
    pairs = []
    for group in fisher.groups:
        want = measured_kl(whole, calibration.tokens, group.members, "w8")
        pairs.append((group.damage["w8"], want))
        if group.block == BLOCKS - 1 and group.kind in ("gate_up", "down"):
            assert group.damage["w8"] == pytest.approx(want, rel=0.25)
    predicted, measured = torch.tensor(pairs, dtype=torch.float64).T
    ranks = torch.stack([predicted.argsort().argsort(), measured.argsort().argsort()]).double()
    assert torch.corrcoef(ranks)[0, 1] > 0.8


def test_groups_that_do_not_divide_are_fitted(folder: Path, calibration: CalibrationSet) -> None:
    result = analyze(folder, schemes=["w4g64", "w4g128"], metric="weight", calibration=calibration, device="cpu")
    assert set(result.groups[0].damage) == {"w4g64"}  # 64 inputs
    assert set(result.groups[3].damage) == {"w4g32"}  # 96 inputs


def test_same_inputs_same_file(folder: Path, calibration: CalibrationSet, tmp_path: Path) -> None:
    first, second = (run(folder, calibration, "fisher").to_json() for _ in range(2))
    assert first == second
    (tmp_path / "s.json").write_text(first)
    assert Sensitivity.load(tmp_path / "s.json").to_json() == first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "hessian"}, "metric 'hessian' is not known: use one of fisher, kl, output, weight"),
        ({"schemes": ["w4g64"]}, "name at least two"),
        ({"schemes": ["fp16", "bf16"]}, "name at least two"),
        ({"schemes": ["fp16", "w3"]}, "3 bits per weight is not supported"),
        ({"schemes": ["fp16", "w8a8"]}, "only weights are measured"),
        ({"device": "tpu"}, "device 'tpu' is not known"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not on this machine"),
    ],
)
def test_bad_requests_are_refused(folder: Path, calibration: CalibrationSet, options: Any, message: str) -> None:
    with pytest.raises(QtoolError, match=message):
        analyze(folder, calibration=calibration, **options)


def test_infinite_weights_are_named(folder: Path, calibration: CalibrationSet) -> None:
    with Checkpoint(folder) as checkpoint:
        walker = BlockWalker(checkpoint, calibration.tokens)
        groups = candidate_groups(
            structure_of(checkpoint.config), linear_shapes(checkpoint), parse_candidates(["fp16", "w8"])
        )
        real = checkpoint.tensor

        def broken(name: str) -> torch.Tensor:
            tensor = real(name)
            if name == "model.layers.1.mlp.up_proj.weight":
                tensor = tensor.clone()
                tensor[0, 0] = torch.inf
            return tensor

        checkpoint.tensor = broken  # type: ignore[method-assign]
        with pytest.raises(QtoolError, match=r"model.layers.1.* NaN or infinite"):
            fisher_damage(walker, groups, lambda *_: None)


def test_a_model_with_nan_is_refused_by_tensor_name(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """A norm's NaN reaches every activation; the metrics would all be NaN."""
    shutil.copytree(tiny_model(), tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QtoolError, match=r"model\.norm\.weight holds 1 NaN"):
        analyze(tmp_path / "m")
