"""The originals: what they are refused, how their scripts are run, what becomes of what they write."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qtool.cli.main import run as qtool
from qtool.quant.algorithms.rtn import rtn
from qtool.quant.backends import autoawq, autogptq, autogptq_script
from qtool.quant.backends.autoawq_script import copy_values
from qtool.quant.backends.environment import EnvironmentSpec, ensure, is_whole
from qtool.quant.backends.original import quantize_original
from qtool.quant.backends.script import parse_progress, run_script
from qtool.quant.calibration import CalibrationSet
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.formats import open_reader
from qtool.quant.hub import cache_folder
from qtool.quant.progress import silent
from qtool.quant.scheme import QuantPlan, QuantScheme
from qtool.quant.structure import linear_shapes

W4 = QuantScheme(4, 64)
W4_ASYM = QuantScheme(4, 64, symmetric=False)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tokens_of(*shape: int) -> CalibrationSet:
    generator = torch.Generator().manual_seed(3)
    return CalibrationSet(torch.randint(1, 257, shape, generator=generator), "random ids", "f" * 64)


# ---- refusals


@pytest.mark.parametrize(
    ("scheme", "rows", "says"),
    [
        (QuantScheme(8, 64, symmetric=False), 128, "--w-bit 4"),
        (QuantScheme(4, -1, symmetric=False), 128, "--group -1"),
        (W4, 128, "--sym"),
        (W4_ASYM, 96, "multiples of 64 rows"),
    ],
)
def test_autoawq_refusals(scheme: QuantScheme, rows: int, says: str) -> None:
    with pytest.raises(QtoolError, match=says):
        autoawq.check(scheme, "llama", {"model.layers.0.mlp.up_proj": (rows, 128)})


def test_autoawq_takes_small_query_projections() -> None:
    autoawq.check(W4_ASYM, "llama", {"model.layers.0.self_attn.k_proj": (96, 128)})  # it does not clip them


def test_autogptq_refusals() -> None:
    with pytest.raises(QtoolError, match="does not know qwen3"):
        autogptq.check(W4, "qwen3", {})
    with pytest.raises(QtoolError, match=r"up_proj is 80×128"):
        autogptq.check(W4, "llama", {"up_proj": (80, 128)})
    autogptq.check(QuantScheme(8, -1, symmetric=False), "mistral", {"up_proj": (96, 128)})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--backend", "marlin"], "use one of qtool, autoawq, auto-gptq"),
        (["--backend", "auto-gptq", "--method", "gptq", "--iters", "3"], "takes no --method, --iters"),
        (["--backend", "autoawq", "--plan", "p.json", "--device", "cpu"], "takes no --plan, --device"),
        (["--backend", "auto-gptq", "--group", "128"], "64 inputs are no multiple of 128"),
        (["--backend", "autoawq", "--group", "64", "--sym"], "leave --sym out"),
    ],
)
def test_the_command_line_refuses_before_work(
    arguments: list[str],
    says: str,
    tiny_model: Any,
    cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, out = tiny_model(), tmp_path / "out"
    capsys.readouterr()
    assert qtool(["quantize", str(model), "--out", str(out), *arguments]) == 3
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not out.exists()
    assert not cache.exists()


@pytest.mark.skipif(importlib.util.find_spec("awq") is not None, reason="AutoAWQ is installed here")
def test_autoawq_that_is_missing_is_asked_for() -> None:
    with pytest.raises(QtoolError, match=r"pip install 'qtool\[autoawq\]'"):
        autoawq.ready()


# ---- scripts in processes of their own


def test_progress_lines_are_told_from_other_output() -> None:
    assert parse_progress("@progress 3 30\n") == (3, 30)
    assert parse_progress("AWQ:  10%|█   | 3/30 [00:01<00:09]@progress 3 30\n") == (3, 30)
    assert parse_progress("3 30\n") is None
    assert parse_progress("@progress 3 30 blocks\n") is None


def run_text(text: str, tmp_path: Path, progress: Any = silent) -> dict[str, Any]:
    script = tmp_path / "script.py"
    script.write_text(text)
    (tmp_path / "out").mkdir(exist_ok=True)
    request = {"out": str(tmp_path / "out"), "value": 7}
    return run_script(Path(sys.executable), script, request, tmp_path, tmp_path / "log", "work", progress)


def test_a_script_gets_its_request_and_gives_its_result(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    result = run_text(
        "import json, sys, pathlib\n"
        "r = json.load(open(sys.argv[1]))\n"
        "sys.stderr.write('bar 0/2\\r'); sys.stderr.flush(); print('@progress 1 2', flush=True)\n"
        "(pathlib.Path(r['out']) / 'result.json').write_text(json.dumps({'doubled': 2 * r['value']}))\n",
        tmp_path,
        lambda *what: seen.append(what),
    )
    assert result == {"doubled": 14}
    assert seen == [("work", 1, 2), ("work", 2, 2)]
    assert "bar 0/2" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("text", "says"),
    [("raise ValueError('no such thing')", "ValueError: no such thing"), ("pass", "exit status 0")],
)
def test_a_script_that_fails_says_why(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(QtoolError, match=says):
        run_text(text, tmp_path)


def test_an_interrupt_ends_the_script(tmp_path: Path) -> None:
    def stop(*what: Any) -> None:
        raise KeyboardInterrupt

    text = "import os, time\nprint(f'@progress {os.getpid()} 1', flush=True)\ntime.sleep(100)\n"
    pids: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        run_text(text, tmp_path, lambda stage, done, total: (pids.append(done), stop()))
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


# ---- environments


@pytest.mark.slow
def test_an_environment_is_made_once_and_mended(tmp_path: Path) -> None:
    wheelless = EnvironmentSpec("empty", (("--no-index", "--quiet", "pip"),))  # pip itself: there already
    python = ensure(wheelless, tmp_path)
    folder = wheelless.folder(tmp_path)
    assert python == folder / "bin" / "python"
    assert is_whole(folder, wheelless)
    stages: list[str] = []
    ensure(wheelless, tmp_path, lambda stage, *count: stages.append(stage))
    assert stages == []  # nothing to do

    marker = next(folder.glob("qtool-environment.json"))
    made = (folder / "pyvenv.cfg").stat().st_mtime_ns
    marker.unlink()  # as after a kill: pip goes on in the same folder
    ensure(wheelless, tmp_path, lambda stage, *count: stages.append(stage))
    assert stages
    assert (folder / "pyvenv.cfg").stat().st_mtime_ns == made
    assert is_whole(folder, wheelless)
    assert not is_whole(folder, EnvironmentSpec("empty", ()))  # made of other packages

    missing = EnvironmentSpec("empty", (("--no-index", "qtool-needs-no-such-package"),))
    shutil.copytree(folder, missing.folder(tmp_path), symlinks=True)  # spares a second venv
    with pytest.raises(QtoolError, match=r"ERROR: No matching distribution .*\(log: .*empty-.*\.log\)"):
        ensure(missing, tmp_path)
    assert not is_whole(missing.folder(tmp_path), missing)


def test_autogptq_environment_is_pinned_throughout() -> None:
    for step in autogptq.environment_spec().steps:
        for argument in step:
            assert argument.startswith("--") or "==" in argument, argument


# ---- AutoGPTQ's older transformers


def test_legacy_config_says_the_rotary_base_where_it_was_said() -> None:
    config = {"model_type": "llama", "dtype": "bfloat16", "transformers_version": "5.24.0", "head_dim": 64}
    assert autogptq.legacy_config({**config, "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}) == {
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "head_dim": 64,
        "rope_theta": 1e5,
    }
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    legacy = autogptq.legacy_config({**config, "rope_parameters": {"rope_theta": 5e5, **scaled}})
    assert (legacy["rope_theta"], legacy["rope_scaling"]) == (5e5, scaled)
    old = {"model_type": "llama", "rope_theta": 1e4, "torch_dtype": "float16"}
    assert autogptq.legacy_config(old) == old


def test_another_rotary_base_is_found_out(tiny_model: Any, tmp_path: Path) -> None:
    tokens = tokens_of(1, 64).tokens[0].tolist()
    model = AutoModelForCausalLM.from_pretrained(tiny_model())
    with torch.no_grad():
        states = model.model(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
    save_file({"first_block": states[1][0].contiguous()}, tmp_path / "right")
    autogptq_script.check_first_block(model, tokens, str(tmp_path / "right"))
    other = AutoModelForCausalLM.from_pretrained(tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 9}))
    other.load_state_dict(model.state_dict())
    with pytest.raises(SystemExit, match="reads this model otherwise"):
        autogptq_script.check_first_block(other, tokens, str(tmp_path / "right"))


def test_autogptq_log_lines_become_progress(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("test of the progress handler")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(autogptq_script.ProgressHandler())
    logger.info("Start quantizing layer 3/30")
    logger.info("Quantizing mlp.up_proj in layer 3/30...")
    assert capsys.readouterr().out == "@progress 2 30\n"


def test_a_copied_state_shares_nothing() -> None:
    linear = torch.nn.Linear(4, 4)
    handle = linear.register_state_dict_post_hook(copy_values)
    state = linear.state_dict()
    handle.remove()
    before = state["weight"].clone()
    with torch.no_grad():
        linear.weight.mul_(2)
    assert torch.equal(state["weight"], before)
    linear.load_state_dict(state)
    assert torch.equal(linear.weight, before)


# ---- from what an original wrote to an artifact

# stands for the environment's Python: rounds to nearest, and writes what AutoGPTQ would
FAKE_AUTOGPTQ = """
import json, pathlib, shutil, sys
import torch
from safetensors.torch import save_file
from qtool.quant.algorithms.rtn import rtn
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.formats import gptq
from qtool.quant.scheme import QuantScheme
from qtool.quant.structure import linear_shapes

request = json.load(open(sys.argv[1]))
scheme = QuantScheme(request["bits"], request["group_size"], request["symmetric"])
out = pathlib.Path(request["out"])
out.mkdir()
shutil.copy(request["first_block"], {kept!r})
pathlib.Path({kept!r} + ".json").write_text(json.dumps(request))
with Checkpoint(request["model"]) as source:
    tensors = {{name: source.tensor(name) for name in source.names()}}
    for layer in linear_shapes(source):
        tensors |= gptq.tensors(layer, rtn(tensors.pop(layer + ".weight").float(), scheme, scale_dtype=torch.float16))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()  # a tied head, stored again
    save_file(tensors, out / "gptq_model-4bit-64g.safetensors")
    section = {{"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": True,
               "model_name_or_path": "/somewhere", "model_file_base_name": None}}
    (out / "config.json").write_text(json.dumps({{**source.config, "quantization_config": section}}))
(out / "result.json").write_text(json.dumps({{"versions": {{"auto-gptq": "0.7.1"}}, "settings": {{"bits": 4}}}}))
"""


def fake_environment(cache: Path, tmp_path: Path) -> Path:
    """An environment that counts as whole, whose Python runs FAKE_AUTOGPTQ; returns where the request is kept."""
    spec = autogptq.environment_spec()
    folder = spec.folder(cache / "environments")
    (folder / "bin").mkdir(parents=True)
    (folder / "qtool-environment.json").write_text(json.dumps(spec.facts()))
    fake, kept = tmp_path / "fake.py", tmp_path / "first_block.safetensors"
    fake.write_text(FAKE_AUTOGPTQ.format(kept=str(kept)))
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{fake}" "$3"\n')  # python -P script request
    python.chmod(0o755)
    return kept


def test_what_autogptq_writes_becomes_an_artifact(tiny_model: Any, cache: Path, tmp_path: Path) -> None:
    kept = fake_environment(cache, tmp_path)
    model = tiny_model(tie_word_embeddings=True)
    calibration = tokens_of(2, 32)
    out = tmp_path / "out"
    report = quantize_original("auto-gptq", model, out, scheme=W4, calibration=calibration, source="tiny")

    request = json.loads(Path(f"{kept}.json").read_text())
    assert request["tokens"] == calibration.tokens.tolist()
    with torch.no_grad():
        states = AutoModelForCausalLM.from_pretrained(model).model(
            input_ids=calibration.tokens[:1], output_hidden_states=True
        )
    torch.testing.assert_close(load_file(kept)["first_block"], states.hidden_states[1][0], rtol=1e-4, atol=1e-5)

    with Checkpoint(model) as source, Checkpoint(out) as artifact:
        reader = open_reader(artifact)
        assert reader is not None
        for layer in linear_shapes(source):
            wanted = rtn(source.tensor(f"{layer}.weight").float(), W4, scale_dtype=torch.float16)
            assert torch.equal(reader.read(layer).dequantize(), wanted.dequantize())
        assert "lm_head.weight" not in artifact
        norm = "model.norm.weight"
        assert torch.equal(artifact.tensor(norm), source.tensor(norm))
        section = artifact.config["quantization_config"]
        assert section["desc_act"] is True
        assert "model_name_or_path" not in section
        assert artifact.config["rope_parameters"] == source.config["rope_parameters"]
        assert report.average_bits == QuantPlan(dict.fromkeys(linear_shapes(source), W4)).average_bits(
            linear_shapes(source)
        )
    assert (out / "tokenizer.json").is_file()
    record = json.loads((out / "qtool.json").read_text())
    assert record["backend"] == {"name": "auto-gptq", "versions": {"auto-gptq": "0.7.1"}, "settings": {"bits": 4}}
    assert record["calibration"]["fingerprint"] == calibration.fingerprint
    assert record["source"]["model"] == "tiny"
    assert sorted(p.name for p in (cache / "backends").iterdir()) == ["auto-gptq.log"]
    with pytest.raises(QtoolError, match="exists already"):
        quantize_original("auto-gptq", model, out, scheme=W4, calibration=calibration)


def test_a_failing_original_leaves_nothing(tiny_model: Any, cache: Path, tmp_path: Path) -> None:
    fake_environment(cache, tmp_path)
    (tmp_path / "fake.py").write_text("import sys\nsys.exit('it ran out of luck')\n")
    with pytest.raises(QtoolError, match="it ran out of luck"):
        quantize_original("auto-gptq", tiny_model(), tmp_path / "out", scheme=W4, calibration=tokens_of(2, 32))
    assert [p.name for p in tmp_path.iterdir() if "out" in p.name] == []
    assert sorted(p.name for p in (cache / "backends").iterdir()) == ["auto-gptq.log"]


# ---- the originals themselves, where they are at hand

BIG_ENOUGH = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "head_dim": 64,
    "num_attention_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
}


def relative_error(model: Path, out: Path) -> float:
    """Of all dequantized weights. For GPTQ, which scales no weight beforehand."""
    wrong, all_of_it = 0.0, 0.0
    with Checkpoint(model) as source, Checkpoint(out) as artifact:
        reader = open_reader(artifact)
        assert reader is not None
        for layer in linear_shapes(source):
            weight = source.tensor(f"{layer}.weight").float()
            wrong += float((weight - reader.read(layer).dequantize()).square().sum())
            all_of_it += float(weight.square().sum())
    return (wrong / all_of_it) ** 0.5


@pytest.mark.slow
def test_autogptq_itself(tiny_model: Any, tmp_path: Path) -> None:
    spec = autogptq.environment_spec()
    if not is_whole(spec.folder(cache_folder() / "environments"), spec):
        pytest.skip("AutoGPTQ's environment is not made yet: `qtool quantize MODEL --backend auto-gptq` makes it")
    model = tiny_model(**BIG_ENOUGH)
    out = tmp_path / "out"
    report = quantize_original("auto-gptq", model, out, scheme=W4, calibration=tokens_of(4, 64))
    assert report.versions["auto-gptq"] == "0.7.1"
    assert report.versions["transformers"] == "4.53.3"
    assert report.average_bits == 4.25
    # 4 bits of a normal distribution, in groups of 64: about 0.1 by plain rounding, and a little more by GPTQ
    assert 0.05 < relative_error(model, out) < 0.3


@pytest.mark.slow
def test_autoawq_itself(tiny_model: Any, tmp_path: Path) -> None:
    if importlib.util.find_spec("awq") is None:
        pytest.skip("AutoAWQ is not installed: pip install 'qtool[autoawq]'")
    from qtool.runtime.llm import LLM

    model = tiny_model(**BIG_ENOUGH)
    out = tmp_path / "out"
    report = quantize_original("autoawq", model, out, scheme=W4_ASYM, calibration=tokens_of(4, 64))
    assert report.versions["autoawq"] == "0.2.9"
    assert report.average_bits == 4.3125
    LLM(str(out))  # our loader takes it
