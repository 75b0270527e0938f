"""Calibration data token by token, and the block walk against the whole model in transformers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from qtool.quant.calibration import BlockWalker, calibration_set
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.corpus import stdlib_documents
from qtool.quant.documents import read_documents
from qtool.quant.errors import QtoolError

VOCAB = {"<s>": 0, "</s>": 1, "<unk>": 2, **{letter: i + 3 for i, letter in enumerate("abcdefghij")}}


def save_tokenizer(folder: Path, *, bos: bool = False) -> Path:
    tokenizer = Tokenizer(models.WordLevel(VOCAB, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


def write_jsonl(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return path


def test_documents_are_joined_with_eos_and_cut(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tok")
    data = write_jsonl(tmp_path / "d.jsonl", "a b c", "d e f g h i j", "a", "b b b b")
    got = calibration_set(folder, data=data, num_sequences=2, seq_len=5, seed=0)
    assert got.tokens.tolist() == [[3, 4, 5, 1, 6], [7, 8, 9, 10, 11]]
    assert got.tokens.dtype == torch.int64
    assert any("2 of 4 documents" in note for note in got.notes)


def test_bos_only_where_the_tokenizer_adds_it(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tok", bos=True)
    data = write_jsonl(tmp_path / "d.jsonl", "a b", "c")
    got = calibration_set(folder, data=data, num_sequences=1, seq_len=7, seed=0)
    assert got.tokens.tolist() == [[0, 3, 4, 1, 0, 5, 1]]
    assert got.notes == ()


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ ' g ' if m.role == 'user' else ' h ' }}{{ m.content }}{{ ' j' if m.role == 'user' else eos_token }}{% endfor %}"
)


def chat_folder(folder: Path) -> Path:
    """A tokenizer that adds <s> itself, as its chat template does; g stands before users, h before assistants."""
    save_tokenizer(folder, bos=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_conversations_are_written_by_the_template_with_one_bos(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "tok")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"messages": turns}) + "\n" + json.dumps({"text": "d"}) + "\n")
    got = calibration_set(folder, data=data, num_sequences=1, seq_len=11, seed=0)
    assert got.tokens.tolist() == [[0, 9, 3, 12, 10, 4, 5, 1, 0, 6, 1]]  # <s> g a j h b c </s>, then <s> d </s>
    assert got.chat_template == hashlib.sha256(TEMPLATE.encode()).hexdigest()
    assert got.facts()["chat_template"] == got.chat_template
    assert got.notes == ("d.jsonl: 1 of 2 documents are written in the model's chat template",)


def test_plain_documents_become_answers_where_wanted(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "d.jsonl", "a b", "c")
    with_template, without = chat_folder(tmp_path / "tok"), save_tokenizer(tmp_path / "plain", bos=True)

    def tokens(folder: Path, chat: bool | None, count: int) -> Any:
        return calibration_set(folder, data=data, num_sequences=1, seq_len=count, seed=0, chat=chat)

    # "Write a text." is <unk> a <unk> <unk> in this vocabulary
    answers = [0, 9, 2, 3, 2, 2, 12, 10, 3, 4, 1, 0, 9, 2, 3, 2, 2, 12, 10, 5, 1]
    plain = [0, 3, 4, 1, 0, 5, 1]
    assert tokens(with_template, True, 21).tokens.tolist() == [answers]
    assert tokens(with_template, None, 21).tokens.tolist() == [answers]
    assert tokens(with_template, False, 7).tokens.tolist() == [plain]
    assert tokens(with_template, False, 7).chat_template is None
    assert tokens(without, None, 7).tokens.tolist() == [plain]
    with pytest.raises(QtoolError, match="the model has no chat template; calibrate it on plain text"):
        tokens(without, True, 7)


def test_a_conversation_that_the_template_refuses_names_its_line(tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"text": "a"}\n\n{"messages": [{"role": "tool", "content": "a"}]}\n')
    with pytest.raises(QtoolError, match=r"d\.jsonl, line 3: the model's chat template refuses .*no tools here"):
        calibration_set(chat_folder(tmp_path / "tok"), data=data, num_sequences=9, seq_len=9, seed=0)
    with pytest.raises(QtoolError, match=r"d\.jsonl, line 3: is a conversation, and the model has no chat template"):
        calibration_set(save_tokenizer(tmp_path / "plain"), data=data, num_sequences=9, seq_len=9, seed=0)


def test_too_little_text_is_told(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tok")
    data = write_jsonl(tmp_path / "d.jsonl", "a b c d", "e f")
    got = calibration_set(folder, data=data, num_sequences=4, seq_len=3, seed=0)
    assert got.tokens.shape == (2, 3)
    assert "2 sequences of 3 tokens, not 4; the last 2 tokens" in got.notes[-1]
    with pytest.raises(QtoolError, match="8 tokens of text, too short for one sequence of 16"):
        calibration_set(folder, data=data, num_sequences=1, seq_len=16, seed=0)


def test_seed_and_settings_are_in_the_fingerprint(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tok")
    data = write_jsonl(tmp_path / "d.jsonl", *(f"{a} {b} {a} {b}" for a in "abcdefg" for b in "hij"))

    def make(**options: Any) -> Any:
        return calibration_set(folder, data=data, **({"num_sequences": 3, "seq_len": 4, "seed": 0} | options))

    first = make()
    assert make().fingerprint == first.fingerprint
    assert len({first.fingerprint, make(seed=1).fingerprint, make(seq_len=5).fingerprint}) == 3
    assert not torch.equal(make(seed=1).tokens, first.tokens)
    assert torch.equal(make(seed=1).tokens, make(seed=1).tokens)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", "holds no text"),
        ("blank.txt", b" \n\n", "holds no text"),
        ("latin.txt", b"caf\xe9 au lait", r"not UTF-8 text \(byte 3\)"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": ', 'line 2: expected a JSON object with a "text" string'),
        ("half.jsonl", b'{"text": "\\ud83d\\ude00"}\n{"text": "\\ud83d"}', "line 2: holds half of a surrogate pair"),
        ("roles.jsonl", b'{"messages": [{"role": "user"}]}', 'line 1: expected .* objects with "role" and "content"'),
        ("silent.jsonl", b'{"messages": []}', "line 1: expected"),
        (
            "talk.jsonl",
            b'{"messages": [{"role": "user", "content": "a"}]}',
            'line 1: is a conversation; expected a "text"',
        ),
        ("other.jsonl", b'{"prompt": "a"}\n', "line 1: expected"),
        ("number.jsonl", b'{"text": 3}\n', "line 1: expected"),
        ("table.csv", b"a,b\n", "expected a .txt file"),
    ],
)
def test_bad_data_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(QtoolError, match=message):
        read_documents(tmp_path / name)


def test_bad_sizes_and_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(QtoolError, match="no such file"):
        calibration_set(tmp_path, data=tmp_path / "no.txt", num_sequences=1, seq_len=4, seed=0)
    for sequences, length in ((0, 4), (1, 1)):
        with pytest.raises(QtoolError, match="at least 1 sequence of 2 tokens"):
            calibration_set(tmp_path, data=None, num_sequences=sequences, seq_len=length, seed=0)
    with pytest.raises(QtoolError, match="no tokenizer that loads"):
        calibration_set(tmp_path, data=write_jsonl(tmp_path / "d.jsonl", "a"), num_sequences=1, seq_len=2, seed=0)


def test_stdlib_splits_share_nothing() -> None:
    calibration, evaluation = stdlib_documents("calibration"), stdlib_documents("evaluation")
    assert not set(calibration) & set(evaluation)
    assert sum(map(len, calibration)) > 1_000_000  # about 4 characters a token: 128 sequences of 2048
    assert sum(map(len, evaluation)) > 200_000
    assert max(map(len, calibration)) <= 4000


def save_model(folder: Path, family: str, **options: Any) -> Any:
    config = AutoConfig.for_model(
        family,
        **{
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "initializer_range": 0.2,
        }
        | options,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # not the ones and zeros of a fresh model
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


FAMILIES = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-window": ("llama", {"sliding_window": 5}),  # of a converter: no Llama has one
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
}


def logits_after(walker: BlockWalker) -> torch.Tensor:
    with torch.no_grad():
        return walker.head()(torch.cat(list(walker.states)))


@pytest.mark.parametrize("case", FAMILIES)
def test_walk_equals_the_whole_model(tmp_path: Path, case: str) -> None:
    family, options = FAMILIES[case]
    model = save_model(tmp_path / "m", family, **options)
    tokens = torch.randint(64, (5, 24), generator=torch.Generator().manual_seed(1))
    with Checkpoint(tmp_path / "m") as checkpoint:
        walker = BlockWalker(checkpoint, tokens, batch_tokens=50)
        seen = [block.name for block in walker]
        logits = logits_after(walker)
    assert seen == ["model.layers.0", "model.layers.1", "model.layers.2"]
    with torch.no_grad():
        torch.testing.assert_close(logits, model(tokens).logits, rtol=1e-5, atol=1e-5)


def test_changed_weights_propagate(tmp_path: Path) -> None:
    model = save_model(tmp_path / "m", "llama")
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))
    with Checkpoint(tmp_path / "m") as checkpoint:
        walker = BlockWalker(checkpoint, tokens)
        for block in walker:
            if block.index == 1:
                block.linears["model.layers.1.mlp.down_proj"].weight.data.mul_(-0.5)
        logits = logits_after(walker)
    model.model.layers[1].mlp.down_proj.weight.data.mul_(-0.5)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(tokens).logits, rtol=1e-5, atol=1e-5)


def test_capture_gives_the_inputs_of_linears(tmp_path: Path) -> None:
    model = save_model(tmp_path / "m", "qwen3")
    tokens = torch.randint(64, (3, 10), generator=torch.Generator().manual_seed(1))
    want: dict[str, torch.Tensor] = {}
    for name in ("model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args, name=name: want.__setitem__(name, args[0].flatten(0, 1))
        )
    with torch.no_grad():
        model(tokens)
    got: dict[str, list[torch.Tensor]] = {name: [] for name in want}
    with Checkpoint(tmp_path / "m") as checkpoint:
        for block in BlockWalker(checkpoint, tokens, batch_tokens=10):
            if block.index == 1:
                assert [name.rpartition(".")[2] for name in block.linears] == [
                    "q_proj",
                    "k_proj",
                    "v_proj",
                    "o_proj",
                    "gate_proj",
                    "up_proj",
                    "down_proj",
                ]
                block.capture(want, lambda name, x: got[name].append(x))
    for name in want:
        assert len(got[name]) == 3
        torch.testing.assert_close(torch.cat(got[name]), want[name], rtol=1e-5, atol=1e-5)


def test_walk_refuses_quantized_models(tmp_path: Path) -> None:
    save_model(tmp_path / "m", "llama")
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with Checkpoint(tmp_path / "m") as checkpoint:
        checkpoint.config["quantization_config"] = {"quant_method": "gptq"}
        with pytest.raises(QtoolError, match="is quantized already"):
            BlockWalker(checkpoint, tokens)


def test_marks_and_separators_of_unicode_are_no_line_ends(tmp_path: Path) -> None:
    """A byte order mark is dropped, and U+2028 inside a JSON string does not cut its line."""
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b'\xef\xbb\xbf{"text": "one\xe2\x80\xa8still one"}\r\n{"text": "two"}\r\n')
    assert read_documents(rows) == ["one\u2028still one", "two"]
    plain = tmp_path / "plain.txt"
    plain.write_bytes(b"\xef\xbb\xbfhello")
    assert read_documents(plain) == ["hello"]
