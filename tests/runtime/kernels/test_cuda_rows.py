"""Norm, gated activation, int8 rows, greedy and feed against float64 and torch."""

from __future__ import annotations

import pytest
import torch

from qtool.quant.scheme import QuantScheme
from qtool.runtime.kernels.cuda.linear import apply, apply_rows, form_before, pack
from qtool.runtime.kernels.cuda.rows import Form, add_norm, quantize_rows, round_rows, silu_mul
from qtool.runtime.kernels.cuda.tokens import feed, greedy
from qtool.runtime.kernels.interface import LinearSpec

TOLERANCE = {torch.float16: 6e-4, torch.bfloat16: 5e-3}
LARGE = [(17, 4096), (2, 8192), (5, 14336), (1, 28672)]
SHAPES = [(1, 64), (3, 576), *(pytest.param(*shape, marks=pytest.mark.gpu) for shape in LARGE)]
pytestmark = [pytest.mark.usefixtures("gpu_or_emulator"), pytest.mark.one_warp, pytest.mark.before_hopper]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "columns"), SHAPES)
def test_add_norm(tokens: int, columns: int, dtype: torch.dtype) -> None:
    hidden, delta = (torch.randn(tokens, columns, device="cuda").to(dtype) for _ in range(2))
    weight = (torch.rand(columns, device="cuda") + 0.5).to(dtype)
    for added in (None, delta):
        before = hidden.clone()
        total = before.double() if added is None else before.double() + added.double()
        got = add_norm(hidden, added, weight, 1e-5, Form.PLAIN)
        assert (hidden.double() - total).norm() / total.norm() < TOLERANCE[dtype]
        exact = hidden.double() * (hidden.double().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        assert (got.double() - exact).norm() / exact.norm() < TOLERANCE[dtype]
        rounded, want = add_norm(hidden, None, weight, 1e-5, Form.INT8), quantize_rows(got)
        assert torch.equal(rounded.codes, want.codes)
        assert torch.equal(rounded.scales, want.scales)
        assert torch.equal(add_norm(hidden, None, weight, 1e-5, Form.ROUNDED), round_rows(got))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "columns"), SHAPES)
def test_silu_mul(tokens: int, columns: int, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(tokens, 2 * columns, device="cuda") * 3).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    want = torch.nn.functional.silu(gate) * up
    got = silu_mul(gate_up, Form.PLAIN)
    assert (got.double() - want).norm() / want.norm() < TOLERANCE[dtype]
    rounded, same = silu_mul(gate_up, Form.INT8), quantize_rows(got)
    assert torch.equal(rounded.codes, same.codes)
    assert torch.equal(rounded.scales, same.scales)
    assert torch.equal(silu_mul(gate_up, Form.ROUNDED), round_rows(got))


def test_codes_are_the_rounded_values() -> None:
    x = torch.randn(9, 640, device="cuda").half()
    rows = quantize_rows(x)
    scale = x.double().abs().amax(1, keepdim=True) / 127
    assert torch.allclose(rows.scales.double(), scale.squeeze(1), rtol=1e-6)
    assert ((x.double() / scale) - rows.codes.double()).abs().max() < 0.501
    assert torch.equal(round_rows(x), (rows.codes.float() * rows.scales[:, None]).half())


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["w4g128a8", "w8a8"])
@pytest.mark.parametrize("tokens", [1, 9, 40, 100, 300])
def test_a_norm_can_round_for_the_product_that_follows(scheme: str, tokens: int) -> None:
    from qtool.runtime.kernels.cuda.tuning import random_weight

    spec = LinearSpec(512, 1024, QuantScheme.parse(scheme), dtype=torch.float16)
    packed = pack(random_weight(spec), spec, torch.device("cuda", torch.cuda.current_device()))
    x = torch.randn(tokens, 1024, device="cuda").half()
    form = form_before(tokens, packed, spec)
    assert form is not Form.PLAIN
    rows = round_rows(x) if form is Form.ROUNDED else quantize_rows(x)
    assert torch.equal(apply_rows(rows, packed, spec), apply(x, packed, spec))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "vocab", [1, 7, 320, *(pytest.param(n, marks=pytest.mark.gpu) for n in (32000, 49152, 128255))]
)
def test_greedy(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(6, vocab, device="cuda").to(dtype)
    out = torch.full((6,), -7, dtype=torch.int32, device="cuda")
    greedy(logits, out)
    top = logits.amax(dim=1, keepdim=True)
    first = (logits == top).int().argmax(dim=1)
    assert out.tolist() == first.tolist()
    logits[1, vocab // 2] = torch.nan
    logits[2, 0] = torch.inf
    logits[3] = -torch.inf
    greedy(logits, out)
    assert out.tolist() == [int(first[0]), -1, -1, -1, *first[4:].tolist()]


def test_feed() -> None:
    given = torch.arange(300, dtype=torch.int32, device="cuda")
    source = torch.full_like(given, -1)
    source[5], source[299], source[7] = 2, 0, 1
    sampled = torch.tensor([11, -1, 13], dtype=torch.int32, device="cuda")
    want = given.clone()
    want[5], want[299], want[7] = 13, 11, 0
    assert torch.equal(feed(given, source, sampled), want)
