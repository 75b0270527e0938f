"""The page and the tables of an analysis: what they say is what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qtool.sensitivity.record import GroupSensitivity, Sensitivity
from qtool.sensitivity.report import html_page, kind_rows, top_rows

FOUND = Sensitivity(
    model="<b>m</b>",
    fingerprint="ab" * 32,
    metric="kl",
    rounding="rtn",
    calibration={"source": "text", "num_sequences": 2, "seq_len": 8, "fingerprint": "0"},
    forward_passes=4.0,
    shapes={"model.layers.0.o": (64, 64), "model.layers.0.down": (64, 128)},
    weight_error={"model.layers.0.o": {}, "model.layers.0.down": {}},
    float_bytes=2,
    other_bytes=100,
    groups=(
        GroupSensitivity("model.layers.0.o", 0, "o", ("model.layers.0.o",), {"w8": 0.25, "w4g64": 0.5}),
        GroupSensitivity("model.layers.0.down", 0, "down", ("model.layers.0.down",), {"w8": 0.0, "w4g128": 0.125}),
    ),
)


def test_what_was_not_measured_is_blank_and_not_zero() -> None:
    header, rows = kind_rows(FOUND)
    assert header == ["kind", "w8", "w4g64", "w4g128", "per million weights"]
    assert [row[:4] for row in rows] == [["o", "0.25", "0.5", ""], ["down", "0", "", "0.125"]]
    assert [row[1:4] for row in top_rows(FOUND)[1]] == [["0.25", "0.5", ""], ["0", "", "0.125"]]


@pytest.mark.parametrize(
    ("rounding", "words"), [("rtn", "rounded to nearest"), ("gptq", "by GPTQ on one half of them")]
)
def test_the_page_says_how_candidates_were_rounded(rounding: str, words: str) -> None:
    page = html_page(replace(FOUND, rounding=rounding))
    assert words in page
    assert ("rounded to nearest" in page) == (rounding == "rtn")
    assert "<b>m</b>" not in page


def test_a_model_that_nothing_harms_has_a_page() -> None:
    unharmed = tuple(replace(g, damage=dict.fromkeys(g.damage, 0.0)) for g in FOUND.groups)
    assert html_page(replace(FOUND, groups=unharmed)).count("data:image/png;base64,") == 2
