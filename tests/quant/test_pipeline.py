"""The whole way on a tiny model: the artifact opens in transformers, is exact, deterministic, and whole or absent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from qtool.quant.artifact import RUN_RECORD, ArtifactWriter
from qtool.quant.calibration import CalibrationSet
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.formats import open_reader
from qtool.quant.pipeline import quantize
from qtool.quant.scheme import QuantPlan, QuantScheme
from qtool.quant.structure import linear_shapes

TOKENS = torch.randint(0, 128, (6, 32), generator=torch.Generator().manual_seed(0))
CALIBRATION = CalibrationSet(TOKENS, "random tokens", "0" * 64)
W4 = QuantScheme(4, 32)


def shapes_of(folder: Path) -> dict[str, tuple[int, int]]:
    with Checkpoint(folder) as checkpoint:
        return linear_shapes(checkpoint)


def asymmetric_plan(folder: Path) -> QuantPlan:
    return QuantPlan(dict.fromkeys(shapes_of(folder), QuantScheme(4, 32, symmetric=False)))


def mixed_plan(folder: Path) -> QuantPlan:
    """Block 0: 8 bits, and 16 bits for `down`; block 1: 4 bits, per channel in the MLP."""
    chosen: dict[str, QuantScheme | None] = {}
    for name in shapes_of(folder):
        chosen[name] = QuantScheme(8) if ".0." in name else W4
        if ".1.mlp" in name:
            chosen[name] = QuantScheme(4)
    chosen["model.layers.0.mlp.down_proj"] = None
    return QuantPlan(chosen)


def float_model(source: Path, artifact: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' float32 model with the artifact's weights, dequantized by qtool and rounded to `dtype`."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with Checkpoint(artifact) as checkpoint:
        reader = open_reader(checkpoint)
        assert reader is not None
        state = {n: checkpoint.tensor(n).float() for n in model.state_dict() if n in checkpoint}
        for layer in linear_shapes(checkpoint):
            if reader.scheme(layer) is not None:
                state[f"{layer}.weight"] = reader.read(layer).dequantize(dtype).float()
    assert set(model.state_dict()) - set(state) <= {"lm_head.weight"}
    model.load_state_dict(state, strict=False)
    return model.eval()


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_transformers_reads_the_artifact_as_we_do(tiny_llama: Path, tmp_path: Path, method: str, mixed: bool) -> None:
    pytest.importorskip("compressed_tensors")
    out = tmp_path / "out"
    report = quantize(
        tiny_llama,
        out,
        plan=mixed_plan(tiny_llama) if mixed else asymmetric_plan(tiny_llama),
        method=method,
        calibration=CALIBRATION,
        grid="signed" if method == "rtn" else None,
    )
    stored = load_file(out / "model.safetensors")
    assert bool((stored["model.layers.1.self_attn.o_proj.weight_scale"] < 0).any()) == mixed
    # transformers 5 with compressed-tensors 0.20 opens packed zero points, its own too, only when told to dequantize;
    # it then does so in the dtype of the scales
    ours = float_model(tiny_llama, out, torch.float32 if mixed else torch.bfloat16)
    how = {} if mixed else {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, **how).eval()
    with torch.no_grad():
        a, b = ours(TOKENS).logits, theirs(TOKENS).logits
    torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-3 * float(a.abs().max()))
    assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.9999
    assert len(report.layers) == (13 if mixed else 14)
    assert report.average_bits == pytest.approx(report.plan.average_bits(shapes_of(tiny_llama)))


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_calibrated_methods_come_closer_to_the_model_than_rounding(
    tiny_llama: Path, tmp_path: Path, method: str
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    errors = {}
    for name in ("rtn", method):
        report = quantize(
            tiny_llama,
            tmp_path / name,
            scheme=W4,
            method=name,
            calibration=CALIBRATION,
        )
        model = float_model(tiny_llama, tmp_path / name)
        with torch.no_grad():
            errors[name] = float((model(TOKENS).logits - base(TOKENS).logits).norm())
    assert errors[method] < 0.8 * errors["rtn"]
    assert all(r.relative_error <= r.rtn_error * (1 + 1e-6) for r in report.layers.values())


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq", "awq"])
def test_every_format_holds_the_same_weights(tiny_llama: Path, tmp_path: Path, form: str) -> None:
    reference = tmp_path / "reference"
    quantize(tiny_llama, reference, scheme=W4, method="rtn", grid="signed")
    quantize(tiny_llama, tmp_path / form, scheme=W4, method="rtn", grid="signed", format=form)  # type: ignore[arg-type]
    with Checkpoint(reference) as a, Checkpoint(tmp_path / form) as b:
        first, second = open_reader(a), open_reader(b)
        assert first is not None
        assert second is not None
        for layer in linear_shapes(a):
            assert torch.equal(first.read(layer).dequantize(), second.read(layer).dequantize())


def test_same_inputs_give_the_same_bytes_and_a_full_record(tiny_llama: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        quantize(tiny_llama, tmp_path / name, scheme=W4, method="gptq", calibration=CALIBRATION)
    for path in sorted((tmp_path / "a").iterdir()):
        if path.name != RUN_RECORD:  # times
            assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    record = json.loads((tmp_path / "a" / "qtool.json").read_text())
    assert record["plan"] == dict.fromkeys(shapes_of(tiny_llama), "w4g32")
    assert record["calibration"]["fingerprint"] == CALIBRATION.fingerprint
    assert set(record["layers"]) == set(record["plan"])
    assert (tmp_path / "a" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (tmp_path / "a" / "generation_config.json").is_file()


def test_a_tied_head_is_stored_once(tiny_llama: Path, tmp_path: Path) -> None:
    quantize(tiny_llama, tmp_path / "out", scheme=W4, method="rtn")
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert "model.embed_tokens.weight" in names
    assert not [n for n in names if n.startswith("lm_head")]


def test_groups_that_do_not_divide_are_fitted_and_said(tiny_llama: Path, tmp_path: Path) -> None:
    report = quantize(tiny_llama, tmp_path / "out", scheme=QuantScheme(4, 64), method="rtn")
    assert report.plan["model.layers.0.mlp.down_proj"] == QuantScheme(4, 32)  # 96 inputs
    assert report.notes == ("2 layers (first model.layers.0.mlp.down_proj): group 32 instead of 64: input size is 96",)


def test_what_transformers_does_not_read_is_said(tiny_llama: Path, tmp_path: Path) -> None:
    several = quantize(tiny_llama, tmp_path / "a", scheme=QuantScheme(4, 64, symmetric=False), method="rtn")
    assert "does not read asymmetric layers among others (w4g32-asym, w4g64-asym)" in several.notes[-1]
    one = quantize(tiny_llama, tmp_path / "b", scheme=QuantScheme(4, 32, symmetric=False), method="rtn")
    assert one.notes == ()


def test_sequences_beyond_the_context_are_said(tiny_llama: Path, tmp_path: Path) -> None:
    context = json.loads((tiny_llama / "config.json").read_text())["max_position_embeddings"]
    for length in (context, context + 1):
        tokens = torch.randint(0, 128, (1, length), generator=torch.Generator().manual_seed(0))
        data = CalibrationSet(tokens, "random", f"{length}")
        report = quantize(tiny_llama, tmp_path / str(length), scheme=W4, calibration=data)
        said = f"random: sequences of {length} tokens are longer than the model's {context}"
        assert (said in report.notes) == (length > context)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_layers_that_are_lost_are_said(tiny_model: Any, tmp_path: Path, method: str) -> None:
    whole, folder = tiny_model("llama"), tmp_path / "model"
    shutil.copytree(whole, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1e30  # float32, far beyond what a float16 scale reaches
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = []
    for source in (folder, whole):
        report = quantize(
            source, tmp_path / f"out-{len(said)}", scheme=W4, method=method, calibration=CALIBRATION, fresh=True
        )
        said.append([note for note in report.notes if "off by more" in note])
    assert said[0][0].startswith("1 layers (first model.layers.1.mlp.down_proj) are off by more than 90%")
    assert not said[1]


def damaged(source: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_bad_input_is_refused_and_leaves_nothing(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "sub" / "out"
    with pytest.raises(QtoolError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds 1 NaN"):
        quantize(damaged(tiny_llama, tmp_path / "damaged"), out, scheme=W4, method="rtn")
    with pytest.raises(QtoolError, match="says nothing of 13 layers"):
        quantize(tiny_llama, out, plan=QuantPlan({"model.layers.0.self_attn.q_proj": W4}))
    with pytest.raises(QtoolError, match="not both"):
        quantize(tiny_llama, out)
    with pytest.raises(QtoolError, match="unknown method 'magic'"):
        quantize(tiny_llama, out, scheme=W4, method="magic")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(QtoolError, match="MB free, the artifact needs"):
        quantize(tiny_llama, out, scheme=W4, method="rtn")
    monkeypatch.undo()
    assert not out.parent.exists()
    quantize(tiny_llama, out, scheme=W4, method="rtn")
    with pytest.raises(QtoolError, match="exists already"):
        quantize(tiny_llama, out, scheme=W4, method="rtn")
    with pytest.raises(QtoolError, match="quantized already"):
        quantize(out, tmp_path / "again", scheme=W4, method="rtn")


def test_an_interrupted_run_leaves_nothing_and_a_forced_one_keeps_the_old(tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize(tiny_llama, out, scheme=QuantScheme(8), method="rtn")
    before = (out / "model.safetensors").read_bytes()

    def interrupt(what: str, done: int, total: int) -> None:
        if what.startswith("quantize"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(tiny_llama, out, scheme=W4, method="rtn", overwrite=True, progress=interrupt)
    assert (out / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    quantize(tiny_llama, out, scheme=W4, method="rtn", overwrite=True)
    assert (out / "model.safetensors").read_bytes() != before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_shards_are_indexed_and_read_back(tiny_llama: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny_llama / "model.safetensors")
    with ArtifactWriter(tmp_path / "out", shard_bytes=20_000) as artifact:
        artifact.add(tensors)
        artifact.write_json("config.json", {"model_type": "llama"})
    with Checkpoint(tmp_path / "out") as checkpoint:
        assert len(checkpoint.files) > 2
        assert checkpoint.names() == sorted(tensors)
        assert all(torch.equal(checkpoint.tensor(n), t) for n, t in tensors.items())
        assert {p.stat().st_mode for p in checkpoint.files} == {(tmp_path / "out" / "config.json").stat().st_mode}


def test_it_is_said_where_a_server_cannot_fuse(tiny_llama: Path, tmp_path: Path) -> None:
    plan = dict(asymmetric_plan(tiny_llama).layers)
    plan["model.layers.1.self_attn.k_proj"] = QuantScheme(8)
    report = quantize(tiny_llama, tmp_path / "out", plan=QuantPlan(plan), method="rtn")
    (note,) = [n for n in report.notes if "vLLM" in n]
    assert note.startswith("1 groups (first model.layers.1.self_attn: q_proj w4g32-asym, k_proj w8, v_proj w4g32-asym)")
    assert report.layers["model.layers.1.self_attn.k_proj"].scheme == "w8"
