"""`qtool chat` on a tiny model: piped input, greedy answers those of the engine, refusals."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from qtool.cli import chat
from qtool.quant.errors import QtoolError
from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.llm import LLM

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    config = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, eos_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    vocab = {"<eos>": 0} | {c: i + 1 for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def talk(monkeypatch: pytest.MonkeyPatch, words: str, model: Path, **options: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(words))
    chat.command(str(model), quiet=True, device="cpu", **({"temperature": 0.0, "max_tokens": 6} | options))


def test_answers_are_the_engines_and_the_conversation_goes_on(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = LLM(chat_model, device="cpu")
    params = SamplingParams(max_tokens=6, temperature=0)
    first = llm.generate(["s:be brief\nu:hello\na:"], params)[0].outputs[0].text
    second = llm.generate([f"s:be brief\nu:hello\na:{first}\nu:more\na:"], params)[0].outputs[0].text
    talk(monkeypatch, "hello\n\nmore\n", chat_model, system="be brief")
    assert capsys.readouterr().out == f"{first}\n{second}\n"


def test_a_conversation_longer_than_the_context_is_refused(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(QtoolError, match="exceeds the context of 128 tokens"):
        talk(monkeypatch, "x" * 130 + "\n", chat_model)


def test_a_model_without_chat_template_is_refused(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(chat_model, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(QtoolError, match="no chat template"):
        talk(monkeypatch, "hello\n", folder)


def test_bytes_that_are_no_text_are_refused(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(QtoolError, match="stdin: not text"):
        talk(monkeypatch, "a\udcff\n", chat_model)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding="utf-8"))
    with pytest.raises(QtoolError, match="stdin: not text in utf-8"):
        chat.command(str(chat_model), quiet=True, device="cpu")


def test_a_template_that_refuses_is_one_line(chat_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(chat_model, folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system message, please') }}")
    with pytest.raises(QtoolError, match="refuses the conversation: no system message, please"):
        talk(monkeypatch, "hello\n", folder, system="be brief")
