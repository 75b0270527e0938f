"""The whole path as a user walks it: analyze → plan → quantize → inspect → compare → bench, by the command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from qtool.cli.main import run
from qtool.runtime.llm import LLM

TEXT = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs; how vexing! "


def qtool(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> Any:
    """The JSON result of one command."""
    capsys.readouterr()
    assert run([*words, "--json", "--quiet"]) == status, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT * 120)
    return path


def test_the_whole_path(tiny_model: Any, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny_model("llama", tie_word_embeddings=True))
    sensitivity, plan, artifact, report = (str(tmp_path / n) for n in ("s.json", "plan.json", "model", "report"))
    small = ("--data", str(text), "--samples", "4", "--seq-len", "64")
    qtool(capsys, "analyze", model, "--schemes", "fp16,w8,w4g32", "--out", sensitivity, *small)
    planned = qtool(capsys, "plan", sensitivity, "--avg-bits", "6", "--out", plan)
    assert planned["average_bits"] <= 6
    made = qtool(capsys, "quantize", model, "--plan", plan, "--out", artifact, *small)
    assert made["average_bits"] == pytest.approx(planned["average_bits"])

    seen = qtool(capsys, "inspect", artifact)
    assert seen["schemes"] == json.loads(Path(plan).read_text())["layers"]

    windows = ("--windows", "4", "--context", "64", "--data", str(text), "--tasks", "none")
    loose = ("--max-kl", "50", "--max-ppl-increase", "1000")
    passed = qtool(capsys, "compare", model, artifact, "--out", report, *windows, *loose)
    assert passed["verdict"] == "PASS"
    assert {layer["scheme"] for layer in passed["schemes"].values()} == set(seen["schemes"].values())
    failed = qtool(capsys, "compare", model, artifact, "--out", report, *windows, "--max-kl", "1e-9", status=1)
    assert failed["verdict"] == "FAIL"
    assert Path(failed["report"]).read_text().startswith("<!doctype html>")


W4 = ("--group", "32")
W8A8 = ("--w-bit", "8", "--a-bit", "8")


@pytest.mark.parametrize(
    ("method", "scheme"),
    [
        *((m, W4) for m in ("rtn", "gptq", "awq", "rounding", "awq+gptq", "awq+rounding", "rotation+rounding")),
        *((m, W8A8) for m in ("rtn", "smoothquant", "smoothquant+gptq")),
    ],
)
def test_transformers_and_the_runtime_read_the_same_model(
    tiny_model: Any,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    method: str,
    scheme: tuple[str, ...],
) -> None:
    """The artifact in plain transformers with compressed-tensors, against the runtime: cosine of the logits."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    model = str(tiny_model("llama"))
    artifact = str(tmp_path / "model")
    qtool(
        capsys,
        "quantize",
        model,
        *scheme,
        "--method",
        method,
        "--out",
        artifact,
        "--data",
        str(text),
        "--samples",
        "4",
        "--seq-len",
        "64",
    )
    ids = list(range(1, 60))
    theirs = AutoModelForCausalLM.from_pretrained(artifact, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    (ours,) = LLM(artifact, dtype="float32").prompt_logits([ids])
    # with 8-bit activations, sums in another order take some of them over a half, to the next code
    alike = 0.9999 if scheme == W4 else 0.999
    assert torch.nn.functional.cosine_similarity(ours, theirs.float(), dim=-1).min() >= alike


def test_an_interrupted_quantization_leaves_nothing(tiny_model: Any, text: Path, tmp_path: Path) -> None:
    model = str(tiny_model("llama", num_hidden_layers=40))
    out = tmp_path / "out"
    out.mkdir()
    command = [
        sys.executable,
        "-m",
        "qtool.cli",
        "quantize",
        model,
        "--group",
        "32",
        "--out",
        str(out / "model"),
        "--data",
        str(text),
        "--samples",
        "16",
        "--seq-len",
        "128",
    ]
    for number in (signal.SIGINT, signal.SIGTERM):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "QTOOL_CACHE": str(tmp_path / "cache")}
        # a shell's background jobs, and what they start, ignore SIGINT
        process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        deadline = time.monotonic() + 120
        while not any(out.iterdir()) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)  # until it writes
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
        # Python ends by SIGINT itself where the interrupt passed through C code; a shell calls both 130
        assert process.returncode in (130, -signal.SIGINT), err
        assert list(out.iterdir()) == []
        assert "interrupted" in err.splitlines()[-1]


BAD: list[tuple[list[str], str]] = [
    (["quantize", "nowhere/at/all"], "no such folder"),
    (["quantize", "{empty}"], "no config.json"),
    (["quantize", "{weightless}"], "no *.safetensors"),
    (["quantize", "{alien}"], "'mamba' is not supported"),
    (["serve", "{alien}"], "'mamba' is not supported"),
    (["quantize", "{truncated}"], "truncated or damaged"),
    (["bench", "{truncated}"], "truncated or damaged"),
    (["inspect", "{truncated}"], "truncated or damaged"),
    (["quantize", "{model}", "--w-bit", "3"], "3 bits per weight"),
    (["quantize", "{odd}", "--group", "128"], "no group size"),
    (["quantize", "{model}", "--data", "{nothing}"], "holds no text"),
    (["quantize", "{model}", "--data", "missing.txt"], "no such file"),
    (["quantize", "{model}", "--out", "{empty}"], "exists"),
    (["analyze", "{model}", "--data", "{nothing}"], "holds no text"),
    (["analyze", "{model}", "--schemes", "int4"], "unknown scheme"),
    (["plan", "missing.json", "--avg-bits", "5"], "missing.json"),
    (["compare", "{model}", "nowhere/at/all"], "no such folder"),
    (["compare", "{model}", "{model}", "--tasks", "missing.jsonl"], "missing.jsonl"),
    (["bench", "{model}", "--concurrency", "none"], "concurrency"),
    (["chat", "nowhere"], "no such folder"),
    (["frobnicate"], "frobnicate"),
    (["quantize"], "MODEL"),
]


@pytest.fixture(scope="module")
def places(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with one fault each."""
    root = tmp_path_factory.mktemp("places")
    names = ("empty", "weightless", "alien", "truncated")
    folders = {name: root / name for name in names}
    for folder in folders.values():
        folder.mkdir()
    good = tiny_model("llama")
    config = json.loads((good / "config.json").read_text())
    for name in ("alien", "truncated"):
        for file in good.glob("tokenizer*"):
            shutil.copy(file, folders[name])
    for name in ("weightless", "truncated"):
        (folders[name] / "config.json").write_text(json.dumps(config))
    (folders["alien"] / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    weights = (good / "model.safetensors").read_bytes()
    (folders["alien"] / "model.safetensors").write_bytes(weights)
    (folders["truncated"] / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (root / "nothing.txt").write_text("  \n")
    odd = tiny_model("llama", hidden_size=48, head_dim=12, intermediate_size=100)
    return {"model": str(good), "odd": str(odd), "nothing": str(root / "nothing.txt")} | {
        name: str(folder) for name, folder in folders.items()
    }


@pytest.mark.parametrize(("words", "says"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_input_is_one_clear_line(
    words: list[str],
    says: str,
    places: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([word.format(**places) for word in words]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    line = err.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert says in line
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []  # nothing half-written


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_reads_alike_everywhere(
    default_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mixed plan of the real model: plain transformers with compressed-tensors against the runtime."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    layers = qtool(capsys, "inspect", str(default_model))["schemes"]
    mixed = {name: "w8" if "down_proj" in name else "w4g64" for name in layers}
    plan, artifact = tmp_path / "plan.json", str(tmp_path / "model")
    plan.write_text(json.dumps(mixed))
    qtool(capsys, "quantize", str(default_model), "--plan", str(plan), "--method", "rtn", "--grid", "signed",
          "--out", artifact)  # fmt: skip
    ids = AutoTokenizer.from_pretrained(artifact)("The capital of France is Paris, and the capital of").input_ids
    theirs = AutoModelForCausalLM.from_pretrained(artifact, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    (ours,) = LLM(artifact, dtype="float32").prompt_logits([ids])
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=-1).min() >= 0.9999


def test_the_bare_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    out, err = capsys.readouterr()
    assert "quantize" in out + err
    assert "error" not in err
