"""A run that was cut short goes on where it stopped, and gives the bytes that it would have given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qtool.quant.calibration import CalibrationSet
from qtool.quant.pipeline import quantize
from qtool.quant.scheme import QuantScheme

BLOCKS = 3


class Killed(BaseException):
    pass


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("qtool.quant.resume.cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "resume"


@pytest.fixture(scope="module")
def model(tiny_model: Any) -> Path:
    return tiny_model("llama", num_hidden_layers=BLOCKS)


def data(seed: int = 0) -> CalibrationSet:
    tokens = torch.randint(1, 300, (4, 32), generator=torch.Generator().manual_seed(seed))
    return CalibrationSet(tokens, "random", f"seed {seed}")


def run(model: Path, out: Path, stop_after: int | None = None, method: str = "gptq", seed: int = 0) -> list[int]:
    """Quantize; the blocks that were reported. Stops like a kill after `stop_after` blocks."""
    seen: list[int] = []

    def progress(what: str, done: int, total: int) -> None:
        if what.startswith("quantize"):
            seen.append(done)
            if done == stop_after:
                raise Killed

    quantize(model, out, scheme=QuantScheme(4, 32), method=method, calibration=data(seed), progress=progress)
    return seen


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != "qtool_run.json"}


@pytest.mark.parametrize("method", ["gptq", "awq", "rounding", "awq+rounding"])
@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_a_resumed_run_gives_the_same_bytes(
    model: Path, tmp_path: Path, cache: Path, method: str, stop_after: int
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run(model, whole, method=method)
    assert not list(cache.iterdir())
    with pytest.raises(Killed):
        run(model, resumed, stop_after, method=method)
    assert not resumed.exists()
    (kept,) = cache.iterdir()
    assert len(list(kept.iterdir())) == stop_after
    run(model, resumed, method=method)
    assert contents(resumed) == contents(whole)
    assert not list(cache.iterdir())


def test_finished_blocks_are_not_quantized_again(
    model: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qtool.quant import pipeline

    with pytest.raises(Killed):
        run(model, tmp_path / "out", 2)
    quantized: list[int] = []
    real = pipeline.quantize_block

    def counted(block: Any, *args: Any) -> Any:
        quantized.append(block.index)
        return real(block, *args)

    monkeypatch.setattr(pipeline, "quantize_block", counted)
    run(model, tmp_path / "out")
    assert quantized == [2]


def test_other_data_never_meets_the_kept_blocks(model: Path, tmp_path: Path, cache: Path) -> None:
    run(model, tmp_path / "whole", seed=1)
    with pytest.raises(Killed):
        run(model, tmp_path / "out", 2, seed=0)
    run(model, tmp_path / "out", seed=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert len(list(cache.iterdir())) == 1  # the blocks of seed 0 wait for their own run


def test_a_truncated_block_is_made_again(model: Path, tmp_path: Path, cache: Path) -> None:
    run(model, tmp_path / "whole")
    with pytest.raises(Killed):
        run(model, tmp_path / "out", 2)
    (kept,) = cache.iterdir()
    last = kept / "block-00001.safetensors"
    last.write_bytes(last.read_bytes()[:-100])
    run(model, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_cache_that_cannot_be_written_costs_nothing_else(model: Path, tmp_path: Path, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    run(model, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()
