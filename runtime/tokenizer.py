"""A model folder's tokenizer, and the tokens that end its outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from qtool.quant.errors import QtoolError


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder. Raises QtoolError where there is none or it is damaged."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise QtoolError(f"{folder}: no tokenizer (tokenizer.json) in the model folder")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises whatever its parsers raise
        reason = " ".join(str(error).split())
        raise QtoolError(f"{folder}: the tokenizer cannot be read ({type(error).__name__}: {reason})") from None


def eos_token_ids(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    """End-of-sequence ids of generation_config.json, else of config.json.

    Raises:
        QtoolError: generation_config.json is no JSON object, or the ids are none.
    """
    found, path = config.get("eos_token_id"), folder / "config.json"
    if (own := folder / "generation_config.json").is_file():
        try:
            generation = json.loads(own.read_text(encoding="utf-8"))
        except ValueError as error:
            raise QtoolError(f"{own}: not valid JSON ({error})") from None
        if not isinstance(generation, dict):
            raise QtoolError(f"{own}: expected a JSON object, found {type(generation).__name__}")
        if "eos_token_id" in generation:
            found, path = generation["eos_token_id"], own
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise QtoolError(f"{path}: eos_token_id must be a token id or a list of them, got {found!r}")
    return frozenset(ids)
