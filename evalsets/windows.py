"""The text that perplexity and divergence are measured on: non-overlapping windows of tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtool.quant.corpus import stdlib_documents
from qtool.quant.documents import read_documents
from qtool.quant.errors import QtoolError

LEAST_WINDOWS = 2  # below it there is no interval


@dataclass(frozen=True)
class TextWindows:
    """Windows of one text.

    Attributes:
        tokens: [windows, context] int64.
        source: where the text is from.
        fingerprint: sha256 (hex) of the tokens.
    """

    tokens: Tensor
    source: str
    fingerprint: str


def text_windows(tokenizer: Any, data: Path | None, *, windows: int, context: int) -> TextWindows:
    """The first `windows` non-overlapping windows of `context` tokens of the text.

    Documents are joined in their order with an end-of-sequence token between them; special tokens are those that the
    tokenizer itself adds. Without `data` the text is excerpts of the Python standard library, from modules that the
    default calibration text does not touch.

    Raises:
        QtoolError: fewer than two windows or tokens, unreadable data, or too little text.
    """
    if windows < LEAST_WINDOWS:
        raise QtoolError(f"--windows {windows}: at least {LEAST_WINDOWS} are needed, for an interval")
    if context < 2:
        raise QtoolError(f"--context {context}: at least 2 tokens are needed, one to predict another from")
    documents = stdlib_documents("evaluation") if data is None else read_documents(data)
    source = "Python standard library (evaluation modules)" if data is None else str(data)
    wanted = windows * context
    ids: list[int] = []
    for document in documents:
        if ids and tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
        ids += tokenizer(document, verbose=False)["input_ids"]
        if len(ids) >= wanted:
            break
    if len(ids) < wanted:
        raise QtoolError(
            f"{source}: {len(ids)} tokens of text, but {windows} windows of {context} need {wanted}; "
            f"give more text, or pass --windows {max(LEAST_WINDOWS, len(ids) // context)} or a smaller --context"
        )
    tokens = torch.tensor(ids[:wanted], dtype=torch.int64).view(windows, context)
    return TextWindows(tokens, source, hashlib.sha256(tokens.numpy().tobytes()).hexdigest())
