"""The table of kernel times: what is measured, kept, read again and thrown away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from qtool.quant.scheme import QuantScheme
from qtool.quant.weight import QuantizedWeight
from qtool.runtime.kernels import measure
from qtool.runtime.kernels.measure import LinearCase, LinearTime, kernel_times, measure_linears, read_times, save_times

CPU = torch.device("cpu")
CASES = [LinearCase(64, 64, "w4g32"), LinearCase(64, 64, "fp16"), LinearCase(64, 64, "w8", tokens=3)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path))
    return tmp_path


def test_each_case_is_measured_by_the_kernel_that_serves_it() -> None:
    times = {t.case: t for t in measure_linears([*CASES, CASES[0]], CPU)}
    assert set(times) == set(CASES)
    assert times[CASES[1]].kernel == "dense"
    assert "int4" in times[CASES[0]].kernel or "reference" in times[CASES[0]].kernel
    for case, nbytes in zip(CASES, (64 * 32 + 64 * 2 * 2, 64 * 64 * 2, 64 * 64 + 64 * 2)):
        assert times[case].microseconds > 0
        assert times[case].gb_per_s == pytest.approx(nbytes / times[case].microseconds / 1e3)


def test_random_weights_have_about_unit_gain() -> None:
    for scheme in (None, QuantScheme(4, 32), QuantScheme(8), QuantScheme(4, 64, symmetric=False)):
        weight = measure.random_weight(128, 256, scheme, CPU, torch.float32)
        if isinstance(weight, QuantizedWeight):
            weight.check("random")
            weight = weight.dequantize()
        x = torch.randn(256, generator=torch.Generator().manual_seed(0))
        assert 0.3 < float((weight.float() @ x).std()) < 3


def test_what_was_measured_is_kept_and_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = kernel_times(CASES, CPU)
    monkeypatch.setattr(measure, "measure_linears", lambda *_: pytest.fail("measured again"))
    assert kernel_times(CASES, CPU) == first
    assert read_times(CPU) == first
    assert read_times(CPU, torch.float32) == {}  # another table


def test_later_times_replace_earlier_ones_and_keep_the_rest() -> None:
    a, b = (LinearTime(case, "k", 5.0, 1.0) for case in CASES[:2])
    save_times([a, b], CPU)
    newer = LinearTime(CASES[0], "k", 7.0, 1.0)
    path = save_times([newer], CPU)
    assert read_times(CPU) == {CASES[0]: newer, CASES[1]: b}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("damage", ["version", "kernels", "cut", "negative", "list"])
def test_a_stale_or_damaged_table_is_none(damage: str) -> None:
    path = save_times([LinearTime(CASES[0], "k", 5.0, 1.0)], CPU)
    text = path.read_text()
    document = json.loads(text)
    if damage == "version":
        document["torch_version"] = "1.0"
    elif damage == "kernels":
        document["kernels"] = measure.sources_digest(Path(__file__).parent)
    elif damage == "negative":
        document["times"][0]["microseconds"] = -1.0
    path.write_text(text[:50] if damage == "cut" else "[]" if damage == "list" else json.dumps(document))
    assert read_times(CPU) == {}


def test_a_changed_kernel_has_another_digest(tmp_path: Path) -> None:
    texts = {"a.py": "1", "b.cu": "2", "note.txt": "3"}
    changes = [{}, {"note.txt": "4"}, {"b.cu": "5"}, {"c.cuh": ""}, {"a.py": "12", "b.cu": ""}]
    digests = []
    for number, change in enumerate(changes):
        folder = tmp_path / str(number) / "cuda"
        folder.mkdir(parents=True)
        for name, text in (texts | change).items():
            (folder / name).write_text(text)
        digests.append(measure.sources_digest(folder.parent))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4
