"""Documents of a text file, and the tokens that a model sees when it is given one."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool.quant.errors import QtoolError

# what a plain document answers, where it is calibrated on as an assistant's turn
REQUEST = "Write a text."
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Document:
    """One document of a file: plain `text`, or a conversation of `messages` (role and content each).

    Attributes:
        where: file and line, for errors.
    """

    where: str
    text: str = ""
    messages: tuple[dict[str, str], ...] = ()


def read_conversations(path: Path) -> list[Document]:
    """The documents of a text file: .jsonl with one {"text": ...} or {"messages": [{"role": ..., "content": ...}, ...]}
    a line, or .txt, which is one document.

    Raises:
        QtoolError: missing, empty or undecodable file, a line that is no such object, or another kind of file.
    """
    if not path.is_file():
        raise QtoolError(f"{path}: no such file")
    if path.suffix not in (".jsonl", ".txt"):
        raise QtoolError(f'{path}: expected a .txt file, or a .jsonl file with one {{"text": ...}} object a line')
    try:
        text = path.read_text(encoding="utf-8-sig")  # a byte order mark is no text
    except UnicodeDecodeError as error:
        raise QtoolError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    if path.suffix == ".txt":
        documents = [Document(str(path), text)]
    else:
        # not splitlines(): JSON strings may hold U+2028 and its like unescaped
        lines = enumerate(text.split("\n"), start=1)
        documents = [_document(f"{path}, line {i}", line) for i, line in lines if line.strip()]
    documents = [d for d in documents if d.text.strip() or d.messages]
    if not documents:
        raise QtoolError(f"{path}: holds no text")
    return documents


def read_documents(path: Path) -> list[str]:
    """The documents of a file of plain text, see read_conversations().

    Raises:
        QtoolError: as there, or a line that is a conversation.
    """
    documents = read_conversations(path)
    for document in documents:
        if document.messages:
            raise QtoolError(f'{document.where}: is a conversation; expected a "text" string')
    return [document.text for document in documents]


def _document(where: str, line: str) -> Document:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if _SURROGATE.search(line) and not _is_unicode(record):
        raise QtoolError(f"{where}: holds half of a surrogate pair (\\ud800 to \\udfff), which is no character")
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return Document(where, record["text"])
    messages = record.get("messages") if isinstance(record, dict) else None
    if isinstance(messages, list) and messages and all(_is_message(m) for m in messages):
        return Document(where, messages=tuple({"role": m["role"], "content": m["content"]} for m in messages))
    raise QtoolError(
        f'{where}: expected a JSON object with a "text" string, or with "messages": a list of objects with "role" and '
        '"content" strings'
    )


def _is_unicode(document: Any) -> bool:
    """Whether all strings of a JSON document are text: JSON can escape halves of a surrogate pair."""
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder. Raises QtoolError where there is none that loads."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # damaged files end in errors of every kind, tokenizers' own are plain Exceptions
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise QtoolError(f"{folder}: no tokenizer that loads ({reason})") from None


def template_fingerprint(tokenizer: Any) -> str | None:
    """sha256 (hex) of the model's chat template; None where it has none."""
    template = tokenizer.chat_template
    if not template:
        return None
    # a tokenizer may have several by name
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def plain_tokens(tokenizer: Any, text: str) -> list[int]:
    """The text with the special tokens that the tokenizer itself adds, and an end-of-sequence token after it."""
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    eos: int | None = tokenizer.eos_token_id
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def chat_tokens(tokenizer: Any, messages: Sequence[dict[str, str]], where: str) -> list[int]:
    """A conversation by the model's chat template. What special tokens there are, the template wrote: none are added.

    Raises:
        QtoolError: the model has no template, or its template refuses the conversation; names `where` it is from.
    """
    if not tokenizer.chat_template:
        raise QtoolError(f"{where}: is a conversation, and the model has no chat template to write it in")
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False)
    except Exception as error:  # a template is a program: jinja's errors, and those of whatever it calls
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise QtoolError(f"{where}: the model's chat template refuses this conversation ({reason})") from None
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def as_answer(text: str) -> tuple[dict[str, str], ...]:
    """The conversation in which an assistant writes `text`."""
    return ({"role": "user", "content": REQUEST}, {"role": "assistant", "content": text})
