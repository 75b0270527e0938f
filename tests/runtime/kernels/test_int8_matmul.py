"""The Triton int8 product: exact sums, scales, odd sizes; in Triton's interpreter, or on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()


def check(m: int, n: int, k: int, dtype: torch.dtype = torch.float16) -> None:
    from qtool.runtime.kernels.cuda.int8_matmul import int8_matmul
    from qtool.runtime.kernels.cuda.rows import Int8Rows

    device = "cuda" if ON_GPU else "cpu"
    torch.manual_seed(3)
    x, w = (torch.randint(-127, 128, (rows, k), dtype=torch.int8, device=device) for rows in (m, n))
    x_scales, w_scales = (torch.rand(rows, device=device) / k + 1e-3 / k for rows in (m, n))
    out = torch.full((m, n), torch.nan, dtype=dtype, device=device)
    int8_matmul(Int8Rows(x, x_scales), w, w_scales, out)
    want = (x.double() @ w.double().T) * x_scales.double()[:, None] * w_scales.double()
    assert float((out.double() - want).norm() / want.norm()) < (4e-4 if dtype == torch.float16 else 3e-3)


@pytest.mark.skipif(ON_GPU, reason="the GPU runs the kernel itself")
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 128), (70, 130, 256), (3, 300, 384)])
def test_in_the_interpreter(m: int, n: int, k: int) -> None:
    check(m, n, k)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 128), (300, 4096, 4096), (2048, 1000, 11008), (777, 6144, 4096)])
def test_on_the_gpu(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    check(m, n, k, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16, 128), (40, 256), (4096, 11008)])
def test_weights_come_back_from_kernel_order(shape: tuple[int, int]) -> None:
    from qtool.quant.scheme import QuantScheme
    from qtool.runtime.kernels.cuda.int8_matmul import unpack_rows
    from qtool.runtime.kernels.cuda.layout import pack_weight
    from qtool.runtime.kernels.cuda.tuning import random_weight
    from qtool.runtime.kernels.interface import LinearSpec

    weight = random_weight(LinearSpec(*shape, QuantScheme(8, act_bits=8)))
    rows = unpack_rows(pack_weight(weight, 8, weight.codes.device), shape[0])
    assert torch.equal(rows.int(), weight.codes.int() - 128)
