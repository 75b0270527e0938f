"""What the tensor copy engine has to know of one product: the descriptions that stream.cu and gemm.cu take (Maps)."""

from __future__ import annotations

from torch import Tensor

from qtool.runtime.kernels.cuda.driver import tensor_map
from qtool.runtime.kernels.cuda.layout import CHUNK_COLS, PackedWeight, kernel_group
from qtool.runtime.kernels.interface import LinearSpec

_BOX_WORDS = 64  # 16-bit, of 128 bytes of a token


def product_maps(
    x: Tensor,
    packed: PackedWeight,
    spec: LinearSpec,
    *,
    tokens: int,
    tiles: int,
    code_words: int,
    step_columns: int,
) -> bytes:
    """Descriptions of activations, codes, scales and zero points, one after another; unused ones are zeros.

    Args:
        x: [M, 64 packed.chunks] in 16 bits or int8, 16-byte aligned.
        packed: the weight.
        spec: its linear.
        tokens, tiles: that one copy brings, with 128 bytes of activations, `code_words` 32-bit words of each tile's
            codes, or the scales and zero points of `step_columns` (at least of one group).
    """
    columns = packed.chunks * CHUNK_COLS
    acts = tensor_map(x.data_ptr(), len(x), columns * x.element_size() // 2, tokens, _BOX_WORDS, 2, swizzle=True)
    words = packed.chunks * 32 * spec.scheme.bits
    codes = tensor_map(packed.codes.data_ptr(), packed.tiles, words, tiles, code_words, 4)
    scales = zeros = bytes(len(codes))
    if group := kernel_group(spec.scheme):
        pairs, step_pairs = columns // group * 8, max(1, step_columns // group) * 8
        scales = tensor_map(packed.scales.data_ptr(), packed.tiles, pairs, tiles, step_pairs, 4)
        if not spec.scheme.symmetric:
            zeros = tensor_map(packed.zeros.data_ptr(), packed.tiles, pairs, tiles, step_pairs, 2)
    return acts + codes + scales + zeros
