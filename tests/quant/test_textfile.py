"""Small files: written whole or not at all, and one line for whatever is wrong with a JSON file."""

from __future__ import annotations

from pathlib import Path

import pytest

from qtool.quant.errors import QtoolError
from qtool.quant.textfile import read_json, write_text


def test_a_byte_order_mark_is_no_json_error(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(tmp_path / "a.json") == {"a": 1}


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe{", b"[" * 200_000])
def test_damaged_json_is_one_line(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "a.json").write_bytes(raw)
    with pytest.raises(QtoolError, match=r"a\.json: not valid JSON"):
        read_json(tmp_path / "a.json")


def test_what_cannot_be_written_names_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.json").mkdir()
    with pytest.raises(QtoolError, match=r"a\.json: cannot be written"):
        write_text(tmp_path / "a.json", "{}")
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
