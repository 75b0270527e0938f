"""A run that was cut short goes on where it stopped, and gives the bytes that it would have given."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qtool.quant.calibration import CalibrationSet
from qtool.quant.errors import QtoolError
from qtool.quant.pipeline import quantize
from qtool.quant.resume import differences
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
    assert len(list(kept.glob("block-*.safetensors"))) == stop_after
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


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"data": 1}, "calibration fingerprint seed 0, now seed 1"),
        ({"seed": 7}, "seed 0, now 7"),
        ({"method": "awq"}, "settings method gptq, now awq"),
        ({"scheme": QuantScheme(8, 32)}, "plan model.layers.0.mlp.down_proj w4g32, now w8g32 and 20 more of plan"),
        ({"model": "mistral"}, "model [0-9a-f]{12}…, now [0-9a-f]{12}…"),
    ],
)
def test_another_configuration_is_refused_until_told_to_start_over(
    model: Path, tiny_model: Any, tmp_path: Path, cache: Path, change: dict[str, Any], what: str
) -> None:
    out = tmp_path / "out"
    with pytest.raises(Killed):
        run(model, out, 2)
    before = {p: p.read_bytes() for p in cache.rglob("*") if p.is_file()}
    changed = {"data": 0, "seed": 0, "method": "gptq", "scheme": QuantScheme(4, 32), "model": None} | change
    source = model if changed["model"] is None else tiny_model(changed["model"], num_hidden_layers=BLOCKS)

    def again(target: Path, fresh: bool) -> None:
        quantize(
            source,
            target,
            scheme=changed["scheme"],
            method=changed["method"],
            calibration=data(changed["data"]),
            seed=changed["seed"],
            fresh=fresh,
        )

    with pytest.raises(QtoolError, match=f"2 blocks are kept of a run that was cut short.*{what}.*pass --fresh"):
        again(out, fresh=False)
    assert not out.exists()
    assert {p: p.read_bytes() for p in cache.rglob("*") if p.is_file()} == before
    again(out, fresh=True)
    again(tmp_path / "whole", fresh=False)
    assert contents(out) == contents(tmp_path / "whole")
    assert not list(cache.iterdir())


def test_another_target_knows_nothing_of_the_kept_blocks(model: Path, tmp_path: Path, cache: Path) -> None:
    with pytest.raises(Killed):
        run(model, tmp_path / "out", 2)
    assert run(model, tmp_path / "other", method="awq") == [1, 2, 3]
    assert len(list(cache.iterdir())) == 1  # those of the other run wait for it


def test_blocks_whose_facts_are_lost_are_made_again(model: Path, tmp_path: Path, cache: Path) -> None:
    run(model, tmp_path / "whole")
    with pytest.raises(Killed):
        run(model, tmp_path / "out", 2)
    (kept,) = cache.iterdir()
    (kept / "facts.json").write_text('{"seed": 0, "cali')
    run(model, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_differences_are_told_shortly() -> None:
    before = {"a": 1, "b": {"c": 2, "d": 3}, "e": {"f": 1, "g": 1, "h": 1}, "long": "0" * 64}
    now = {"a": 1, "b": {"c": 2, "d": 4}, "e": {"f": 2, "g": 2, "h": 2}, "long": "1" * 64}
    assert differences(before, now) == [
        "b d 3, now 4",
        "e f 1, now 2 and 2 more of e",
        f"long {'0' * 12}…, now {'1' * 12}…",
    ]
    assert differences(before, before) == []
    assert differences({}, {"x": True}) == ["x None, now True"]


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


def test_no_block_is_kept_at_the_cost_of_the_artifact(
    model: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("qtool.quant.resume.shutil.disk_usage", lambda path: SimpleNamespace(free=500_000))
    with pytest.raises(Killed):
        run(model, tmp_path / "out", 2)
    assert not list(cache.rglob("block-*"))
    assert "the artifact needs the space" in caplog.text


def test_blocks_that_cannot_be_removed_are_never_used(
    model: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Killed):
        run(model, tmp_path / "out", 1)
    (facts,) = cache.rglob("facts.json")
    facts.unlink()
    monkeypatch.setattr("qtool.quant.resume.shutil.rmtree", lambda path, ignore_errors: None)
    with pytest.raises(QtoolError, match="blocks of another run that cannot be removed"):
        run(model, tmp_path / "out")
