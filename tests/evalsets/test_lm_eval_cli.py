"""lm-eval's command line finds our model by its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_lm_eval_runs_a_task_of_ones_own_with_model_qtool(tiny: Path, tmp_path: Path) -> None:
    """The right choice is one letter and the wrong one thirty, so that even a random model answers: accuracy 1."""
    rows = [{"text": f"item {n}", "choices": ["x" * 30, "y"], "answer": 1} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "short.yaml").write_text(
        f"""
task: short
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: text
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
    )
    command = [
        sys.executable, "-m", "qtool.evalsets.lm_eval_cli", "run", "--model", "qtool",
        "--model_args", f"pretrained={tiny},dtype=float32", "--device", "cpu",
        "--tasks", "short", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"),
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(path.read_text())
    assert results["results"]["short"]["acc,none"] == 1.0
    assert results["config"]["model"] == "qtool"
