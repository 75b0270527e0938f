"""From MODEL to a folder: what is taken as what, and what is refused how."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from qtool.quant import default_model as source
from qtool.quant import hub
from qtool.quant.errors import QtoolError


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "_hub_error", lambda repo: TimeoutError())
    return tmp_path / "cache"


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert hub.resolve_model(tmp_path) == tmp_path
    assert hub.resolve_model(str(tmp_path)) == tmp_path


def test_what_is_nothing_is_refused(tmp_path: Path, offline: Path) -> None:
    with pytest.raises(QtoolError, match=r"no such folder, and no hub id .*smollm2-135m"):
        hub.resolve_model(str(tmp_path / "nothing"))
    with pytest.raises(QtoolError, match="no such folder"):
        hub.resolve_model(Path("owner/name"))  # a Path is never a hub id
    (tmp_path / "file").write_text("x")
    with pytest.raises(QtoolError, match="is a file; MODEL is the folder"):
        hub.resolve_model(str(tmp_path / "file"))


def test_hub_id_offline_says_so(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(offline))
    with pytest.raises(QtoolError, match=r"nobody/such-model-zz: .*the hub cannot be reached"):
        hub.resolve_model("nobody/such-model-zz")


def test_unknown_hub_id_is_told_from_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    monkeypatch.setattr(hub, "_hub_error", lambda repo: missing)
    with pytest.raises(QtoolError, match="no such model on the hub"):
        hub.resolve_model("nobody/such-model-zz")


def test_patience_ends_a_hanging_lookup() -> None:
    import threading

    with pytest.raises(TimeoutError):
        hub._within(0.05, threading.Event().wait)
    with pytest.raises(ValueError, match="inner"):
        hub._within(5, lambda: (_ for _ in ()).throw(ValueError("inner")))
    assert hub._within(5, lambda: 3) == 3


def test_failed_fetch_leaves_nothing(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "half.gguf").write_bytes(b"GGUF")
        raise QtoolError("no index")

    monkeypatch.setattr(hub, "download_gguf", broken)
    with pytest.raises(QtoolError, match="no index"):
        hub.resolve_model("smollm2-135m")
    assert [p.name for p in (offline / "models").iterdir()] == [".smollm2-135m.lock"]


def test_killed_fetch_is_swept_and_the_cache_is_used(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file
    from torch import zeros

    stale = offline / "models" / ".smollm2-135m.partial" / "model"
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_bytes(b"half")
    calls: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        calls.append(folder)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        save_file({"w": zeros(2)}, folder / "model.safetensors")

    monkeypatch.setattr(hub, "download_gguf", lambda folder: folder / "x.gguf")
    monkeypatch.setattr(hub, "convert_gguf", convert)
    folder = hub.resolve_model("smollm2-135m")
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert not (offline / "models" / ".smollm2-135m.partial").exists()
    assert hub.resolve_model("smollm2-135m") == folder
    assert len(calls) == 1


def test_another_gguf_is_refused(tmp_path: Path) -> None:
    gguf = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    gguf.write_bytes(b"GGUF not this one")
    with pytest.raises(QtoolError, match=r"sha256 is .* expected b179c952"):
        source.check_sha256(gguf)


@pytest.mark.model
def test_default_model_is_whole(default_model: Path) -> None:
    """Facts of the model card and the reference tokenizer."""
    from transformers import AutoTokenizer

    from qtool.quant.checkpoint import Checkpoint

    with Checkpoint(default_model) as checkpoint:
        names = checkpoint.names()
        assert sum(checkpoint.tensor(n).numel() for n in names) == 134_515_008
        assert "lm_head.weight" not in names
    tokenizer = AutoTokenizer.from_pretrained(default_model)
    pieces = [tokenizer.decode([i]) for i in tokenizer("12345 x = 67")["input_ids"]]
    assert [p for p in pieces if p.strip().isdigit()] == list("1234567")
    messages = [{"role": "user", "content": "Hi"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
