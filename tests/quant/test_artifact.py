"""The folder that a run makes: whole or absent, one writer at a time, and never in place of something precious."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qtool.quant.artifact import ArtifactWriter, check_apart, check_space, check_target
from qtool.quant.errors import QtoolError

TENSORS = {"a": torch.arange(6.0)}


def write(out: Path, *, overwrite: bool = False) -> None:
    with ArtifactWriter(out, overwrite=overwrite) as artifact:
        artifact.add(TENSORS)


def test_a_second_writer_of_one_folder_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "out") as first:
        with pytest.raises(QtoolError, match="another run is writing it"):
            write(tmp_path / "out")
        first.add(TENSORS)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_writer_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from qtool.quant.artifact import ArtifactWriter\n"
        "with ArtifactWriter(Path(sys.argv[1])) as a:\n"
        "    a.write_json('left.json', {}); print('ready', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        os.kill(child.pid, signal.SIGKILL)
    assert [p.name for p in tmp_path.iterdir()] == [".out.partial"]
    write(tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_a_folder_that_appears_meanwhile_is_left_as_it_is(tmp_path: Path) -> None:
    writer = ArtifactWriter(tmp_path / "out")
    writer.__enter__()
    writer.add(TENSORS)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "theirs").touch()
    with pytest.raises(QtoolError, match="appeared"):
        writer.__exit__(None, None, None)
    assert [str(p.relative_to(tmp_path)) for p in sorted(tmp_path.rglob("*"))] == ["out", "out/theirs"]


def test_one_that_appeared_before_the_lock_was_taken_costs_no_work(tmp_path: Path) -> None:
    late = ArtifactWriter(tmp_path / "out")  # its run checked the target, and another has finished since
    write(tmp_path / "out")
    with pytest.raises(QtoolError, match="appeared"), late:
        pytest.fail("entered")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    write(tmp_path / "out", overwrite=True)


def test_space_for_a_shard_that_lies_there_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qtool.quant.artifact.shutil.disk_usage", lambda path: SimpleNamespace(free=2_000_000))
    check_space(tmp_path / "out", 1_000_000)
    with pytest.raises(QtoolError, match=r"2\.0 MB free, the artifact needs 2\.2 MB"):
        check_space(tmp_path / "out", 1_100_000)


def test_a_file_that_cannot_be_copied_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(QtoolError, match="artifact cannot be written"), ArtifactWriter(tmp_path / "out") as artifact:
        artifact.copy([tmp_path / "gone.json"])
    assert not list(tmp_path.iterdir())


def test_force_replaces_models_and_empty_folders_alone(tmp_path: Path) -> None:
    model, empty, home = (tmp_path / name for name in ("model", "empty", "home"))
    for folder in (model, empty, home):
        folder.mkdir()
    (model / "config.json").touch()
    (home / "thesis.tex").touch()
    (tmp_path / "link").symlink_to(model)
    for fine in (model, empty):
        check_target(fine, overwrite=True)
        write(fine, overwrite=True)
    with pytest.raises(QtoolError, match="holds other things than a model"):
        check_target(home, overwrite=True)
    with pytest.raises(QtoolError, match="symbolic link"):
        check_target(tmp_path / "link", overwrite=True)


def test_links_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    (tmp_path / "round").symlink_to("about")
    (tmp_path / "about").symlink_to("round")
    for name in ("dangling", "round"):
        with pytest.raises(QtoolError, match=rf"{name} is not a folder that can be written to"):
            check_target(tmp_path / name / "out", overwrite=True)


def test_what_a_link_in_place_of_the_partial_folder_leads_to_is_not_emptied(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").touch()
    (tmp_path / ".out.partial").symlink_to(precious)
    with pytest.raises(OSError, match=r"\.out\.partial"):
        write(tmp_path / "out")
    assert (precious / "thesis.tex").exists()


def test_the_source_is_never_replaced(tmp_path: Path) -> None:
    source = tmp_path / "models" / "base"
    source.mkdir(parents=True)
    (tmp_path / "alias").symlink_to(source)
    for out in (source, tmp_path / "models", tmp_path / "alias"):
        with pytest.raises(QtoolError, match="holds the model that is read"):
            check_apart(out, source)
    check_apart(tmp_path / "models" / "base-w4", source)


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: the same write fails."""
    script = (
        "import resource, sys, torch; from pathlib import Path; from qtool.quant.artifact import ArtifactWriter\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "with ArtifactWriter(Path(sys.argv[1])) as a: a.add({'a': torch.ones(1000)})"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith("qtool.quant.errors.QtoolError")
    assert "is the disk full?" in done.stderr
    assert list(tmp_path.iterdir()) == []
