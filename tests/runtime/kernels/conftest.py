"""Where kernels run that need a GPU: on one, or in the emulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ptx.device import DEVICE, emulated
from ptx.machine import Order

from qtool.quant.errors import QtoolError


@pytest.fixture
def gpu_or_emulator(request: pytest.FixtureRequest) -> Iterator[None]:
    """ "cuda" is a GPU where there is one, else the emulator, with threads in the usual order and in another.

    A test that is marked `one_warp` runs with the first or the last warp as far as it goes, too: slow, since no two run
    together.
    """
    if torch.cuda.is_available() and not request.config.getoption("--emulated"):
        if request.param is not None:
            pytest.skip("a GPU has an order of its own")
        yield
        return
    try:
        with emulated():
            DEVICE.order = request.param
            yield
    except QtoolError as error:
        pytest.skip(str(error))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "gpu_or_emulator" in metafunc.fixturenames:
        orders: dict[str, Order] = {"in order": None, "in any order": 1}
        if metafunc.definition.get_closest_marker("one_warp"):
            orders |= {"first warp": "first", "last warp": "last"}
        metafunc.parametrize("gpu_or_emulator", orders.values(), ids=list(orders), indirect=True)
