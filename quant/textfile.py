"""Small files: written whole or not at all, and JSON read with one line for whatever is wrong with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from qtool.quant.errors import QtoolError


def check_writable(path: Path) -> None:
    """Raise QtoolError where `path` cannot become a file: before long work, not after it."""
    parent = path.absolute().parent
    if path.is_dir():
        raise QtoolError(f"{path}: is a folder, expected the name of a file to write")
    if not parent.is_dir():
        raise QtoolError(f"{path}: the folder {parent} does not exist")
    if not os.access(parent, os.W_OK):
        raise QtoolError(f"{path}: the folder {parent} is not writable")


def check_folder(path: Path) -> None:
    """Raise QtoolError where `path` cannot become, or is no, folder to write into."""
    if path.exists() and not path.is_dir():
        raise QtoolError(f"{path}: is a file; give a folder")
    # a link that leads nowhere, or in a circle, stands there too
    existing = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists() or p.is_symlink())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise QtoolError(f"{path}: {existing} is not a folder that can be written to")


def write_text(path: Path, text: str) -> None:
    """Write beside `path`, then rename: a reader never sees half a file. An older file of that name is replaced.

    Raises:
        QtoolError: the file cannot be written (a full disk, say); nothing is left of it.
    """
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """As write_text, for what is no text."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise QtoolError(f"{path}: cannot be written ({error.strerror or error})") from None
    finally:
        partial.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """The document of a JSON file (UTF-8, with a byte order mark or without).

    Raises:
        QtoolError: not UTF-8, not JSON, or nested deeper than any file of ours.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError:
        raise QtoolError(f"{path}: not valid JSON (nested too deeply)") from None
    except ValueError as error:  # a decoding error is one too
        raise QtoolError(f"{path}: not valid JSON ({error})") from None
