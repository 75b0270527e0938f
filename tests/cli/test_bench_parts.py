"""`qtool bench decode` and `qtool bench kernels` on tiny shapes, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qtool.cli.main import run

TINY = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 1024,
}  # fmt: skip


def test_decode_measures_every_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    where = ["--config", str(tmp_path / "config.json"), "--device", "cpu", "--dtype", "bfloat16"]
    load = ["--in-flight", "2", "--num-requests", "5", "--input-len", "9", "--short", "2", "--long", "4"]
    assert run(["bench", "decode", *where, *load, "--modes", "fp16,w4:int8", "--prompts", "17", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(m["mode"], m["kv"]) for m in document["modes"]] == [("fp16", "float"), ("w4", "int8")]
    for mode in document["modes"]:
        assert mode["single"] > 0
        assert mode["many"]["2"] > 0
        assert mode["ttft_ms"]["17"] > 0
    assert document["modes"][0]["weight_bytes"] > document["modes"][1]["weight_bytes"]


def test_kernels_measure_every_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path))
    layers = ["--layers", "64x128,128x256", "--tokens", "1,3", "--schemes", "w4g32,w8", "--device", "cpu"]
    assert run(["bench", "kernels", *layers, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["times"]) == 2 * 2 * 3
    assert document["ceiling_gb_per_s"] > 0
    assert all(t["microseconds"] > 0 and t["gb_per_s"] > 0 for t in document["times"])
    assert list((tmp_path / "latency").iterdir()), "the device's table was not written"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode", "--shape", "gpt"], "--shape must be one of llama-2-7b"),
        (["decode", "--modes", "w3"], "--modes: unknown mode 'w3'"),
        (["decode", "--modes", "w4-h8:fp8"], "--modes: a KV cache is float or int8, got w4-h8:fp8"),
        (["decode", "--in-flight", "some"], "--in-flight must be numbers"),
        (["decode", "--long", "0"], "--long must be at least 1"),
        (["decode", "--dtype", "float32"], "--dtype must be float16 or bfloat16"),
        (["kernels", "--layers", "64"], "--layers must look like"),
        (["kernels", "--layers", "64x0"], "--layers must look like"),
        (["kernels", "--schemes", "w5"], "5 bits per weight"),
        (["kernels", "--tokens", "0"], "--tokens must be numbers"),
    ],
)
def test_refusals_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", *arguments]) == 3
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_what_is_no_part_is_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "no/such/folder/here"]) == 3
    assert "no/such/folder/here" in capsys.readouterr().err
    assert run(["bench", "--help"]) == 0
    assert "--concurrency" in capsys.readouterr().out
