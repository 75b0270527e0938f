"""Where kernels run that need a GPU: on one, or in the emulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ptx.device import Device, emulated

from qtool.quant.errors import QtoolError


@pytest.fixture
def gpu_or_emulator() -> Iterator[Device | None]:
    """The emulator, by which a test sees "cuda"; None where there is a GPU (or all tests are emulated)."""
    if torch.cuda.is_available():
        yield None
        return
    try:
        with emulated() as device:
            yield device
    except QtoolError as error:
        pytest.skip(str(error))
