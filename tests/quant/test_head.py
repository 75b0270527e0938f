"""A quantized head: refused where it is the embedding, stored and read by every loader where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from qtool.cli.main import run
from qtool.quant.calibration import CalibrationSet
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.formats import open_reader
from qtool.quant.numerics import find_grid
from qtool.quant.numerics import quantize as round_to
from qtool.quant.pipeline import quantize
from qtool.quant.scheme import QuantPlan, QuantScheme, uniform_plan
from qtool.quant.structure import linear_shapes
from qtool.runtime.llm import LLM

TOKENS = torch.randint(1, 300, (4, 32), generator=torch.Generator().manual_seed(0))
CALIBRATION = CalibrationSet(TOKENS, "random tokens", "6" * 64)
W4, W8 = QuantScheme(4, 32), QuantScheme(8)


def plan_with(folder: Path, **more: QuantScheme | None) -> QuantPlan:
    with Checkpoint(folder) as checkpoint:
        plan, _ = uniform_plan(linear_shapes(checkpoint), W4)
    return QuantPlan({**plan.layers, **more})


def test_a_tied_head_is_refused_with_the_reason(tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(QtoolError, match="quantizes lm_head, which is the embedding itself: pass --untie"):
        quantize(tiny_llama, out, plan=plan_with(tiny_llama, lm_head=W8), method="rtn")
    with pytest.raises(QtoolError, match="which is the embedding itself"):
        quantize(tiny_llama, out, scheme=W4, head=W8, method="rtn")
    table = {"model.embed_tokens": W8}
    with pytest.raises(QtoolError, match=r"quantizes model\.embed_tokens: an embedding is looked up"):
        quantize(tiny_llama, out, plan=plan_with(tiny_llama, **table), method="rtn", untie=True)
    with pytest.raises(QtoolError, match="not written in the gptq format"):
        quantize(tiny_llama, out, scheme=W4, head=W4, method="rtn", untie=True, format="gptq")
    with pytest.raises(QtoolError, match="group size 128 does not divide"):
        quantize(tiny_llama, out, scheme=W4, head=QuantScheme(4, 128), method="rtn", untie=True)
    assert not out.exists()


def test_a_plan_may_name_a_head_that_stays(tiny_llama: Path, tmp_path: Path) -> None:
    quantize(tiny_llama, tmp_path / "out", plan=plan_with(tiny_llama, lm_head=None), method="rtn")
    assert not [n for n in load_file(tmp_path / "out" / "model.safetensors") if n.startswith("lm_head")]


@pytest.mark.parametrize(
    ("method", "head"), [("rtn", W8), ("gptq", W4), ("rotation+gptq", W8), ("rtn", QuantScheme(8, 32))]
)
def test_a_quantized_head_is_read_alike_everywhere(
    tiny_model: Any, tmp_path: Path, method: str, head: QuantScheme
) -> None:
    pytest.importorskip("compressed_tensors")
    folder, out = tiny_model("llama", tie_word_embeddings=True), tmp_path / "out"
    report = quantize(folder, out, scheme=W4, head=head, method=method, calibration=CALIBRATION, untie=True)
    assert report.plan["lm_head"] == head
    assert report.layers["lm_head"].scheme == head.name
    assert report.layers["lm_head"].measured == "weight"
    ids = list(range(1, 60))
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        want = theirs(torch.tensor([ids])).logits[0]
    (ours,) = LLM(out, device="cpu", dtype="float32").prompt_logits([ids])
    assert torch.nn.functional.cosine_similarity(ours, want, dim=-1).min() >= 0.9999
    with Checkpoint(out) as artifact, Checkpoint(folder) as source:
        reader = open_reader(artifact)
        assert reader is not None
        assert "lm_head.weight" not in artifact
        stored = reader.read("lm_head").dequantize()
        if method == "rtn":
            weight = source.tensor("model.embed_tokens.weight")
            expected = round_to(weight, find_grid(weight, head, scale_dtype=torch.float16), head)
            assert torch.equal(stored, expected.dequantize())
        assert torch.equal(
            artifact.tensor("model.embed_tokens.weight"), source.tensor("model.embed_tokens.weight")
        ) == (method != "rotation+gptq")


def test_the_command_line_says_so(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    words = ["quantize", str(tiny_llama), "--method", "rotation+rtn", "--group", "32", "--head", "w8", "--out", out]
    assert run(words) == 3
    assert "pass --untie" in capsys.readouterr().err
    assert run([*words, "--untie"]) == 0
    capsys.readouterr()
    assert run(["inspect", out]) == 0
    assert "output projection (lm_head): w8" in capsys.readouterr().out
    assert run(["quantize", str(tiny_llama), "--a-bit", "8", "--method", "rtn", "--out", str(tmp_path / "w4a8")]) == 3
    assert "with 8-bit activations use w8a8" in capsys.readouterr().err
    assert (
        run(["quantize", str(tiny_llama), "--w-bit", "8", "--a-bit", "8", "--method", "rtn", "--out", out + "8"]) == 0
    )
    assert run(["inspect", out + "8"]) == 0
    assert "w8a8" in capsys.readouterr().out
