"""The decode benchmark on a tiny shape: its figures are of whole, right-sized runs."""

from __future__ import annotations

import pytest
import torch

from qtool.quant.errors import QtoolError
from qtool.runtime.decode_bench import (
    MODES,
    SHAPES,
    Load,
    mode_schemes,
    open_bench,
    random_decoder,
    run_mode,
    weight_bytes,
)
from qtool.runtime.models import decoder_config

TINY = SHAPES["llama-3-8b"] | {
    "vocab_size": 160, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
CPU = torch.device("cpu")


@pytest.mark.parametrize("mode", [*MODES, "w4-h8"])
def test_every_mode_runs_its_loads(mode: str) -> None:
    loads = [Load(3, 7, prompt=20, short=3, long=9)]
    bench = open_bench(
        "tiny", mode, kv_mode="int8", device=CPU, loads=loads, prompts=[33], dtype=torch.bfloat16, settings=TINY
    )
    figures = run_mode(bench, "tiny", mode, loads, [33])
    assert set(figures.many) == {3}
    assert set(figures.ttft_ms) == {33}
    assert min(figures.single, figures.many[3], figures.ttft_ms[33], figures.start_seconds) > 0


def test_weight_bytes_are_those_of_the_stored_weights() -> None:
    decoder = random_decoder(TINY, MODES["fp16"], dtype=torch.float16, device=CPU, max_model_len=64)
    layer = (256 + 2 * 128) * 256 + 256 * 256 + 512 * 256 + 256 * 256 + 2 * 256
    assert weight_bytes(decoder) == 2 * (2 * layer + 2 * 160 * 256 + 256)


def test_an_int8_head_takes_half_of_its_bytes() -> None:
    sizes = [
        weight_bytes(random_decoder(TINY, mode_schemes(mode), dtype=torch.bfloat16, device=CPU, max_model_len=64))
        for mode in ("fp16", "fp16-h8")
    ]
    assert sizes[0] - sizes[1] == 160 * 256 - 2 * 160  # a bfloat16 scale for each row


def test_shapes_are_those_of_the_published_models() -> None:
    def parameters(name: str) -> int:
        c = decoder_config(SHAPES[name])
        heads = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim * c.hidden_size
        return c.num_layers * (heads + 3 * c.hidden_size * c.intermediate_size) + 2 * c.vocab_size * c.hidden_size

    assert [round(parameters(n) / 1e9, 2) for n in SHAPES] == [6.74, 13.02, 8.03]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(QtoolError, match="unknown shape 'gpt': use one of llama-2-7b"):
        open_bench("gpt", "fp16", kv_mode="float", device=CPU, loads=[], prompts=[])
    with pytest.raises(QtoolError, match="unknown mode 'int3'"):
        open_bench("llama-2-7b", "int3", kv_mode="float", device=CPU, loads=[], prompts=[])
