"""qtool analyze and qtool plan as a user runs them, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from qtool.cli import analyze, fetch, plan
from qtool.cli.plan import parse_bytes
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.fingerprint import model_fingerprint
from qtool.quant.planfile import read_plan
from qtool.quant.structure import linear_shapes


def save_model(folder: Path, seed: int = 0) -> Path:
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=32,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(32)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token="t1").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"t{(i * i + 3 * i) % 31}" for i in range(2000)))
    return path


def qtool(*args: str) -> str:
    """stdout of a verb; a refusal is raised as it is."""
    app = typer.Typer()
    for name, module in (("analyze", analyze), ("plan", plan), ("fetch", fetch)):
        app.command(name)(module.command)
    result = CliRunner().invoke(app, list(args), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def sensitivity(folder: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("analysis") / "s.json"
    qtool(
        "analyze",
        str(folder),
        "-o",
        str(out),
        "--data",
        str(text),
        "--samples",
        "4",
        "--seq-len",
        "32",
        "--schemes",
        "fp16,w8,w4g64,w4g32",
        "--device",
        "cpu",
        "--quiet",
    )
    return out


def test_analysis_is_written_with_a_self_contained_page(sensitivity: Path, folder: Path) -> None:
    document = json.loads(sensitivity.read_text())
    assert document["metric"] == "fisher"
    assert len(document["groups"]) == 8
    assert set(document["groups"][0]["damage"]) == {"fp16", "w8", "w4g64", "w4g32"}
    assert document["calibration"]["seq_len"] == 32
    with Checkpoint(folder) as checkpoint:
        assert document["fingerprint"] == model_fingerprint(checkpoint)
        assert set(document["layers"]) == set(linear_shapes(checkpoint))
    page = sensitivity.with_suffix(".html").read_text()
    assert "data:image/png;base64," in page
    assert "model.layers.1.gate_up" in page
    assert page.count("data:image/png;base64,") == 2  # heat map and frontier
    assert "uniform w4g64" in page
    assert "http" not in page.replace("https://www.w3.org", "")
    assert sorted(p.name for p in sensitivity.parent.iterdir()) == ["s.html", "s.json"]


def test_table_and_json(folder: Path, text: Path, tmp_path: Path) -> None:
    common = (
        "analyze",
        str(folder),
        "-o",
        str(tmp_path / "a.json"),
        "--data",
        str(text),
        "--samples",
        "2",
        "--seq-len",
        "16",
        "--metric",
        "weight",
        "--device",
        "cpu",
    )
    shown = qtool(*common)
    assert "most sensitive" in shown
    assert "rule of thumb" in " ".join(shown.split())
    document = json.loads(qtool(*common, "--json", "--quiet"))
    assert document["metric"] == "weight"
    assert len(document["most_sensitive"]) == 8


def test_plan_keeps_its_budget(sensitivity: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    shown = qtool("plan", str(sensitivity), str(folder), "--avg-bits", "5.5", "-o", str(out))
    assert "uniform w4g64" in shown
    got = read_plan(out)
    with Checkpoint(folder) as checkpoint:
        shapes = linear_shapes(checkpoint)
        assert got.plan.average_bits(shapes) <= 5.5
        got.check_model(model_fingerprint(checkpoint), "the plan")
    assert set(got.plan.layers) == set(shapes)
    for i in range(2):  # what a server fuses shares a scheme
        for fused in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            assert len({got.plan[f"model.layers.{i}.{name}"] for name in fused}) == 1
    qtool("plan", str(sensitivity), "--avg-bits", "5.5", "-o", str(tmp_path / "again.json"))
    assert (tmp_path / "again.json").read_bytes() == out.read_bytes()


def test_plan_counts_every_byte_of_the_artifact(sensitivity: Path, folder: Path, tmp_path: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        shapes = linear_shapes(checkpoint)
        other = sum(checkpoint.tensor(n).nbytes for n in checkpoint.names() if n.removesuffix(".weight") not in shapes)
    out = tmp_path / "p.json"
    document = json.loads(qtool("plan", str(sensitivity), "--max-bytes", "80KB", "-o", str(out), "--json"))
    size = read_plan(out).plan.num_bytes(shapes)
    assert document["linear_bytes"] == size
    assert document["total_bytes"] == size + other <= 80_000


def test_the_frontier_as_table_json_and_picture(sensitivity: Path, tmp_path: Path) -> None:
    out = tmp_path / "f.json"
    shown = qtool("plan", str(sensitivity), "--frontier", "-o", str(out))
    assert "uniform w4g32" in shown
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads(out.read_text())
    points = document["frontier"]
    assert len(points) > 3
    assert set(document["uniform"]) == {"fp16", "w8", "w4g64", "w4g32"}
    for uniform in document["uniform"].values():  # no uniform plan is better and smaller than the curve at its size
        assert not any(uniform["damage"] < p["damage"] and uniform["linear_bytes"] < p["linear_bytes"] for p in points)
    limit = str(points[2]["average_bits"] + 1e-9)
    plan = json.loads(qtool("plan", str(sensitivity), "--avg-bits", limit, "-o", str(tmp_path / "p.json"), "--json"))
    assert plan["linear_bytes"] == points[2]["linear_bytes"]


def test_the_smallest_plan_within_a_kl(sensitivity: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "p.json")
    loose = json.loads(qtool("plan", str(sensitivity), "--avg-bits", "5.5", "-o", out, "--json"))
    got = json.loads(qtool("plan", str(sensitivity), "--max-kl", str(loose["predicted_damage"]), "-o", out, "--json"))
    assert got["linear_bytes"] <= loose["linear_bytes"]
    assert got["predicted_damage"] <= loose["predicted_damage"]


def test_time_is_a_budget(sensitivity: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "cache"))
    out = str(tmp_path / "p.json")
    common = ("--device", "cpu", "-o", out, "--json")
    loose = json.loads(qtool("plan", str(sensitivity), "--max-latency-ms", "1000", *common))
    assert loose["predicted_damage"] == 0  # there is time for 16 bits everywhere
    (table,) = (tmp_path / "cache" / "latency").iterdir()
    before = table.read_bytes()
    limit = str(loose["latency_ms"] * 1.001)
    same = json.loads(qtool("plan", str(sensitivity), "--max-latency-ms", limit, *common))
    assert same["latency_ms"] == pytest.approx(loose["latency_ms"])
    assert table.read_bytes() == before  # measured once
    with pytest.raises(QtoolError, match=r"--max-latency-ms 1e-06: the least possible"):
        qtool("plan", str(sensitivity), "--max-latency-ms", "1e-6", *common)


def test_a_plan_is_verified(sensitivity: Path, folder: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    words = (
        "plan",
        str(sensitivity),
        str(folder),
        "--avg-bits",
        "5",
        "--verify",
        "--data",
        str(text),
        "--device",
        "cpu",
    )
    document = json.loads(qtool(*words, "-o", str(out), "--json"))
    verified = document["verified"]
    assert verified["measured_kl"] > 0
    assert verified["measurements"][0] == [document["predicted_damage"], verified["measured_kl"]]
    assert json.loads(out.read_text())["verified"] == verified
    shown = qtool(*words, "-o", str(out))
    assert "measured as a whole: KL" in shown
    within = json.loads(
        qtool(*words[:3], "--max-kl", str(2 * verified["measured_kl"]), *words[5:], "-o", str(out), "--json")
    )
    assert within["verified"]["measured_kl"] <= 2 * verified["measured_kl"]


def test_bad_requests_are_refused(sensitivity: Path, folder: Path, text: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", seed=1)
    renamed = tmp_path / "renamed.json"
    renamed.write_text(sensitivity.read_text().replace("layers.1.", "layers.7."))
    out = str(tmp_path / "p.json")
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    source = str(sensitivity)
    cases: list[tuple[list[str], str]] = [
        (["plan", source, str(other), "--avg-bits", "5", "-o", out], "is of another model"),
        (["plan", str(renamed), str(folder), "--avg-bits", "5", "-o", out], "its layers are not those of"),
        (["plan", source, "--max-bytes", "9" * 400, "-o", out], "no model is as large"),
        (["plan", source, "-o", out], "no budget"),
        (["plan", source, "--frontier", "--avg-bits", "5", "-o", out], "--frontier shows every budget"),
        (["plan", source, "--frontier", "--axis", "weight", "-o", out], "use size or latency"),
        (["plan", source, "--frontier", "-o", str(tmp_path / "f.png")], "cannot end in .png"),
        (["plan", source, "--avg-bits", "5", "--verify", "-o", out], "give MODEL"),
        (["plan", source, "--max-kl", "0", "-o", out], "--max-kl 0.0: give a number above 0"),
        (["plan", source, "--avg-bits", "4.25", "--max-kl", "1e-9", "-o", out], "under --avg-bits 4.25"),
        (["plan", source, "--avg-bits", "2", "-o", out], r"the least possible .* is 4\.25 bits"),
        (["plan", source, "--max-bytes", "9zz", "-o", out], "write a size such as 90MB"),
        (["plan", source, "--max-bytes", "1KB", "-o", out], "the least possible"),
        (["plan", source, "--avg-bits", "5", "--keep", "layers.9", "-o", out], "matches none"),
        (["plan", str(tmp_path / "none.json"), "--avg-bits", "5", "-o", out], "no such file; `qtool analyze"),
        (["plan", str(text), "--avg-bits", "5", "-o", out], "not valid JSON"),
        (["plan", source, "--avg-bits", "5", "-o", str(tmp_path / "no" / "p.json")], "does not exist"),
        (["analyze", str(tmp_path / "nothing"), "-o", out], "no such folder"),
        (["analyze", str(tmp_path), "-o", out, "--data", str(text)], "no config.json"),
        (["analyze", str(folder), "-o", out, "--data", str(empty)], "holds no text"),
        (["analyze", str(folder), "-o", out, "--data", str(text), "--seq-len", "1"], "at least 1 sequence of 2 tokens"),
        (["analyze", str(folder), "-o", out, "--metric", "magic"], "metric 'magic' is not known"),
        (["analyze", str(folder), "-o", str(tmp_path)], "is a folder"),
        (["analyze", str(folder), "-o", "."], "is a folder"),
    ]
    before = sorted(tmp_path.iterdir())
    for args, message in cases:
        with pytest.raises(QtoolError, match=message):
            qtool(*args, "--quiet")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("written", "bytes_"),
    [("90MB", 90_000_000), ("1.5GiB", 3 << 29), ("12345", 12345), ("2 kb", 2000), ("7B", 7), ("1.5TB", 15 * 10**11)],
)
def test_sizes(written: str, bytes_: int) -> None:
    assert parse_bytes(written) == bytes_


def test_plan_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    for content, message in (
        ("{", "not valid JSON"),
        ("[]", "expected"),
        ("{}", "expected"),
        ('{"layers": {"a": 3}}', "expected"),
        ('{"format": 1, "layers": {"a": "w5"}}', "5 bits per weight"),
        ('{"format": 9, "layers": {"a": "w8"}}', "format 9"),
    ):
        path.write_text(content)
        with pytest.raises(QtoolError, match=message):
            read_plan(path)
    path.write_text('{"a": "w8", "b": "fp16"}')  # a bare mapping is a plan too
    assert read_plan(path).plan["b"] is None


def test_fetch_prints_the_folder(folder: Path) -> None:
    document = json.loads(qtool("fetch", str(folder), "--json", "--quiet"))
    assert document["folder"] == str(folder)
