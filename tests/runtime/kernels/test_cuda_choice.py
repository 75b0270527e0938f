"""Which kernel and cut serves which product: tables, rule, estimate, and that what they name fits a device."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from qtool.quant.scheme import QuantScheme
from qtool.runtime.kernels.cuda import choice as choices
from qtool.runtime.kernels.cuda import gemm, stream
from qtool.runtime.kernels.cuda.choice import (
    BUCKETS,
    Choice,
    bucket_of,
    decode,
    encode,
    key,
    rule,
    save_tuned,
    serves,
)
from qtool.runtime.kernels.cuda.gemm import GemmConfig
from qtool.runtime.kernels.cuda.skinny import SkinnyConfig
from qtool.runtime.kernels.cuda.stream import StreamConfig
from qtool.runtime.kernels.interface import LinearSpec


@pytest.mark.parametrize(
    "choice",
    [
        None,
        SkinnyConfig(2, 8, 1, 2, True, 3),
        StreamConfig(4, 8, 3),
        GemmConfig(128, 3, 2),
    ],
)
def test_choices_survive_json(choice: Choice) -> None:
    assert decode(encode(choice)) == choice


def test_buckets_cover_all_counts() -> None:
    assert [bucket_of(m) for m in (1, 2, 8, 9, 33, 128, 129)] == [1, 8, 8, 16, 48, 128, 144]
    assert [bucket_of(m) for m in (65, 257, 1025, 2048, 2049)] == [80, 288, 1088, 2048, 2048]


def test_choices_for_other_activations_do_not_serve() -> None:
    w4a8, w4a16 = (LinearSpec(64, 4096, QuantScheme(4, 64, act_bits=bits)) for bits in (8, None))
    for either in (None, SkinnyConfig(1, 4), GemmConfig(64, 2)):
        assert serves(either, w4a8, 64)
        assert serves(either, w4a16, 64)
    for wide in (GemmConfig(256, 2), GemmConfig(192, 3)):  # sums of a group need registers of their own
        assert serves(wide, w4a16, 256)
        assert not serves(wide, w4a8, 256)
    assert serves(GemmConfig(256, 2, progressive=True), w4a8, 256)
    assert not serves(GemmConfig(256, 2, progressive=True), w4a8, 128)
    assert not serves(GemmConfig(256, 2, progressive=True), w4a16, 256)
    assert not serves(GemmConfig(64, 2), LinearSpec(64, 4096, QuantScheme(8, symmetric=False, act_bits=8)), 64)
    assert serves(StreamConfig(2, 8), w4a16, 16)
    assert not serves(StreamConfig(2, 8), w4a8, 16)
    assert not serves(StreamConfig(2, 8), w4a16, 64)
    assert not serves(GemmConfig(256, 3), w4a16, 256)  # more sums than registers


def test_measurements_of_kin_serve_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def spec_of(name: str, dtype: torch.dtype = torch.float16) -> LinearSpec:
        return LinearSpec(512, 4096, QuantScheme.parse(name), dtype=dtype)

    table = {
        "w4g128 512x4096 16": ["stream", 1, 8, 2],
        "w4g128 512x4096 16 bf16": ["stream", 2, 8, 2],
        "w8 512x4096 16": ["stream", 3, 8, 1],
        "w4g32-asym 512x4096 16": ["stream", 6, 16, 4],  # more than a multiprocessor has
        "w8a8 512x4096 16": ["skinny", 2, 4, 1, 1, 0, 1],
    }
    monkeypatch.setattr(choices, "_table", lambda device_name: table)
    properties = SimpleNamespace(name="Some GPU", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)

    def chosen(name: str, dtype: torch.dtype = torch.float16) -> object:
        return choices._choose.__wrapped__(spec_of(name, dtype), 16, 0)

    assert chosen("w4g128") == StreamConfig(1, 8, 2)
    assert chosen("w4g128", torch.bfloat16) == StreamConfig(2, 8, 2)
    assert chosen("w4g64-asym") == StreamConfig(1, 8, 2)  # as AWQ
    assert chosen("w4g64-asym", torch.bfloat16) == StreamConfig(2, 8, 2)
    assert chosen("w4g32-asym") == StreamConfig(1, 8, 2)
    assert chosen("w8g128", torch.bfloat16) == StreamConfig(3, 8, 1)
    assert chosen("w8a8", torch.bfloat16) == SkinnyConfig(2, 4, prefetch=1)
    assert chosen("w8g64a8") == SkinnyConfig(2, 4, prefetch=1)
    unmeasured = spec_of("w4g128a8")
    assert chosen("w4g128a8") == rule(unmeasured, 16, (9, 0), 132)
    table["w4g128a8 512x4096 16"] = ["wide", 16, 2, 1, 4, 2, 1]  # of an earlier version
    assert chosen("w4g128a8") == rule(unmeasured, 16, (9, 0), 132)


def test_a_ring_has_shorter_steps_where_longer_ones_leave_too_few() -> None:
    wide, narrow = GemmConfig(256, 2), GemmConfig(128, 2)
    rings = {
        (name, config): config.ring(LinearSpec(4096, 4096, QuantScheme.parse(name)))
        for name in ("w4g128", "w8", "w8g128", "w8a8")
        for config in (wide, narrow)
    }
    assert {key: (ring.columns, ring.stages) for key, ring in rings.items()} == {
        ("w4g128", wide): (128, 3),
        ("w4g128", narrow): (128, 5),
        ("w8", wide): (64, 5),  # of 32 KB of activations and 8 KB of codes
        ("w8", narrow): (128, 4),
        ("w8g128", wide): (64, 5),
        ("w8g128", narrow): (128, 4),
        ("w8a8", wide): (128, 4),  # of 32 KB of activations and 16 KB of codes
        ("w8a8", narrow): (128, 6),
    }


def test_tiles_left_over_are_shared_where_the_last_round_would_be_partly_idle() -> None:
    whole, even = GemmConfig(256, 2), GemmConfig(256, 2, gemm.EVEN)
    assert gemm.blocks_and_rounds(172, 32, whole, 132) == (132, 2)
    assert gemm.blocks_and_rounds(172, 32, even, 132) == (132, 0)  # 1.3 tiles for each
    assert gemm.blocks_and_rounds(688, 32, even, 132) == (132, 4)  # four whole ones, then 160 shared
    assert gemm.blocks_and_rounds(264, 32, even, 132) == (132, 2)
    assert gemm.blocks_and_rounds(90, 32, whole, 132) == (90, 1)
    assert gemm.blocks_and_rounds(90, 32, even, 132) == (132, 0)
    assert gemm.blocks_and_rounds(5, 9, even, 132) == (45, 0)  # a step for each
    spec = LinearSpec(22016, 4096, QuantScheme.parse("w4g128"))
    assert even in gemm.configs(spec, 256, 132)
    assert even not in gemm.configs(spec, 256, 172)
    assert gemm.for_more(spec, 2560, whole, 132) == even  # 13.03 rounds
    assert gemm.for_more(spec, 256 * 33, even, 132) == whole  # 43
    clustered = GemmConfig(128, 2, 4)
    assert gemm.for_more(spec, 3072, clustered, 132) == clustered


def test_every_cut_of_stream_fits_a_multiprocessor() -> None:
    for name in ("w4g128", "w4g32-asym", "w8", "w8g32-asym"):
        spec = LinearSpec(4096, 4096, QuantScheme.parse(name))
        assert not stream.candidates(spec, 17)
        for tokens in (1, 8, 16):
            assert stream.candidates(spec, tokens)
            for config in stream.candidates(spec, tokens):
                blocks = config.resident(spec, tokens)
                assert blocks * (config.shared_bytes(spec, tokens) + 1024) <= 228 * 1024
                assert blocks * config.warps <= 64
                assert config.warps * config.prefetch <= 32  # steps of 128 columns


def test_the_rings_hold_activations_codes_scales_and_zero_points() -> None:
    spec = LinearSpec(4096, 4096, QuantScheme.parse("w4g32-asym"))
    acts, codes, scales, zeros = 8 * 128 * 2, 3 * 16 * 128 // 2, 3 * 16 * 4 * 2, 3 * 16 * 4
    to_128_bytes = 256
    assert to_128_bytes - zeros < 128
    assert StreamConfig(3, 4, 2).shared_bytes(spec, 5) == 4 * 2 * (acts + codes + scales + to_128_bytes + 8)


def test_the_rings_have_room_for_the_sums() -> None:
    """One a warp, in float32, of 8 rows more than there are."""
    spec = LinearSpec(4096, 4096, QuantScheme(4))
    for tiles in (1, 2, 5, 8):
        for tokens in (8, 16):
            assert StreamConfig(tiles, 1, 1).shared_bytes(spec, tokens) >= tokens * (16 * tiles + 8) * 4


def test_the_estimate_fills_the_device() -> None:
    spec = LinearSpec(12288, 4096, QuantScheme.parse("w4g128"))
    best = gemm.candidates(spec, 256, 132)[0]  # 64 x 2 tiles of 192 rows and 128 tokens
    assert (best.rows, best.tokens, best.split) == (192, 128, 1)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
@pytest.mark.parametrize("name", ["w4g128", "w8", "w8a8", "w4g128a8"])
def test_the_rule_stays_within_what_the_device_can(capability: tuple[int, int], name: str) -> None:
    for rows in (16, 4096, 128256):
        spec = LinearSpec(rows, 4096, QuantScheme.parse(name))
        for bucket in BUCKETS:
            choice = rule(spec, bucket, capability, 132)
            if isinstance(choice, GemmConfig):
                assert capability == (9, 0)
                assert gemm.fits(spec, choice)
            elif isinstance(choice, StreamConfig):
                assert capability == (9, 0)
                assert stream.fits(spec, bucket, choice)
            elif isinstance(choice, SkinnyConfig):
                assert bucket <= 64
                assert choice.split == 1 or capability >= (9, 0)
                assert choice.shared_bytes(bucket) <= 99 * 1024  # what a block may have on Ada


def test_tuned_choices_are_merged(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path))
    spec = LinearSpec(64, 64, QuantScheme(4, 64))
    save_tuned("Some GPU", {key(spec, 1): SkinnyConfig(1, 4), key(spec, 8): None})
    path = save_tuned("Some GPU", {key(spec, 8): GemmConfig(64, 2)})
    assert path.name == "some-gpu.json"
    text = path.read_text()
    assert '"w4g64 64x64 1 bf16"' in text
    assert '"gemm"' in text
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_shipped_table_can_be_used() -> None:
    from importlib.resources import files

    table = json.loads((files("qtool.runtime.kernels.cuda") / "nvidia-h200.json").read_text())
    assert len(table) > 40
    for name, entry in table.items():
        scheme, shape, bucket, *bfloat16 = name.split()
        rows, cols = (int(n) for n in shape.split("x"))
        dtype = torch.bfloat16 if bfloat16 else torch.float16
        spec = LinearSpec(rows, cols, QuantScheme.parse(scheme), dtype=dtype)
        assert name == key(spec, int(bucket))
        assert int(bucket) in BUCKETS
        choice = decode(entry)
        assert serves(choice, spec, int(bucket))
        if isinstance(choice, GemmConfig):
            assert choice in gemm.configs(spec, int(bucket))
        elif isinstance(choice, StreamConfig):
            assert stream.fits(spec, int(bucket), choice)
        elif isinstance(choice, SkinnyConfig):
            assert choice.shared_bytes(int(bucket)) <= 227 * 1024


@pytest.mark.parametrize(
    "entry",
    [
        ["gemm", 64, 5, 1, 0], ["gemm", 20, 2, 1, 0], ["gemm", 64, 2, 16, 0], ["gemm", 64, 2, -1, 0],
        ["gemm", 64, 2, 1], ["gemm", None, 2, 1, 0], ["gemm", 64, 2, [1], 0], ["stream", 0, 0, 0], ["stream", 2, 8, 0],
        ["wide", 64, 2, 1, 2, 3, 1], ["skinny", 0, 0, 0, 0, 0, 0], ["skinny", 2, 8, 1, 1, 0], ["unheard-of"], [], 5,
        True, "gemm", {"gemm": 1},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", ["w4g128", "w4g128a8", "w8a8"])
def test_what_a_table_should_not_say_is_passed_over(entry: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = LinearSpec(512, 4096, QuantScheme.parse(name), dtype=torch.float16)
    monkeypatch.setattr(choices, "_table", lambda device_name: {key(spec, 16): entry})
    properties = SimpleNamespace(name="Some GPU", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert choices._choose.__wrapped__(spec, 16, 0) == rule(spec, 16, (9, 0), 132)


def test_skinny_products_are_for_few_tokens() -> None:
    spec = LinearSpec(512, 4096, QuantScheme.parse("w8a8"), dtype=torch.float16)
    assert serves(SkinnyConfig(2, 8), spec, 64)
    assert not serves(SkinnyConfig(2, 8), spec, 80)


def test_tiles_in_many_parts_cost_what_their_sums_take() -> None:
    """The block that begins a tile reads what all others have of it."""
    spec = LinearSpec(2048, 28672, QuantScheme.parse("w8a8"), dtype=torch.float16)
    by_blocks = {n: gemm.microseconds(spec, 256, GemmConfig(256, 2, gemm.EVEN), n) for n in (32, 128)}
    steps, sums = 28672 // 128 * 16, 256 * 128 * 4
    rate = gemm._SHARE_BYTES_PER_US
    step_us = (by_blocks[32] - by_blocks[128] + 6 * sums / rate) / (steps / 32 - steps / 128)
    assert step_us == pytest.approx(2 * gemm._ONE_SUM[256] * gemm._COSTS["one sum"].longer)
    assert gemm.candidates(spec, 256, 132)[0].split != gemm.EVEN  # 8.25 parts of each of 16 tiles
