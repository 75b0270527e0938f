"""`qtool bench` and `qtool serve`: what is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from qtool.cli import bench, serve
from qtool.cli.engine_options import engine_args, parse_bytes
from qtool.quant.errors import QtoolError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4GiB", 4 * 2**30),
        ("512M", 512 * 2**20),
        ("1.5 kb", 1536),
        ("2t", 2 * 2**40),
    ],
)
def test_parse_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "GiB", "4 apples", "1e9", "0.1", "9" * 400])
def test_no_memory_size(text: str) -> None:
    with pytest.raises(QtoolError, match="memory size"):
        parse_bytes(text)


def test_engine_args_name_the_option() -> None:
    good = {
        "dtype": "auto",
        "device": "cpu",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        "max_model_len": None,
        "kv_cache_memory": "1k",
        "kv_cache_dtype": "auto",
        "block_size": 16,
    }
    assert engine_args(**good)["kv_cache_memory"] == 1024  # type: ignore[arg-type]
    for given, length in (("auto", None), ("64", 64), (64, 64), (None, None)):
        assert engine_args(**(good | {"max_model_len": given}))["max_model_len"] == length  # type: ignore[arg-type]
    for name, value in (
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", -1),
        ("max_model_len", 0),
        ("max_model_len", "long"),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", float("nan")),
        ("block_size", 0),
        ("dtype", "int3"),
        ("kv_cache_dtype", "fp8"),
        ("head_dtype", "int4"),
        ("speculative", "guess"),
        ("draft_model", "m"),
        ("num_speculative_tokens", 2),
    ):
        with pytest.raises(QtoolError, match="--" + name.replace("_", "-")):
            engine_args(**(good | {name: value}))  # type: ignore[arg-type]


def test_speculation_is_checked_with_its_options() -> None:
    good = {
        "dtype": "auto",
        "device": "cpu",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        "max_model_len": None,
        "kv_cache_memory": None,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "speculative": "draft",
    }
    with pytest.raises(QtoolError, match="--speculative draft needs --draft-model"):
        engine_args(**good)  # type: ignore[arg-type]
    found = engine_args(**(good | {"draft_model": "m", "num_speculative_tokens": 3}))  # type: ignore[arg-type]
    assert (found["speculative"], found["draft_model"], found["num_speculative_tokens"]) == ("draft", "m", 3)


def test_bench_refuses_what_cannot_be_meant(tmp_path: Path) -> None:
    cases = [
        ({}, "MODEL"),
        ({"model": "m", "url": "u"}, "either"),
        ({"url": "u", "compare_static": True}, "--compare-static"),
        ({"model": "m", "compare_static": True, "speculative": "prompt-lookup"}, "--speculative"),
        ({"model": "m", "concurrency": "1,x"}, "--concurrency"),
        ({"model": "m", "concurrency": "0"}, "--concurrency"),
        ({"model": "m", "num_requests": 0}, "--num-requests"),
        ({"model": "m", "input_len": 0}, "--input-len"),
        ({"model": "m", "request_rate": 0.0}, "--request-rate"),
        ({"model": "m", "request_rate": float("nan")}, "--request-rate"),
        ({"model": "m", "trace": tmp_path / "none.csv"}, "none.csv"),
        ({"model": "m", "trace_speed": 0.0}, "--trace-speed"),
        ({"model": "m", "request_rate": 1.0, "concurrency": "4"}, "exclude"),
    ]
    for arguments, message in cases:
        with pytest.raises(QtoolError, match=message):
            bench.command(**arguments)  # type: ignore[arg-type]


def test_serve_refuses_before_loading() -> None:
    for arguments, message in (
        ({"api_key": ""}, "--api-key"),
        ({"drain_s": 0.0}, "--drain-s"),
        ({"drain_s": float("inf")}, "--drain-s"),
        ({"drain_s": float("nan")}, "--drain-s"),
        ({"step_timeout_s": -1.0}, "--step-timeout-s"),
        ({"step_timeout_s": float("nan")}, "--step-timeout-s"),
        ({"start_timeout_s": float("inf")}, "--start-timeout-s"),
        ({"metrics_prefix": "my metrics "}, "--metrics-prefix"),
        ({"host": ".."}, "--host"),
        ({"port": -1}, "--port"),
        ({"kv_cache_memory": "much"}, "memory size"),
    ):
        with pytest.raises(QtoolError, match=message):
            serve.command("no such model", **arguments)  # type: ignore[arg-type]
