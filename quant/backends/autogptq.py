"""AutoGPTQ 0.7.1 (github.com/AutoGPTQ/AutoGPTQ) itself, in an environment of its own that is made at the first use.

It needs transformers ≤ 4.53.3: the model's config is put into that version's terms, and before the work begins the
first block's output there is compared with ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from qtool.quant.backends.environment import EnvironmentSpec, ensure
from qtool.quant.backends.script import run_script
from qtool.quant.calibration import BlockWalker, CalibrationSet
from qtool.quant.checkpoint import INDEX, Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.hub import cache_folder
from qtool.quant.progress import ProgressFn
from qtool.quant.scheme import QuantScheme

NAME = "auto-gptq"
METHOD, FORMAT = "gptq", "gptq"
SYMMETRIC = True  # unless told otherwise
STAGE = "quantize (AutoGPTQ)"
MODEL_TYPES = ("llama", "mistral", "qwen2")  # of those that qtool reads
_SCRIPT = Path(__file__).with_name("autogptq_script.py")
_WORD_ROWS = 32  # its packing takes so many rows at a time


def environment_spec() -> EnvironmentSpec:
    """The packages that AutoGPTQ 0.7.1 works with, beside the torch that runs here.

    It is built from source without its CUDA kernels: they serve models, and need a torch of early 2024.
    """
    torch_pin = f"torch=={torch.__version__.partition('+')[0]}"
    build = ("numpy==2.4.6", "setuptools==80.9.0", "wheel==0.45.1")
    return EnvironmentSpec(
        name="auto-gptq-0.7.1",
        steps=(
            (torch_pin, *build),
            (
                "--no-build-isolation",
                "--no-binary=auto-gptq",
                torch_pin,
                *build,
                "auto-gptq==0.7.1",
                "transformers==4.53.3",
                "tokenizers==0.21.4",
                "huggingface_hub==0.36.2",
                "safetensors==0.8.0",
                "accelerate==1.15.0",
                "peft==0.14.0",  # later ones lack a name that AutoGPTQ imports
                "datasets==5.0.1",
                "sentencepiece==0.2.3",
                "rouge==1.0.1",
                "gekko==1.3.3",
            ),
        ),
        variables={"BUILD_CUDA_EXT": "0"},
    )


def check(scheme: QuantScheme, model_type: str, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Refuse what AutoGPTQ cannot do. Raises QtoolError."""
    if model_type not in MODEL_TYPES:
        raise QtoolError(
            f"--backend {NAME}: AutoGPTQ does not know {model_type} models: it knows {', '.join(MODEL_TYPES)}"
        )
    for name, (rows, cols) in shapes.items():
        if rows % _WORD_ROWS or cols % _WORD_ROWS:
            raise QtoolError(
                f"--backend {NAME}: AutoGPTQ packs multiples of {_WORD_ROWS} rows and columns; {name} is {rows}×{cols}"
            )


def ready() -> None:
    """Nothing needs to be installed: `run` makes the environment."""


def legacy_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of transformers 5 in the terms of 4.53: there the rotary base stands by itself, and an unknown
    `rope_parameters` is passed over, which gives another model without a word.
    """
    legacy = {k: v for k, v in config.items() if k not in ("rope_parameters", "dtype", "transformers_version")}
    if "dtype" in config:
        legacy["torch_dtype"] = config["dtype"]
    rope = dict(config.get("rope_parameters") or {})
    if "rope_theta" in rope:
        legacy["rope_theta"] = rope.pop("rope_theta")
    if rope.get("rope_type", "default") != "default":
        legacy["rope_scaling"] = rope
    return legacy


def legacy_folder(checkpoint: Checkpoint, folder: Path) -> None:
    """Make `folder` a model folder for transformers 4.53: its config, and links to the weight files. No tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(legacy_config(checkpoint.config), indent=1), encoding="utf-8")
    index = checkpoint.folder / INDEX
    for path in [*checkpoint.files, *([index] if index.is_file() else [])]:
        (folder / path.name).symlink_to(path.resolve())


def run(
    checkpoint: Checkpoint,
    scheme: QuantScheme,
    calibration: CalibrationSet,
    work: Path,
    log: Path,
    progress: ProgressFn,
    act_order: bool = True,
) -> dict[str, Any]:
    """Quantize into `work/out`; returns versions and settings. See the script for how.

    AutoGPTQ computes in float16 on a GPU where there is one, else in float32.

    Args:
        act_order: columns in the order of their importance, with groups fixed beforehand.
    """
    python = ensure(environment_spec(), cache_folder() / "environments", progress)
    legacy_folder(checkpoint, work / "model")
    walker = BlockWalker(checkpoint, calibration.tokens[:1])
    with torch.no_grad():
        first_block = walker.block(0, walker.states).run(walker.states[0])[0]  # [seq_len, hidden]
    save_file({"first_block": first_block.float().contiguous()}, work / "first_block.safetensors")
    request = {
        "model": str(work / "model"),
        "out": str(work / "out"),
        "tokens": calibration.tokens.tolist(),
        "bits": scheme.bits,
        "group_size": scheme.group_size,
        "symmetric": scheme.symmetric,
        "act_order": act_order,
        "first_block": str(work / "first_block.safetensors"),
    }
    return run_script(python, _SCRIPT, request, work, log, STAGE, progress)
