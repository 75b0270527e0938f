"""Every CUDA kernel that multiplies by a quantized weight, on inputs so small that it is run without a GPU too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_products import activations, check, device, hopper, make_weight, run

from qtool.quant.scheme import QuantScheme
from qtool.runtime.kernels.cuda import gemm
from qtool.runtime.kernels.cuda.gemm import EVEN, GemmConfig
from qtool.runtime.kernels.cuda.layout import pack_weight
from qtool.runtime.kernels.cuda.linear import apply_choice
from qtool.runtime.kernels.cuda.skinny import SkinnyConfig
from qtool.runtime.kernels.cuda.stream import StreamConfig
from qtool.runtime.kernels.interface import LinearSpec


@pytest.mark.before_hopper
@pytest.mark.usefixtures("gpu_or_emulator")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("w4g128", torch.float16), ("w4g128-asym", torch.bfloat16), ("w4g32", torch.bfloat16), ("w4", torch.float16),
        ("w8", torch.bfloat16), ("w8g64-asym", torch.float16), ("w4g128a8", torch.bfloat16), ("w8a8", torch.float16),
        ("w4g64a8-asym", torch.float16), ("w8g32a8", torch.bfloat16),
    ],
    ids=str,
)  # fmt: skip
def test_small_products(name: str, dtype: torch.dtype) -> None:
    """Every kernel, also where there is no GPU."""
    weight = make_weight(88, 384, QuantScheme.parse(name))
    run(weight, 3, dtype, SkinnyConfig(2, 4, 2 if hopper() else 1, prefetch=1))
    run(weight, 2, dtype, None)
    if not hopper():
        return
    if not weight.scheme.act_bits:
        run(weight, 9, dtype, StreamConfig(3, 2, 1))
    if gemm.supports(LinearSpec(88, 384, weight.scheme, dtype=dtype)):
        run(weight, 45, dtype, GemmConfig(32, 2, split=2))
        run(weight, 40, dtype, GemmConfig(16, 2, EVEN))


@pytest.mark.usefixtures("gpu_or_emulator", "needs_hopper")
@pytest.mark.parametrize("name", ["w4g128", "w8a8", "w4g64a8-asym"])
def test_small_products_whose_sums_meet_in_clusters(name: str) -> None:
    """Where blocks finish 3, 3, 3 and 1 times 8 tokens, 2, 2, 2 and none, 1, 1 and none."""
    weight = make_weight(72, 512, QuantScheme.parse(name))
    for tokens, cut in ((85, GemmConfig(80, 2, 4)), (17, GemmConfig(48, 3, 4)), (9, GemmConfig(16, 2, 3))):
        run(weight, tokens, torch.float16, cut)


@pytest.mark.one_warp
@pytest.mark.usefixtures("gpu_or_emulator", "needs_hopper")
def test_a_block_without_columns_waits_for_its_cluster_before_it_sends() -> None:
    run(make_weight(40, 128, QuantScheme(8)), 60, torch.float16, GemmConfig(64, 2, 4))


@pytest.mark.usefixtures("gpu_or_emulator", "needs_hopper")
@pytest.mark.parametrize(
    ("name", "largest"),
    [("w4g64-asym", 2000.0), ("w8g32-asym", 250.0), ("w8g32-asym", 2.0**-18)],
)
def test_bfloat16_scales_with_float16_activations(name: str, largest: float) -> None:
    """Scales too small for all their bits in float16, and ones whose weights float16 just holds."""
    drawn = make_weight(24, 128, QuantScheme.parse(name))
    weight = replace(drawn, scale=(drawn.scale.float() / drawn.scale.abs().max() * largest).to(torch.bfloat16))
    x = activations(9, 128, torch.float16) / 64
    spec = LinearSpec(24, 128, weight.scheme, dtype=torch.float16)
    y = apply_choice(x, pack_weight(weight, 16, device()), spec, GemmConfig(16, 2))
    check(y, x, weight, (name, largest))


@pytest.mark.usefixtures("gpu_or_emulator", "needs_hopper")
@pytest.mark.parametrize("name", ["w4g128", "w8", "w8g32-asym"])
def test_small_products_in_tiles_of_four_warpgroups(name: str) -> None:
    weight = make_weight(264, 256, QuantScheme.parse(name))
    run(weight, 70, torch.float16, GemmConfig(80, 4, EVEN))
    run(weight, 70, torch.bfloat16, GemmConfig(80, 4, 2))


@pytest.mark.one_warp
@pytest.mark.before_hopper
@pytest.mark.usefixtures("gpu_or_emulator")
@pytest.mark.parametrize("name", ["w4g128", "w8", "w4g64a8-asym", "w8a8", "w8g128a8"])
def test_small_products_of_more_steps_than_stages(name: str) -> None:
    """Rings are filled anew while products are under way."""
    weight = make_weight(48, 2688, QuantScheme.parse(name))
    run(weight, 3, torch.float16, SkinnyConfig(2, 4, 2 if hopper() else 1))
    if hopper():
        run(weight, 20, torch.float16, GemmConfig(32, 2))
        if not weight.scheme.act_bits:
            run(weight, 2, torch.float16, StreamConfig(2, 2, 2))
