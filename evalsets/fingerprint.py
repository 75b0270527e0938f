"""What must be equal for two evaluations to be comparable, and what must be known to repeat one."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from typing import Any

import torch

_PROBES = (
    "Hello, world!  Two spaces,\ttabs\nand 12345 digits.",
    "def f(x):\n    return x ** 2",
    "今天天气很好。",
    "naïve 🙂",
)
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
