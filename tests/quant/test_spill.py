"""What is held aside comes back bit for bit, from memory or from the disk."""

from __future__ import annotations

from pathlib import Path

import torch

from qtool.quant.spill import Spill


def test_small_sets_stay_as_they_are(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(2)}
    for spill in (Spill(tmp_path / "aside"), Spill(tmp_path / "aside", memory=4 * 17)):
        held = spill.hold(tensors)
        assert list(held) == ["a", "b"]
        assert all(held[name] is tensor for name, tensor in tensors.items())
    assert not (tmp_path / "aside").exists()


def test_large_sets_go_to_a_file_without_a_name(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(2, 2, dtype=torch.float64).T}
    held = Spill(tmp_path / "aside", memory=4 * 15).hold(tensors)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()  # the file does not follow
    assert list(held) == ["a", "b"]
    assert len(held) == 2
    assert all(torch.equal(held[name], copy) and held[name].dtype == copy.dtype for name, copy in copies.items())
    assert list((tmp_path / "aside").iterdir()) == []
