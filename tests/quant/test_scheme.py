"""Schemes and plans: byte costs against hand counts, names, group fallback."""

from __future__ import annotations

import pytest
import torch

from qtool.quant.errors import QtoolError
from qtool.quant.scheme import QuantPlan, QuantScheme, check_covers, fit_group, parse_scheme, uniform_plan
from qtool.quant.weight import QuantizedWeight, concat_rows


@pytest.mark.parametrize(
    ("name", "rows", "cols", "expected"),
    [
        # codes: rows * cols / 2; scales: 2 bytes per row and group; zeros: 4 bits, packed along the rows
        ("w4g64", 576, 576, 576 * 288 + 576 * 9 * 2),
        ("w4g64-asym", 576, 576, 576 * 288 + 576 * 9 * 2 + 72 * 4 * 9),
        ("w4g64-asym", 5, 64, 5 * 32 + 5 * 2 + 4),  # five nibbles of zeros fill one word
        ("w8", 100, 33, 100 * 9 * 4 + 100 * 2),  # 33 bytes of codes are padded to nine words
        ("w4", 3, 9, 3 * 2 * 4 + 3 * 2),
        ("w8g128", 10, 256, 10 * 256 + 10 * 2 * 2),
    ],
)
def test_true_bytes(name: str, rows: int, cols: int, expected: int) -> None:
    assert QuantScheme.parse(name).num_bytes(rows, cols) == expected


@pytest.mark.parametrize("name", ["w4g64", "w4", "w8", "w8a8", "w4g128-asym", "w8g32-asym", "w4g128a8"])
def test_names_round_trip(name: str) -> None:
    assert QuantScheme.parse(name).name == name


@pytest.mark.parametrize("name", ["w3", "w4g7", "int4", "", "w4g64-sym", "w4g0", "w16", "w4a4"])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(QtoolError):
        QuantScheme.parse(name)


def test_16_bit_has_a_name() -> None:
    assert parse_scheme("fp16") is None
    assert parse_scheme("BF16") is None


def test_group_falls_back_to_the_largest_that_divides() -> None:
    g128 = QuantScheme(4, 128)
    assert fit_group(g128, 576).group_size == 64
    assert fit_group(g128, 1536).group_size == 128
    assert fit_group(g128, 96).group_size == 32
    assert fit_group(QuantScheme(4, -1), 7).group_size == -1
    with pytest.raises(QtoolError, match="divides an input of 100"):
        fit_group(g128, 100)


def test_uniform_plan_says_what_it_changed() -> None:
    plan, notes = uniform_plan({"a": (8, 576), "b": (8, 1536)}, QuantScheme(4, 128))
    assert [plan[n].group_size for n in plan] == [64, 128]  # type: ignore[union-attr]
    assert list(notes) == ["a"]
    with pytest.raises(QtoolError, match="layer c"):
        uniform_plan({"c": (8, 100)}, QuantScheme(4, 128))


def test_average_bits_counts_scales_and_16_bit_layers() -> None:
    shapes = {"a": (64, 64), "b": (64, 64)}
    plan = QuantPlan({"a": QuantScheme(4, 64), "b": None})
    assert plan.average_bits(shapes) == pytest.approx((4 + 16 / 64 + 16) / 2)


def test_a_plan_must_cover_the_model() -> None:
    plan = QuantPlan({"a": None})
    check_covers(plan, ["a"])
    with pytest.raises(QtoolError, match="'b'"):
        check_covers(plan, ["a", "b"])
    with pytest.raises(QtoolError, match="'a'"):
        check_covers(plan, [])


def _weight(asym: bool = False, g_idx: torch.Tensor | None = None) -> QuantizedWeight:
    return QuantizedWeight(
        codes=torch.tensor([[0, 15, 8, 7], [1, 2, 3, 4]], dtype=torch.uint8),
        scale=torch.tensor([[0.5, -2.0], [1.0, 0.25]]),
        zero=torch.tensor([[1, 7], [0, 4]], dtype=torch.uint8) if asym else None,
        scheme=QuantScheme(4, 8, symmetric=not asym),
        g_idx=g_idx,
    )


def test_dequantize_by_hand() -> None:
    sym = _weight().dequantize()
    assert sym.tolist() == [[-4.0, 3.5, 0.0, 2.0], [-7.0, -6.0, -1.25, -1.0]]
    asym = _weight(asym=True).dequantize()
    assert asym.tolist() == [[-0.5, 7.0, -2.0, 0.0], [1.0, 2.0, -0.25, 0.0]]
    permuted = _weight(g_idx=torch.tensor([1, 0, 1, 0], dtype=torch.int32)).dequantize()
    assert permuted.tolist() == [[16.0, 3.5, -0.0, -0.5], [-1.75, -6.0, -1.25, -4.0]]


def test_a_damaged_weight_is_named() -> None:
    good = QuantizedWeight(torch.zeros(2, 8, dtype=torch.uint8), torch.ones(2, 1), None, QuantScheme(4, 8))
    good.check("layer")
    bad_scale = QuantizedWeight(good.codes, torch.full((2, 1), float("nan")), None, good.scheme)
    with pytest.raises(QtoolError, match=r"layer x.*NaN"):
        bad_scale.check("x")
    with pytest.raises(QtoolError, match=r"layer y.*scales"):
        QuantizedWeight(good.codes, torch.ones(2, 3), None, good.scheme).check("y")


def test_rows_are_stacked_where_schemes_agree() -> None:
    one = _weight()
    both = concat_rows([one, one])
    assert both is not None
    assert torch.equal(both.dequantize(), torch.cat([one.dequantize()] * 2))
    assert concat_rows([one, _weight(asym=True)]) is None
