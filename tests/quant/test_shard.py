"""The streaming safetensors writer against the library's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qtool.quant.artifact import ArtifactWriter
from qtool.quant.errors import QtoolError
from qtool.quant.shard import ShardWriter

TENSORS = {
    "z.scale": torch.randn(3, 5).to(torch.bfloat16),  # an odd number of 16-bit elements before wider ones
    "a.shape": torch.tensor([3, 7]),
    "m.codes": torch.randint(-128, 127, (3, 7), dtype=torch.int8),
    "b.packed": torch.randint(-(2**31), 2**31 - 1, (5, 3), dtype=torch.int32),
    "c": torch.randn(2, 3).T,  # not contiguous
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(1.5, dtype=torch.float16),
    "é": torch.tensor([True, False]),
}


def test_the_file_is_the_one_that_the_library_writes(tmp_path: Path) -> None:
    shard = ShardWriter(tmp_path / "ours")
    for name, tensor in TENSORS.items():
        shard.add(name, tensor)
    assert shard.finish() == list(TENSORS)
    save_file({n: t.contiguous() for n, t in TENSORS.items()}, tmp_path / "theirs", metadata={"format": "pt"})
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["ours", "theirs"]
    ours, theirs = load_file(tmp_path / "ours"), load_file(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == TENSORS[name].dtype
        assert torch.equal(tensor, theirs[name])
    with safe_open(tmp_path / "ours", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    length = int.from_bytes((tmp_path / "ours").read_bytes()[:8], "little")
    header = json.loads((tmp_path / "ours").read_bytes()[8 : 8 + length])
    assert length % 8 == 0
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % TENSORS[name].dtype.itemsize == 0


def test_the_order_of_coming_does_not_matter(tmp_path: Path) -> None:
    for name, order in (("a", TENSORS), ("b", dict(reversed(TENSORS.items())))):
        shard = ShardWriter(tmp_path / name)
        for key, tensor in order.items():
            shard.add(key, tensor)
        shard.finish()
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: ShardWriter, name: str, tensor: torch.Tensor) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardWriter, "add", full)
    with (
        pytest.raises(QtoolError, match=r"cannot be written .No space left on device.; is the disk full"),
        ArtifactWriter(tmp_path / "out") as artifact,
    ):
        artifact.add(TENSORS)
    assert not list(tmp_path.iterdir())
