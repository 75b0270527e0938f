"""Runs that were made before, in one SQLite file: for the trend in the report, and for the last that passed."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from qtool.evalsets.compare import Comparison
from qtool.evalsets.kept import digest
from qtool.evalsets.statistics import Verdict
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.fingerprint import model_fingerprint
from qtool.quant.hub import resolve_model
from qtool.quant.textfile import check_folder

FILE = "history.sqlite"
SHOWN_RUNS = 50
_VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS run (
    id INTEGER PRIMARY KEY, started TEXT NOT NULL, series TEXT NOT NULL, base TEXT NOT NULL, candidate TEXT NOT NULL,
    model TEXT NOT NULL, fingerprint TEXT NOT NULL, bytes INTEGER NOT NULL, verdict TEXT NOT NULL,
    against TEXT NOT NULL, settings TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS metric (
    run INTEGER NOT NULL REFERENCES run(id), place INTEGER NOT NULL, name TEXT NOT NULL, base REAL, candidate REAL,
    loss REAL, threshold REAL NOT NULL, verdict TEXT NOT NULL, PRIMARY KEY (run, name)
);
CREATE INDEX IF NOT EXISTS run_series ON run (series, id);
"""


@dataclass(frozen=True)
class Past:
    """One run of a series: `losses` are multiples of each metric's limit, None where not a finite number."""

    started: str
    candidate: str
    bytes: int
    verdict: Verdict
    losses: dict[str, float | None]


def series_of(comparison: Comparison) -> str:
    """What runs share whose numbers may stand in one trend: the base, the tokenizer and every question (sha256, hex).

    Limits may differ from run to run, and so may the candidate and how it is served.
    """
    s = comparison.settings
    return digest(
        {
            "base": comparison.base.fingerprint,
            "tokenizer": s["tokenizer"],
            "text": [s["text"][name] for name in ("fingerprint", "windows", "context")],
            "tasks": [[task["name"], task["fingerprint"]] for task in s["tasks"]],
            "lm_eval": [s["lm_eval_tasks"], s["lm_eval_limit"]],
        }
    )


class History:
    """The runs in a folder; made where there is none.

    Raises:
        QtoolError: a path that cannot become a folder to write into, a damaged file, or one of another version.
    """

    def __init__(self, folder: Path) -> None:
        check_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        with self._open() as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                db.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {_VERSION}; COMMIT;")
            elif version != _VERSION:
                raise QtoolError(
                    f"{self.path}: of version {version}, this qtool reads {_VERSION}; use another --history"
                )

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A connection for one block: committed at its end, rolled back on an error."""
        try:
            with closing(sqlite3.connect(self.path, timeout=30)) as db, db:
                yield db
        except sqlite3.Error as error:
            raise QtoolError(f"{self.path}: cannot be used as a history ({error}); use another --history") from None

    def add(self, comparison: Comparison, against: str = "") -> None:
        """Record a run, whole or not at all; `against` tells how its base was chosen ("" by name)."""
        c = comparison
        folder = Path(c.candidate.name)
        model = str(folder.absolute()) if folder.is_dir() else c.candidate.name
        facts = (
            c.started, series_of(c), c.base.name, c.candidate.name, model, c.candidate.fingerprint, c.candidate.bytes,
            c.verdict.value, against, json.dumps(c.settings),
        )  # fmt: skip
        with self._open() as db:
            run = db.execute(
                "INSERT INTO run (started, series, base, candidate, model, fingerprint, bytes, verdict, against,"
                " settings) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                facts,
            ).lastrowid
            db.executemany(
                "INSERT INTO metric VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (run, i, m.name, m.base, _finite(m.candidate), _finite(m.loss), m.threshold, m.verdict.value)
                    for i, m in enumerate(c.metrics)
                ],
            )

    def series(self, key: str) -> list[Past]:
        """The last runs of a series (see `series_of`), oldest first."""
        with self._open() as db:
            runs = db.execute(
                "SELECT id, started, candidate, bytes, verdict FROM run WHERE series = ? ORDER BY id DESC LIMIT ?",
                (key, SHOWN_RUNS),
            ).fetchall()
            past = []
            for run, started, candidate, size, verdict in reversed(runs):
                losses = db.execute("SELECT name, loss, threshold FROM metric WHERE run = ? ORDER BY place", (run,))
                by_name = {name: None if loss is None else loss / threshold for name, loss, threshold in losses}
                past.append(Past(started, candidate, size, Verdict(verdict), by_name))
        return past

    def last_pass(self) -> str:
        """The model that passed last, to compare others with.

        Runs that were themselves made against a last pass are left out: a chain of small losses would add up.

        Raises:
            QtoolError: none has passed, or the model is no longer there, or no longer the same.
        """
        with self._open() as db:
            found = db.execute(
                "SELECT model, fingerprint, started FROM run WHERE verdict = 'PASS' AND against = '' ORDER BY id DESC"
            ).fetchone()
        if found is None:
            raise QtoolError(f"--against last-pass: no run in {self.path} has passed yet; compare with a base by name")
        model, fingerprint, started = found
        try:
            with Checkpoint(resolve_model(model)) as checkpoint:
                same = model_fingerprint(checkpoint) == fingerprint
        except QtoolError as error:
            raise QtoolError(f"--against last-pass: what passed on {started} cannot be opened ({error})") from None
        if not same:
            raise QtoolError(f"--against last-pass: {model} was changed after it passed on {started}; bring it back")
        return str(model)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def metric_names(past: Sequence[Past]) -> list[str]:
    """Every metric of the runs, in order of appearance."""
    return list(dict.fromkeys(name for run in past for name in run.losses))
