"""What `--device` means."""

from __future__ import annotations

import torch

from qtool.quant.errors import QtoolError


def resolve_device(name: str) -> torch.device:
    """`auto` (the first GPU where there is one), `cpu`, `cuda` or `cuda:N`.

    Raises:
        QtoolError: another name, or a GPU that is not on this machine.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda:0" if gpus else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise QtoolError(f"device {name!r} is not known: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise QtoolError(f"device {name!r} is not on this machine ({gpus} CUDA devices found): use cpu")
    return device
