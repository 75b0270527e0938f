"""Answers of one model, kept on disk by the fingerprint of everything that they depend on.

One folder a model and way of serving it, one file a part (a set's answers, the logits of a text), each written beside
and renamed: a later run reads what an earlier one finished, and a killed run goes on after its last finished part.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from qtool.quant.errors import QtoolError
from qtool.quant.hub import cache_folder
from qtool.quant.textfile import read_json, write_text

log = logging.getLogger(__name__)

BUDGET = 20_000_000_000  # bytes of all that is kept; what was not used for longest goes first

T = TypeVar("T")


def baseline_folder() -> Path:
    """Where answers are kept: `$QTOOL_CACHE/baselines`."""
    return cache_folder() / "baselines"


def digest(document: Any) -> str:
    """sha256 (hex) of a JSON document; equal documents have equal ones."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Kept:
    """One model's kept answers.

    Attributes:
        root: the folder of all models' answers; None: nothing is kept and nothing recalled.
        facts: what the answers depend on: model, tokenizer, precision, device, code (plain JSON).
    """

    root: Path | None
    facts: Mapping[str, Any]

    @property
    def key(self) -> str:
        return digest(self.facts)[:32]

    def path(self, part: str, facts: Mapping[str, Any], suffix: str = "json") -> Path | None:
        """Where a part lies that was asked for under `facts`; None where nothing is kept."""
        return None if self.root is None else self.root / self.key / f"{part}-{digest(facts)[:24]}.{suffix}"

    def recall(self, part: str, facts: Mapping[str, Any], read: Callable[[Any], T]) -> T | None:
        """`read` of what an earlier run kept, or None where there is nothing or it is damaged (which is said).

        Raises:
            QtoolError: the file says that it belongs to another model or question; it is never compared with.
        """
        path = self.path(part, facts)
        if path is None or not path.is_file():
            return None
        try:
            document = read_json(path)
            if document.pop("sha256") != digest(document):
                raise ValueError("its checksum differs")
            belongs = document["model"] == self.facts and document["part"] == facts
            found = read(document["body"]) if belongs else None
        except FileNotFoundError:
            return None  # the logits were removed for room
        except (OSError, QtoolError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s is damaged (%s): evaluated again", path, error)
            return None
        if found is None:
            raise QtoolError(f"{path}: kept for another model or other questions, not to be compared with; remove it")
        with suppress(OSError):
            path.touch()  # see `tidy`
        return found

    def keep(self, part: str, facts: Mapping[str, Any], body: Any) -> None:
        """Keep a part for later runs. A folder that cannot be written to costs a later run time, never this one."""
        path = self.path(part, facts)
        if path is None:
            return
        document = {"model": self.facts, "part": facts, "body": body}
        with suppress(OSError, QtoolError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps({**document, "sha256": digest(document)}))

    def room(self, size: int) -> bool:
        """Make room for `size` bytes; False where keeping them would take over half of the disk's free space."""
        if self.root is None or size > BUDGET:
            return False
        try:
            (self.root / self.key).mkdir(parents=True, exist_ok=True)
            tidy(self.root, BUDGET - size)
            return size <= shutil.disk_usage(self.root).free // 2
        except OSError:
            return False


def tidy(root: Path, budget: int) -> None:
    """Remove what was not used for longest until no more than `budget` bytes are kept under `root`."""
    files = sorted(((p.stat(), p) for p in root.glob("*/*") if p.is_file()), key=lambda entry: -entry[0].st_mtime)
    total = 0
    for stat, path in files:
        total += stat.st_size
        if total > budget:
            path.unlink(missing_ok=True)
