"""AutoAWQ 0.2.9 (github.com/casper-hansen/AutoAWQ) itself: what it can do, and the call. Needs the extra `autoawq`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qtool.quant.backends.script import run_script
from qtool.quant.calibration import CalibrationSet
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.progress import ProgressFn
from qtool.quant.scheme import PER_CHANNEL, QuantScheme

NAME = "autoawq"
METHOD, FORMAT = "awq", "awq"
SYMMETRIC = False  # unless told otherwise
STAGE = "quantize (AutoAWQ)"
_SCRIPT = Path(__file__).with_name("autoawq_script.py")
_CLIPPED_ROWS = 64  # its search for clip values takes so many rows at a time, of all linears but q and k


def check(scheme: QuantScheme, model_type: str, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Refuse what AutoAWQ cannot do. Raises QtoolError."""
    if scheme.bits != 4:
        raise QtoolError(f"--backend {NAME}: AutoAWQ stores 4 bits alone, not {scheme.bits}: use --w-bit 4")
    if scheme.group_size == PER_CHANNEL:
        raise QtoolError(f"--backend {NAME}: AutoAWQ has no scales per channel (--group -1): use 128, 64 or 32")
    if scheme.symmetric:
        raise QtoolError(f"--backend {NAME}: AutoAWQ's GEMM layout has zero points always: leave --sym out")
    for name, (rows, _) in shapes.items():
        if rows % _CLIPPED_ROWS and not name.endswith(("q_proj", "k_proj")):
            raise QtoolError(f"--backend {NAME}: AutoAWQ needs multiples of {_CLIPPED_ROWS} rows; {name} has {rows}")


def ready() -> None:
    """Raise QtoolError where AutoAWQ is not installed."""
    if importlib.util.find_spec("awq") is None:
        raise QtoolError(
            f"--backend {NAME}: AutoAWQ is not installed here: pip install 'qtool[autoawq]' "
            "(in a checkout: pip install -e '.[autoawq]')"
        )


def run(
    checkpoint: Checkpoint,
    scheme: QuantScheme,
    calibration: CalibrationSet,
    work: Path,
    log: Path,
    progress: ProgressFn,
) -> dict[str, Any]:
    """Quantize into `work/out`; returns versions and settings. See the script for how.

    AutoAWQ loads the model in the dtype of its files and picks the device itself: a GPU where there is one.
    """
    request = {
        "model": str(checkpoint.folder.resolve()),
        "out": str(work / "out"),
        "tokens": calibration.tokens.tolist(),
        "bits": scheme.bits,
        "group_size": scheme.group_size,
    }
    return run_script(Path(sys.executable), _SCRIPT, request, work, log, STAGE, progress)
