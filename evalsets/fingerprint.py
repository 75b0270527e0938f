"""What must be equal for two evaluations to be comparable, and what must be known to repeat one."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from qtool.quant.checkpoint import Checkpoint
from qtool.quant.fingerprint import model_fingerprint

_PROBES = (
    "Hello, world!  Two spaces,\ttabs\nand 12345 digits.",
    "def f(x):\n    return x ** 2",
    "今天天气很好。",
    "naïve 🙂",
)
_CODE = (".py", ".cu", ".cuh", ".cpp")
_PACKAGES = ("qtool", "torch", "transformers", "lm-eval", "compressed-tensors", "numpy", "scipy")


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """sha256 (hex) over what a tokenizer does, so that a saved copy has the same one however its files are written.

    Vocabulary, special tokens, encodings of probe texts (with the BOS that it may add) and chat template count.
    """
    facts = {
        "vocab": tokenizer.get_vocab(),
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id],
        "probes": [tokenizer(text)["input_ids"] for text in _PROBES],
        "template": tokenizer.chat_template,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@cache
def code_fingerprint() -> str:
    """sha256 (hex) over qtool's code that answers depend on, so that answers of another version are not mixed in.

    Read once a process: later edits do not change the code that runs.
    """
    digest = hashlib.sha256()
    for room in ("quant", "runtime", "evalsets"):
        folder = Path(str(files(f"qtool.{room}")))
        for path in sorted(p for p in folder.rglob("*") if p.suffix in _CODE and p.is_file()):
            digest.update(f"{room}/{path.relative_to(folder)}".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def answer_facts(
    checkpoint: Checkpoint, tokenizer_hash: str, *, dtype: str, kv_cache_dtype: str, device: torch.device
) -> dict[str, Any]:
    """All that a served model's answers depend on, beside the questions, as plain JSON.

    The model's own fingerprint takes samples of large weight files, so their sizes and times stand beside it: a layer
    that was changed in place is another model.
    """
    weights = [path.stat() for path in checkpoint.files]
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    else:
        machine = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    versions = {p: importlib.metadata.version(p) for p in ("torch", "transformers", "lm-eval")}
    return {
        "model": model_fingerprint(checkpoint),
        "weights": [[stat.st_size, stat.st_mtime_ns] for stat in weights],
        "tokenizer": tokenizer_hash,
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "device": machine,
        "code": code_fingerprint(),
        "versions": versions,
    }


def environment() -> dict[str, Any]:
    """Versions and machine, for the report."""
    versions: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "versions": versions,
    }
