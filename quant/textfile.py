"""Small files, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

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


def write_text(path: Path, text: str) -> None:
    """Write beside `path`, then rename: a reader never sees half a file. An older file of that name is replaced."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
