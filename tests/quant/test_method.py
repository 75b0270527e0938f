"""How a method's name becomes stages, and what does not combine."""

from __future__ import annotations

from pathlib import Path

import pytest

from qtool.quant.errors import QtoolError
from qtool.quant.method import Stages, parse_method
from qtool.quant.pipeline import quantize
from qtool.quant.scheme import QuantScheme


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("rtn", Stages()),
        ("gptq", Stages(compensate=True)),
        ("rounding", Stages(compensate=True, search=True)),
        ("awq", Stages(scale="awq")),
        ("awq+rtn", Stages(scale="awq")),
        ("smoothquant+gptq", Stages(scale="smoothquant", compensate=True)),
        ("rotation+rtn", Stages(rotate=True)),
        ("rotation+awq+rounding", Stages(rotate=True, scale="awq", compensate=True, search=True)),
    ],
)
def test_stages_of_a_name(name: str, stages: Stages) -> None:
    assert parse_method(name) == stages
    assert stages.calibrated == (name not in ("rtn", "rotation+rtn"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("magic", "unknown method 'magic': join by"),
        ("", "unknown method ''"),
        ("gptq+", "unknown method"),
        ("gptq+awq", "awq comes before gptq"),
        ("awq+rotation", "rotation comes before awq"),
        ("awq+smoothquant", "awq and smoothquant do not combine"),
        ("gptq+rounding", "gptq and rounding do not combine"),
        ("gptq+gptq", "gptq and gptq do not combine"),
    ],
)
def test_what_does_not_combine_is_refused(name: str, message: str) -> None:
    with pytest.raises(QtoolError, match=message) as refusal:
        parse_method(name)
    assert "\n" not in str(refusal.value)


def test_smoothquant_needs_quantized_activations_and_a_share(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(QtoolError, match="no layer has them: use --w-bit 8 --a-bit 8"):
        quantize(tiny_llama, tmp_path / "out", scheme=QuantScheme(8), method="smoothquant")
    with pytest.raises(QtoolError, match=r"alpha 1\.5 is not from 0"):
        quantize(tiny_llama, tmp_path / "out", scheme=QuantScheme(8, act_bits=8), method="smoothquant", alpha=1.5)
