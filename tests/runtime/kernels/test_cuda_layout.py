"""Weights in fragment order against the tensor cores' operand layout, lane by lane, and back."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qtool.quant.scheme import QuantScheme
from qtool.quant.weight import QuantizedWeight
from qtool.runtime.kernels.cuda.layout import PackedWeight, arrange_activations, kernel_group, pack_weight
from qtool.runtime.kernels.cuda.linear import supports
from qtool.runtime.kernels.interface import LinearSpec

CPU = torch.device("cpu")
SCHEME = QuantScheme(4, 32)


def random_weight(rows: int, cols: int, scheme: QuantScheme, g_idx: Tensor | None = None) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    groups = int(g_idx.max()) + 1 if g_idx is not None else scheme.num_groups(cols)
    levels = 1 << scheme.bits
    zero = None
    if not scheme.symmetric:
        zero = torch.randint(0, levels, (rows, groups), generator=generator, dtype=torch.uint8)
    return QuantizedWeight(
        codes=torch.randint(0, levels, (rows, cols), generator=generator, dtype=torch.uint8),
        scale=(torch.rand(rows, groups, generator=generator) - 0.5).half(),
        zero=zero,
        scheme=scheme,
        g_idx=g_idx,
    )


def mma_operand(packed: PackedWeight, bits: int, act_bits: int) -> dict[tuple[int, int], int]:
    """(row, column) → code, by what each lane feeds to m16n8k16 (16-bit) or m16n8k32 (int8).

    A operand of m16n8k16: register 0 holds (row g; k = 2t, 2t+1), 1 (g+8; same), 2 (g; 2t+8, 2t+9), 3 (g+8; same).
    B operand: register 0 holds k = 2t, 2t+1, register 1 k = 2t+8, 2t+9, which the kernel fills with columns 2v, 2v+1 of
    its lane's 8 of the first or second 32 columns. Of m16n8k32 likewise with four bytes a register, of the lane's 16
    columns that follow one another.
    """
    seen: dict[tuple[int, int], int] = {}

    def put(row: int, column: int, code: int) -> None:
        assert (row, column) not in seen
        seen[row, column] = code

    for tile in range(packed.tiles):
        for chunk in range(packed.chunks):
            for lane in range(32):
                g, t = lane // 4, lane % 4
                place = lane ^ (lane >> 3)
                words = [int(w) & 0xFFFFFFFF for w in packed.codes[tile, chunk, :, place].flatten()]
                for h in range(2):
                    first = chunk * 64 + 32 * h + 8 * t
                    for register in range(4):
                        row = tile * 16 + g + 8 * (register & 1)
                        if act_bits == 16:
                            if (
                                register >> 1 != h
                            ):  # registers 0 and 1 hold the first 32 columns' codes, 2 and 3 the others'
                                continue
                            for v in range(4):
                                for e in range(2):
                                    column = first + 2 * v + e
                                    if bits == 4:
                                        put(row, column, words[v] >> (4 * register + 16 * e) & 15)
                                    else:
                                        put(row, column, words[4 * h + v] >> (16 * (register & 1) + 8 * e) & 255)
                        else:
                            for e in range(4):
                                word = 2 * h + (register >> 1)
                                column = chunk * 64 + 16 * t + 4 * word + e
                                if bits == 4:
                                    signed = (words[word] << 4 if register & 1 == 0 else words[word]) >> (8 * e) & 0xF0
                                    put(row, column, (signed >> 4) ^ 8)
                                else:
                                    put(row, column, words[4 * (register & 1) + word] >> (8 * e) & 255 ^ 128)
    return seen


def wgmma_operand(packed: PackedWeight, bits: int, act_bits: int) -> dict[tuple[int, int], int]:
    """(row, column) → code, by what gemm.cu makes of words that ldmatrix has handed out: lane 4 g + v has word v of the
    units of all four lanes 4 g + t.

    A operand of m64k16: register 0 holds (row g; k = 2v, 2v+1), 1 (g+8; same), 2 (g; 2v+8, 2v+9), 3 (g+8; same). Of
    m64k32 likewise with four bytes a register. Activations lie as they come: k counts columns.
    """
    seen: dict[tuple[int, int], int] = {}
    wide = 4 if act_bits == 8 else 2  # columns of a register
    for tile in range(packed.tiles):
        for chunk in range(packed.chunks):
            for lane in range(32):
                g, v = lane // 4, lane % 4
                places = [(4 * g + t) ^ ((4 * g + t) >> 3) for t in range(4)]
                words = [
                    [int(packed.codes[tile, chunk, i, p, v]) & 0xFFFFFFFF for p in places] for i in range(bits // 4)
                ]
                for piece in range(16 // wide // 2):
                    for register in range(4):
                        row, t = register & 1, 2 * (piece & 1) + (register >> 1)
                        for e in range(wide):
                            if act_bits == 16 and bits == 4:
                                code = words[0][t] >> (8 * (piece >> 1) + 4 * row + 16 * e) & 15
                            elif act_bits == 16:
                                code = words[piece >> 1][t] >> (16 * row + 8 * e) & 255
                            elif bits == 4:
                                code = words[0][t] >> (8 * e + 4 * row) & 15 ^ 8
                            else:
                                code = words[row][t] >> (8 * e) & 255 ^ 128
                            k = wide * v + e + 4 * wide * (register >> 1)
                            at = tile * 16 + g + 8 * row, chunk * 64 + 8 * wide * piece + k
                            assert at not in seen
                            seen[at] = code
    return seen


@pytest.mark.parametrize("operand_of", [mma_operand, wgmma_operand])
@pytest.mark.parametrize("act_bits", [16, 8])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_lane_holds_its_codes(
    bits: int, act_bits: int, operand_of: Callable[[PackedWeight, int, int], dict[tuple[int, int], int]]
) -> None:
    weight = random_weight(24, 128, QuantScheme(bits, 64))
    packed = pack_weight(weight, act_bits, CPU)
    operand = operand_of(packed, bits, act_bits)
    assert packed.codes.shape == (2, 2, bits // 4, 32, 4)
    assert len(operand) == 32 * 128
    for (row, column), code in operand.items():
        if row < 24:
            assert code == int(weight.codes[row, column])


@pytest.mark.parametrize(("group", "symmetric"), [(32, True), (64, False), (128, True), (256, False)])
def test_scales_and_zeros_lie_beside_their_rows(group: int, symmetric: bool) -> None:
    weight = random_weight(40, 512, QuantScheme(4, group, symmetric))
    packed = pack_weight(weight, 16, CPU)
    inner = kernel_group(weight.scheme)
    assert inner is not None
    for row in range(40):
        tile, half, g = row // 16, row // 8 % 2, row % 8
        for column in range(0, 512, 32):
            assert packed.scales[tile, column // inner, g, half] == weight.scale[row, column // group]
            if weight.zero is not None:
                assert packed.zeros[tile, column // inner, g, half] == weight.zero[row, column // group]
    assert (len(packed.zeros) == 0) == symmetric


@pytest.mark.parametrize(("dtype", "sizes"), [
    (torch.float16, [6e-8, 1e-3, 0.0078125, 0.02, 1.0, 65504.0]), (torch.bfloat16, [1e-30, 1e-9, 0.02, 1.0, 1e30]),
])  # fmt: skip
def test_rows_are_divided_by_a_power_of_two(dtype: torch.dtype, sizes: list[float]) -> None:
    """A row's largest scale then lies in [2^-9, 2^-8), unless the power would be too small; zeros do no harm."""
    scale = torch.tensor([*sizes, 0.0], dtype=dtype).unsqueeze(1) * torch.tensor([0.25, -1.0], dtype=dtype)
    codes = torch.zeros(len(scale), 64, dtype=torch.uint8)
    powers = pack_weight(QuantizedWeight(codes, scale, None, SCHEME), 16, CPU).powers
    assert powers.shape == (16,)
    assert powers.dtype == torch.float32
    assert all(math.frexp(p)[0] == 0.5 for p in powers.tolist())
    for size, power in zip(scale.abs().amax(dim=1).double().tolist(), powers.double().tolist(), strict=False):
        least = 2.0**-3 if dtype == torch.float16 else 2.0**-100
        assert 2.0**-9 <= size / power < 2.0**-8 or (power == least and size / power < 2.0**-8) or size == 0


def test_rows_have_powers_only_where_they_help() -> None:
    """Not where a group is less than 2^-8 of its row's largest, per channel, with zero points or int8 activations."""

    def powers(scale: list[list[float]], dtype: torch.dtype = torch.float16) -> int:
        weight = QuantizedWeight(torch.zeros(2, 64, dtype=torch.uint8), torch.tensor(scale).to(dtype), None, SCHEME)
        return len(pack_weight(weight, 16, CPU).powers)

    assert powers([[0.5, 2**-9], [0.0, 1.0]]) == 16
    assert powers([[0.5, 2**-9], [-1.0, 2**-8.5]]) == 0
    assert powers([[0.0, 0.0], [0.0, 0.0]]) == 16
    assert powers([[1.0, 1.0], [torch.inf, 1.0]]) == 0
    assert powers([[1.0, 1.0], [torch.nan, 1.0]]) == 0
    assert powers([[1.0, 1.0], [2.0**117, 2.0**110]], torch.bfloat16) == 16
    assert powers([[1.0, 1.0], [2.0**118, 2.0**110]], torch.bfloat16) == 0
    for scheme, act_bits in ((SCHEME, 8), (QuantScheme(4), 16), (QuantScheme(4, 32, symmetric=False), 16)):
        assert len(pack_weight(random_weight(16, 64, scheme), act_bits, CPU).powers) == 0


def test_powers_do_not_depend_on_the_default_type() -> None:
    weight = random_weight(16, 64, SCHEME)
    want = pack_weight(weight, 16, CPU).powers
    assert len(want) == 16
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            torch.set_default_dtype(dtype)
            assert torch.equal(pack_weight(weight, 16, CPU).powers, want)
    finally:
        torch.set_default_dtype(before)


def test_per_channel_scales_are_float32_in_row_order() -> None:
    weight = random_weight(20, 64, QuantScheme(8))
    packed = pack_weight(weight, 8, CPU)
    assert packed.scales.dtype == torch.float32
    assert torch.equal(packed.scales, weight.scale[:, 0].float())


def test_float32_scales_take_the_type_that_holds_them() -> None:
    weight = random_weight(16, 64, QuantScheme(4, 32))
    for factor, dtype in [(1.0, torch.float16), (1e-7, torch.bfloat16)]:
        scale = (weight.scale.abs().float() + 0.01) * factor
        packed = pack_weight(QuantizedWeight(weight.codes, scale, None, weight.scheme), 16, CPU)
        assert packed.scales.dtype == dtype


@pytest.mark.parametrize(("cols", "sizes"), [(192, [64, 64, 64]), (192, [70, 30, 92]), (100, [1, 99]), (64, [0, 64])])
def test_act_order_products_agree_with_the_definition(cols: int, sizes: list[int]) -> None:
    order = torch.randperm(cols, generator=torch.Generator().manual_seed(1))
    g_idx = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))[order].int()
    weight = random_weight(16, cols, QuantScheme(4, 64, symmetric=False), g_idx)
    packed = pack_weight(weight, 16, CPU)
    operand = mma_operand(packed, 4, 16)
    x = torch.randn(3, cols, dtype=torch.float64)
    arranged = arrange_activations(x, packed)
    want = x @ weight.dequantize(torch.float64).T
    width = packed.chunks * 64
    value = torch.zeros(16, width, dtype=torch.float64)
    for (row, column), code in operand.items():
        at = column // 64, row % 8, row // 8
        value[row, column] = (code - int(packed.zeros[0][at])) * float(packed.scales[0][at])
    assert arranged.shape == (3, width)
    assert torch.allclose(arranged @ value.T, want, atol=1e-12)


def test_activations_are_left_alone_where_they_fit() -> None:
    weight = random_weight(16, 128, QuantScheme(4, 128))
    packed = pack_weight(weight, 16, CPU)
    x = torch.randn(4, 128)
    assert arrange_activations(x, packed) is x
    shifted = torch.randn(4 * 128 + 1)[1:].view(4, 128)
    assert arrange_activations(shifted, packed).data_ptr() % 16 == 0


def test_odd_widths_are_filled_with_zeros() -> None:
    weight = random_weight(5, 96, QuantScheme(4, 32))
    packed = pack_weight(weight, 16, CPU)
    arranged = arrange_activations(torch.ones(2, 96), packed)
    assert arranged.shape == (2, 128)
    assert float(arranged[:, 96:].abs().sum()) == 0
    assert packed.scales.shape == (1, 4, 8, 2)


def test_large_weights_are_packed_in_slabs_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(100, 128, QuantScheme(4, 128))
    whole = pack_weight(weight, 16, CPU)
    monkeypatch.setattr("qtool.runtime.kernels.cuda.layout._SLAB_CODES", 128 * 16 * 2)
    assert torch.equal(pack_weight(weight, 16, CPU).codes, whole.codes)


def test_refusals_say_why() -> None:
    spec = LinearSpec(16, 64, QuantScheme(4, 64), dtype=torch.bfloat16)
    assert supports(spec, CPU) == "not a CUDA device"
    cuda = torch.device("cuda", 0)
    assert "float32" in str(supports(LinearSpec(16, 64, QuantScheme(4, 64), dtype=torch.float32), cuda))
    assert "group size 24" in str(supports(LinearSpec(16, 48, QuantScheme(4, 24)), cuda))
    assert "columns" in str(supports(LinearSpec(16, 1 << 18, QuantScheme(8)), cuda))
