"""A backend's script in a process of its own: a request file in, progress lines meanwhile, a result file out."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qtool.quant.errors import QtoolError
from qtool.quant.progress import ProgressFn

_PROGRESS = re.compile(r"@progress (\d+) (\d+)\s*$")  # at a line's end: a progress bar may stand before it


def parse_progress(line: str) -> tuple[int, int] | None:
    """(done, total) of a script's line `@progress DONE TOTAL`, None for any other line of output."""
    found = _PROGRESS.search(line)
    return None if found is None else (int(found[1]), int(found[2]))


def run_script(
    python: Path, script: Path, request: Mapping[str, Any], work: Path, log: Path, stage: str, progress: ProgressFn
) -> dict[str, Any]:
    """Run `python script REQUEST`, where the request says where to write (`out`); return its result.json.

    Whatever ends this process or raises in it ends the script too: it is killed, or finds its pipe closed.

    Args:
        work: folder for the request file.
        log: where the script's output goes.
        stage: what `progress` is told.

    Raises:
        QtoolError: the script failed; the last line that it printed is in it.
    """
    request_file = work / "request.json"
    request_file.write_text(json.dumps(request), encoding="utf-8")
    # its own Python's packages alone: neither ours nor those beside the script
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"TOKENIZERS_PARALLELISM": "false"}
    command = [str(python), "-P", str(script), str(request_file)]
    last, total = "", 1
    with (
        log.open("w", encoding="utf-8", buffering=1) as out,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=variables,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                found = parse_progress(line)
                if found is not None:
                    done, total = found
                    progress(stage, done, total)
                    continue
                out.write(line)
                last = line.strip() or last
            status = process.wait()
        finally:
            process.kill()  # of no effect on one that has ended
    result = Path(request["out"], "result.json")
    if status or not result.is_file():
        raise QtoolError(f"{stage} failed: {last or f'exit status {status}'} (log: {log})")
    progress(stage, total, total)
    document: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    result.unlink()
    return document
