"""Where kernels run that need a GPU: on one, or in the emulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ptx.device import DEVICE, HOPPER, emulated
from ptx.machine import Order

from qtool.quant.errors import QtoolError


@pytest.fixture
def gpu_or_emulator(request: pytest.FixtureRequest) -> Iterator[None]:
    """ "cuda" is a GPU where there is one, else an emulated Hopper, with threads in the usual order and in another.

    A test that is marked `one_warp` runs with the first or the last warp as far as it goes, too: slow, since no two run
    together. One marked `before_hopper` runs on an Ada, too.
    """
    order, capability = request.param
    if torch.cuda.is_available() and not request.config.getoption("--emulated"):
        if (order, capability) != (None, HOPPER):
            pytest.skip("a GPU has an order and a capability of its own")
        yield
        return
    try:
        with emulated(capability):
            DEVICE.order = order
            yield
    except QtoolError as error:
        pytest.skip(str(error))


@pytest.fixture
def needs_hopper() -> None:
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("warpgroup tensor cores and the tensor copy engine are Hopper's")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "gpu_or_emulator" in metafunc.fixturenames:
        ways: dict[str, tuple[Order, tuple[int, int]]] = {"in order": (None, HOPPER), "in any order": (1, HOPPER)}
        if metafunc.definition.get_closest_marker("one_warp"):
            ways |= {"first warp": ("first", HOPPER), "last warp": ("last", HOPPER)}
        if metafunc.definition.get_closest_marker("before_hopper"):
            ways |= {"Ada": (None, (8, 9))}
        metafunc.parametrize("gpu_or_emulator", ways.values(), ids=list(ways), indirect=True)
