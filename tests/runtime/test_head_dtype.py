"""A head served in int8: its product against float64, tied and untied, beside a head that is quantized already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qtool.cli.engine_options import check_head_dtype
from qtool.evalsets.metrics import token_scores
from qtool.evalsets.windows import text_windows
from qtool.quant.errors import QtoolError
from qtool.quant.pipeline import quantize
from qtool.quant.scheme import QuantScheme
from qtool.runtime.kernels.interface import QuantLinear
from qtool.runtime.llm import LLM
from qtool.runtime.loader import int8_head
from qtool.runtime.models.layers import DenseLinear

IDS = list(range(1, 60))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def half_steps(weight: Tensor, x: Tensor) -> Tensor:
    """float64 [tokens, rows]: what rounding each weight to one of 255 multiples of its row's step can do at most. The
    step is rounded to 8 bits itself, so that the largest weight may miss its code by 1/256 of itself."""
    largest = weight.double().abs().amax(dim=1)
    return x.double().abs().sum(dim=1, keepdim=True) * largest * (0.5 / 127 + 2**-8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
def test_logits_are_within_half_a_step_of_every_weight(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(2)
    weight = (torch.randn(9000, 128) * torch.rand(9000, 1) * 0.2).to(dtype)  # more rows than are rounded at a time
    before = weight.clone()
    head = int8_head(weight, dtype, torch.device(device))
    assert isinstance(head, QuantLinear)
    assert head.spec.scheme == QuantScheme(8)
    assert sum(t.nbytes for t in head.packed) < 1.1 * weight.numel()
    assert torch.equal(weight, before)
    for count in (1, 5, 70):
        x = torch.randn(count, 128).to(dtype)
        want = x.double() @ weight.double().T
        error = (head(x.to(device)).cpu().double() - want).abs()
        rounding = want.abs() * 2.0 ** (-8 if dtype == torch.bfloat16 else -11)  # of the result
        if device == "cpu":  # and of a scale, for the CPU's kernel
            rounding += 2.0**-8 * x.double().abs() @ weight.double().abs().T
        assert bool((error <= half_steps(weight, x) + rounding).all())
        typical = float((x.double().norm(dim=1).mean() * weight.double().abs().amax(dim=1).mean()) / 127 / 12**0.5)
        assert float(error.pow(2).mean().sqrt()) < 1.5 * typical + float(rounding.pow(2).mean().sqrt())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_an_engine_serves_its_head_in_int8(tiny_model: Any, tied: bool) -> None:
    folder = tiny_model(tie_word_embeddings=tied)
    base, llm = (LLM(folder, device="cpu", dtype="float32", head_dtype=d) for d in ("auto", "int8"))
    assert isinstance(base.engine.runner.model.head, DenseLinear)
    head = llm.engine.runner.model.head
    assert isinstance(head, QuantLinear)
    assert head.spec.scheme.name == "w8"
    assert torch.equal(base.engine.runner.model.embed, llm.engine.runner.model.embed)
    (want,), (found,) = (list(m.prompt_logits([IDS])) for m in (base, llm))
    error = float((found - want).norm() / want.norm())
    assert 1e-4 < error < 0.01


def test_a_quantized_head_stays_as_it_is(tiny_model: Any, tmp_path: Path) -> None:
    w4 = QuantScheme(4, 32)
    quantize(tiny_model(), tmp_path / "out", scheme=w4, head=w4, method="rtn")
    found = [LLM(tmp_path / "out", device="cpu", dtype="float32", head_dtype=d) for d in ("auto", "int8")]
    assert [m.engine.runner.model.head.spec.scheme for m in found] == [w4, w4]  # type: ignore[attr-defined]
    assert torch.equal(*(next(iter(m.prompt_logits([IDS]))) for m in found))


def test_other_dtypes_are_refused(tiny_model: Any) -> None:
    with pytest.raises(QtoolError, match="head_dtype 'int4' is not supported: use auto, int8"):
        LLM(tiny_model(), head_dtype="int4")
    with pytest.raises(QtoolError, match="--head-dtype must be auto or int8, got 'int4'"):
        check_head_dtype("int4")


@pytest.mark.model
@pytest.mark.slow
def test_it_costs_the_default_model_less_than_two_thousandths_of_a_nat(default_model: Path, shared: Path) -> None:
    models = [LLM(default_model, device="cpu", dtype="float32", head_dtype=d) for d in ("auto", "int8")]
    text = text_windows(models[0].tokenizer, shared / "evalsets/wikitext2_raw_test.txt", windows=2, context=256).tokens
    want, found = (list(m.prompt_logits(text.tolist())) for m in models)
    kl = torch.cat([token_scores(b[:-1], c[:-1], t[1:]).kl for b, c, t in zip(want, found, text)]).double()
    assert 1e-7 < kl.mean() < 2e-3
    assert float(functional.cosine_similarity(want[0], found[0], dim=-1).min()) > 0.999
