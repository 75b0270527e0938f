"""qtool quantize and qtool inspect on a tiny random model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from qtool.cli.inspect import folded, index_ranges
from qtool.cli.main import run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    LlamaForCausalLM(config).to(torch.float16).save_pretrained(folder)
    return folder


def test_quantize_then_inspect(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = ["quantize", str(model), "--out", str(out), "--w-bit", "4", "--group", "64", "--method", "rtn"]
    assert run([*arguments, "--json", "--quiet"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["average_bits"] == 4.25
    assert report["artifact_bytes"] == sum(p.stat().st_size for p in out.glob("*.safetensors"))
    assert run(arguments) == 3  # it is there now
    assert "exists already" in capsys.readouterr().err
    assert run(["inspect", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "compressed-tensors"
    assert found["schemes"] == report["plan"]
    assert set(found["schemes"].values()) == {"w4g64"}
    assert found["average_bits"] == 4.25
    assert found["qtool"]["method"] == "rtn"
    assert found["qtool"]["source"]["model"] == str(model)
    assert run(["inspect", str(model)]) == 0
    assert "fp16" in capsys.readouterr().out


def test_the_run_is_reported(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(["quantize", str(model), "--out", str(out), "--group", "48", "--method", "rtn", "-q"]) == 3
    assert run(["quantize", str(model), "--out", str(out), "--method", "rtn", "-q"]) == 0
    capsys.readouterr()
    assert run(["inspect", str(out)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    layers = json.loads((out / "qtool.json").read_text())["layers"]
    clipped = sum(layer["clipped"] for layer in layers.values()) / len(layers)
    assert f"{clipped:.2%} of weights beyond their grid; damping raised in 0 layers; 0 that no token" in shown
    assert max(layers, key=lambda name: layers[name]["relative_error"]) in shown
    assert "on cpu, at most" in shown
    assert "note: 12 layers (first model.layers.0.self_attn.q_proj): group 64 instead of 128: input size is 64" in shown
    report = json.loads((out / "qtool_run.json").read_text())
    assert len(report["blocks"]) == 2
    assert 1e7 < report["blocks"][0]["peak_memory_bytes"] <= report["peak_memory_bytes"] < 1e11
    assert 0 < report["blocks"][0]["seconds"] < report["seconds"]
    assert report["kept_blocks"] == 0


def test_a_plan_file_is_followed(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(model), "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["schemes"]
    wanted = {name: "w8" if ".0." in name else "w4g32-asym" for name in layers}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(wanted))
    out = tmp_path / "out"
    assert run(["quantize", str(model), "-o", str(out), "--plan", str(plan), "--method", "rtn", "-q"]) == 0
    capsys.readouterr()
    assert run(["inspect", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schemes"] == wanted


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--w-bit", "3"], "3 bits per weight is not supported"),
        (["--group", "100"], "--group 100"),
        (["--group", "48"], "use 128, 64, 32, or -1"),
        (["--plan", "missing.json"], "missing.json"),
        (["--method", "magic"], "unknown method 'magic'"),
        (["--format", "gguf"], "unknown format 'gguf'"),
        (["--grid", "best"], "unknown grid 'best'"),
        (["--device", "tpu"], "tpu"),
        (["--data", "missing.jsonl"], "missing.jsonl"),
        (["--seed", "-1"], "seed -1 is not from 0"),
    ],
)
def test_wrong_arguments_are_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], message: str
) -> None:
    out = tmp_path / "out"
    assert run(["quantize", str(model), "--out", str(out), "-q", *extra]) == 3
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_ranges_are_folded() -> None:
    assert index_ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    layers = {f"model.layers.{i}.mlp.up_proj": scheme for i, scheme in enumerate(("w4", "w4", "w8"))}
    assert folded(layers, "model.layers") == [("mlp.up_proj", "w4", "0-1"), ("mlp.up_proj", "w8", "2")]


@pytest.mark.parametrize("record", ['{"method": "gptq"}', '{"converted_from": 3}', '{"source": "x"}', "[", "[1]"])
def test_a_damaged_record_does_not_keep_inspect_from_showing_the_rest(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], record: str
) -> None:
    shutil.copytree(model, tmp_path / "m")
    (tmp_path / "m" / "qtool.json").write_text(record)
    assert run(["inspect", str(tmp_path / "m")]) == 0
    shown = capsys.readouterr().out
    assert "Linear layers" in shown
    assert ("qtool.json is damaged" in shown) == record.startswith("{")


def test_the_source_is_not_replaced_by_its_quantization(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (model / "model.safetensors").read_bytes()
    assert run(["quantize", str(model), "--out", str(model), "--force", "--method", "rtn", "--group", "32"]) == 3
    assert "holds the model that is read" in capsys.readouterr().err
    assert (model / "model.safetensors").read_bytes() == before


def test_an_int8_kv_cache_is_stored_and_shown(
    tiny_model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tiny_model(), tmp_path / "kv"
    arguments = ["--method", "rtn", "--group", "32", "--kv-cache", "int8", "--samples", "4", "--seq-len", "16"]
    assert run(["quantize", str(model), *arguments, "--out", str(out), "--json"]) == 0
    blocks = json.loads(capsys.readouterr().out)["kv_cache"]["blocks"]
    assert all(0 < block["dynamic_error"] and 0 < block["static_error"] < 0.1 for block in blocks)
    assert run(["inspect", str(out)]) == 0
    worst = max(block["static_error"] for block in blocks)
    assert "KV cache int8, scales one for all keys and one for all values of a block; attention outputs off by" in (
        shown := capsys.readouterr().out
    )
    assert f"at worst {worst:.4f}" in shown
    (out / "qtool.json").write_text("{}")
    assert run(["inspect", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_cache_scheme"] == {"scheme": "int8", "scales": "tensor"}
    assert run(["inspect", str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_cache_scheme"] is None
