"""Answers that are kept: read back bit for bit, evaluated again when damaged, refused when they belong elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.evalsets.compare import Comparison, compare, compare_all
from qtool.evalsets.divergence import LogitSpool
from qtool.evalsets.kept import Kept, tidy
from qtool.quant.errors import QtoolError


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "short.jsonl"
    rows = [{"id": f"i{n}", "context": f"item {n}", "choices": ["x" * 9, "y"], "answer": 1} for n in range(30)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


class Counting:
    """Serves with `make`, and remembers which folders were loaded."""

    def __init__(self, make: Any) -> None:
        self.make, self.loaded = make, list[str]()

    def __call__(self, folder: Path) -> Any:
        self.loaded.append(folder.name)
        return self.make(folder)


def _numbers(result: Comparison) -> dict[str, Any]:
    document = result.to_dict()
    for model in (document["base"], document["candidate"]):
        for name in ("seconds", "load_seconds", "recalled"):
            model.pop(name)
    document.pop("started")
    return document


def test_a_second_run_loads_nothing_and_finds_the_same(
    tiny: Path, tiny_noisy: Path, task: Path, tmp_path: Path, fake_served: Any
) -> None:
    serve, cache = Counting(fake_served), tmp_path / "cache"
    options: dict[str, Any] = {"windows": 3, "context": 64, "tasks": [task], "serve": serve, "cache": cache}
    options["generations"] = 2
    fresh = compare(tiny, tiny_noisy, **options)
    assert serve.loaded == [tiny.name, tiny_noisy.name]
    again = compare(tiny, tiny_noisy, **options)
    assert len(serve.loaded) == 2
    assert again.base.recalled == again.candidate.recalled == ("text", "short", "generations")
    assert _numbers(again) == _numbers(fresh)

    # another candidate: the base stays kept; a text of another length: its logits alone are asked for
    compare(tiny, tiny, **options)
    assert serve.loaded[2:] == [tiny.name]
    longer = compare(tiny, tiny_noisy, **{**options, "windows": 2})
    assert "short" in longer.base.recalled
    assert "text" not in longer.base.recalled
    # other precision is another model
    assert compare(tiny, tiny_noisy, **options, dtype="float32").base.recalled == ()
    assert not list(cache.rglob("*.partial"))


def test_a_killed_run_goes_on_after_its_last_finished_part(
    tiny: Path, tiny_noisy: Path, task: Path, tmp_path: Path, fake_served: Any
) -> None:
    class Killed(fake_served):  # type: ignore[misc]
        def loglikelihood(self, pairs: Any, **_: Any) -> Any:
            raise KeyboardInterrupt

    options: dict[str, Any] = {
        "windows": 2,
        "context": 64,
        "generations": 0,
        "tasks": [task],
        "cache": tmp_path / "cache",
    }
    with pytest.raises(KeyboardInterrupt):
        compare(tiny, tiny_noisy, **options, serve=Killed)
    result = compare(tiny, tiny_noisy, **options, serve=fake_served)
    assert result.base.recalled == ("text",)
    assert _numbers(result)["metrics"] == _numbers(compare(tiny, tiny_noisy, **{**options, "cache": None},
                                                           serve=fake_served))["metrics"]  # fmt: skip


@pytest.mark.parametrize("suffix", ["bin", "json"])
def test_damaged_parts_are_evaluated_again_and_said(
    suffix: str, tiny: Path, tmp_path: Path, fake_served: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", logger="qtool")  # a command with --quiet may have run before
    options: dict[str, Any] = {"windows": 2, "context": 64, "generations": 0, "tasks": [], "cache": tmp_path / "cache"}
    compare(tiny, tiny, **options, serve=fake_served)
    (path,) = (tmp_path / "cache").rglob(f"logits-*.{suffix}")
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    again = compare(tiny, tiny, **options, serve=fake_served)
    assert again.base.recalled == ()
    assert [r for r in caplog.messages if "is damaged" in r and "evaluated again" in r]
    assert compare(tiny, tiny, **options, serve=fake_served).base.recalled == ("text",)


def test_a_layer_changed_in_place_is_another_model(tiny: Path, tmp_path: Path, fake_served: Any) -> None:
    other = shutil.copytree(tiny, tmp_path / "other")
    options: dict[str, Any] = {
        "windows": 2,
        "context": 64,
        "generations": 0,
        "tasks": [],
        "cache": tmp_path / "c",
        "serve": fake_served,
    }
    whole = compare(tiny, other, **options)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"].mul_(-1)
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    broken = compare(tiny, other, **options)
    assert broken.candidate.recalled == ()
    assert broken.divergence.kl.mean > whole.divergence.kl.mean + 0.01


def test_what_belongs_to_another_model_is_refused(tmp_path: Path) -> None:
    mine, theirs = Kept(tmp_path, {"model": "a"}), Kept(tmp_path, {"model": "b"})
    mine.keep("set", {"items": 1}, {"x": (1.5, 2)})
    assert mine.recall("set", {"items": 1}, lambda body: body) == {"x": [1.5, 2]}
    assert mine.recall("set", {"items": 2}, lambda body: body) is None
    assert theirs.recall("set", {"items": 1}, lambda body: body) is None
    source, target = mine.path("set", {"items": 1}), theirs.path("set", {"items": 1})
    assert source is not None
    assert target is not None
    target.parent.mkdir()
    source.rename(target)
    with pytest.raises(QtoolError, match="not to be compared with"):
        theirs.recall("set", {"items": 1}, lambda body: body)


def test_nothing_is_kept_without_a_folder_or_where_it_cannot_be_written(tmp_path: Path) -> None:
    Kept(None, {}).keep("set", {}, 1)
    assert Kept(None, {}).recall("set", {}, lambda body: body) is None
    (tmp_path / "file").write_text("")
    blocked = Kept(tmp_path / "file", {})
    blocked.keep("set", {}, 1)
    assert not blocked.room(1)


def test_logits_go_without_a_name_where_they_cannot_have_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(6.0).view(2, 3)
    taken = tmp_path / "taken"
    taken.mkdir()
    for path in (tmp_path / "missing" / "logits.bin", taken):
        with LogitSpool(path) as spool:
            spool.append(values)
            spool.seal()
            assert not spool.kept
            assert torch.equal(spool.window(0), values)
    with LogitSpool(tmp_path / "logits.bin") as spool:
        spool.append(values)
        spool.seal()
        assert spool.kept
    assert sorted(p.name for p in tmp_path.iterdir()) == ["logits.bin", "taken"]

    def refuse(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)  # what others keep is read, too
    with LogitSpool.open(tmp_path / "logits.bin", (2, 3), spool.checksums) as kept:
        assert torch.equal(kept.window(0), values)


def test_logits_that_fill_the_disk_are_one_line(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: the same write fails."""
    script = (
        "import resource, sys, torch; from pathlib import Path; from qtool.evalsets.divergence import LogitSpool\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "path = Path(sys.argv[1]) if len(sys.argv) > 1 else None\n"
        "with LogitSpool(path) as spool: spool.append(torch.ones(2, 1000))"
    )
    for path, way in ((None, "set TMPDIR"), (str(tmp_path / "logits.bin"), "pass --no-cache")):
        command = [sys.executable, "-P", "-c", script, *([path] if path else [])]
        done = subprocess.run(command, capture_output=True, text=True)
        last = done.stderr.splitlines()[-1]
        assert last.startswith("qtool.quant.errors.QtoolError")
        assert "the base's logits cannot be written" in last
        assert last.endswith(way)
    assert list(tmp_path.iterdir()) == []


def test_what_was_unused_for_longest_goes_first(tmp_path: Path) -> None:
    for age, name in enumerate(["new", "middle", "old"]):
        path = tmp_path / name / "part.bin"
        path.parent.mkdir()
        path.write_bytes(b"x" * 100)
        os.utime(path, (time.time() - age * 1000,) * 2)
    tidy(tmp_path, 250)
    assert sorted(p.parent.name for p in tmp_path.glob("*/*")) == ["middle", "new"]


def test_several_candidates_share_one_base(tiny: Path, tiny_noisy: Path, fake_served: Any) -> None:
    serve = Counting(fake_served)
    results = compare_all(tiny, [tiny_noisy, tiny], windows=2, context=64, generations=0, tasks=[], serve=serve)
    assert serve.loaded == [tiny.name, tiny_noisy.name, tiny.name]
    assert [r.candidate.name for r in results] == [str(tiny_noisy), str(tiny)]
    assert results[1].divergence.kl.max < 1e-6 < results[0].divergence.kl.mean
    alone = compare(tiny, tiny_noisy, windows=2, context=64, generations=0, tasks=[], serve=fake_served)
    assert torch.equal(alone.windows.joined("kl"), results[0].windows.joined("kl"))
