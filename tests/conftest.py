"""Shared fixtures: where development data lies, the default model, tiny random models."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of development data beside the checkout; tests that need it skip where it is missing."""
    if not SHARED.is_dir():
        pytest.skip("the development data folder (shared/, beside the checkout) is not on this machine")
    return SHARED


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The folder of the default model, fetched on first use."""
    from qtool.quant.errors import QtoolError
    from qtool.quant.hub import resolve_model

    try:
        return resolve_model("smollm2-135m")
    except QtoolError as error:
        pytest.skip(str(error))
