"""A Python environment with pinned packages in the cache folder, made once, shared by later runs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from qtool.quant.errors import QtoolError
from qtool.quant.progress import ProgressFn, silent

MARKER = "qtool-environment.json"  # written last: without it the environment is not whole


@dataclass(frozen=True)
class EnvironmentSpec:
    """What an environment holds.

    Attributes:
        name: for people and for the folder.
        steps: what pip installs, call by call; each is a tuple of its arguments.
        variables: environment variables of the installation.
    """

    name: str
    steps: tuple[tuple[str, ...], ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    def facts(self) -> dict[str, object]:
        """What the marker says: an environment that was made of other packages is another one."""
        return {"name": self.name, "python": sys.version.split()[0], "steps": [list(step) for step in self.steps]}

    def folder(self, parent: Path) -> Path:
        """Where it lies: the name and a hash of what it holds. A venv cannot be moved, so it is made in place."""
        digest = hashlib.sha256(json.dumps(self.facts()).encode()).hexdigest()[:12]
        return parent / f"{self.name}-{digest}"


def ensure(spec: EnvironmentSpec, parent: Path, progress: ProgressFn = silent) -> Path:
    """The Python of the environment; makes it first where it is missing or was cut short.

    One process makes it, others wait. After a kill the next call goes on with what pip has already installed.

    Raises:
        QtoolError: venv or pip failed; their last line is in it, all of it in the log file that it names.
    """
    folder = spec.folder(parent)
    python = folder / "bin" / "python"
    parent.mkdir(parents=True, exist_ok=True)
    stage = f"make the environment {folder.name}"
    with FileLock(parent / f".{folder.name}.lock"):
        if is_whole(folder, spec):
            return python
        log = parent / f"{folder.name}.log"
        log.write_bytes(b"")
        progress(stage, 0, len(spec.steps) + 1)
        if not _works(python):
            shutil.rmtree(folder, ignore_errors=True)  # cut short before there was a Python in it
            _call([sys.executable, "-m", "venv", str(folder)], spec, log)
        for done, step in enumerate(spec.steps, start=1):
            progress(stage, done, len(spec.steps) + 1)
            _call([str(python), "-m", "pip", "install", "--disable-pip-version-check", *step], spec, log)
        partial = folder / f"{MARKER}.partial"
        partial.write_text(json.dumps(spec.facts(), indent=1), encoding="utf-8")
        partial.replace(folder / MARKER)
        progress(stage, len(spec.steps) + 1, len(spec.steps) + 1)
    return python


def is_whole(folder: Path, spec: EnvironmentSpec) -> bool:
    """Whether the environment was finished, of these very packages."""
    try:
        found = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(found == spec.facts()) and (folder / "bin" / "python").exists()


def _works(python: Path) -> bool:
    """Whether this Python runs and has pip."""
    try:
        return subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _call(command: list[str], spec: EnvironmentSpec, log: Path) -> None:
    with log.open("ab") as out:
        variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(
            command, stdout=out, stderr=subprocess.STDOUT, check=False, env={**variables, **spec.variables}
        )
    if done.returncode:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
        raise QtoolError(
            f"the environment {spec.name} could not be made: {errors[-1].strip()} (log: {log}); "
            "run the command again when the cause is gone: it goes on where it stopped"
        )
