"""The model that a config.json describes, without its weights; and whether a checkpoint holds what it takes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.structure import structure_of

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def skeleton(folder: Path) -> nn.Module:
    """transformers' model for the folder's config, on the meta device. Raises QtoolError where the config is none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    except Exception as error:  # every field has a check of its own, each with its own kind of error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise QtoolError(f"{folder / 'config.json'}: transformers makes no model of it ({reason})") from None
    return model


def check_tensors(checkpoint: Checkpoint) -> None:
    """Whether a checkpoint holds every tensor of its model, in floating point and of the shape that its config says.

    Raises:
        QtoolError: the first that is missing or another, by name; a config that transformers makes no model of.
    """
    structure = structure_of(checkpoint.config)
    wanted = {name: tuple(tensor.shape) for name, tensor in skeleton(checkpoint.folder).state_dict().items()}
    if structure.tied_head:
        wanted.pop(f"{structure.head}.weight", None)
    if missing := [name for name in wanted if name not in checkpoint]:
        raise QtoolError(
            f"{checkpoint.folder}: {len(missing)} tensors that config.json asks for are missing, first {missing[0]}; "
            "is the download complete?"
        )
    for name, shape in wanted.items():
        if checkpoint.shape(name) != shape:
            raise QtoolError(
                f"{checkpoint.folder}: {name} has shape {checkpoint.shape(name)}, config.json says {shape}"
            )
        if (dtype := checkpoint.tensor(name).dtype) not in _FLOATS:
            raise QtoolError(
                f"{checkpoint.folder}: {name} is {str(dtype).removeprefix('torch.')}; start from the model in 16 or "
                "32 bits"
            )
