"""The compiler's cache keys, its cache on disk, its refusals. Compiling itself needs NVRTC, but no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from qtool.quant.errors import QtoolError
from qtool.runtime.kernels.cuda import nvrtc
from qtool.runtime.kernels.cuda.driver import source

TEXT = 'extern "C" __global__ void one(float* x) { x[threadIdx.x] = VALUE; }'


def have_nvrtc() -> bool:
    try:
        nvrtc.library()
    except QtoolError:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not have_nvrtc(), reason="NVRTC is not on this machine")


def test_the_key_changes_with_everything_that_shapes_the_code() -> None:
    command = nvrtc.options("sm_90a", {"A": 1, "B": 2})
    key = nvrtc.cache_key(TEXT, command, "13.0")
    assert key == nvrtc.cache_key(TEXT, nvrtc.options("sm_90a", {"B": 2, "A": 1}), "13.0")
    others = [
        nvrtc.cache_key(TEXT + " ", command, "13.0"),
        nvrtc.cache_key(TEXT, nvrtc.options("sm_80", {"A": 1, "B": 2}), "13.0"),
        nvrtc.cache_key(TEXT, nvrtc.options("sm_90a", {"A": 1, "B": 3}), "13.0"),
        nvrtc.cache_key(TEXT, command, "13.1"),
    ]
    assert len({key, *others}) == 5


def test_the_cache_spares_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    def fake(text: str, command: list[str], name: str) -> bytes:
        runs.append(name)
        return b"\x7fELF machine code"

    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_run_nvrtc", fake)
    monkeypatch.setattr(nvrtc, "library_version", lambda: "13.0")
    for value in (1, 1, 2):
        assert nvrtc.compile_cuda(TEXT, "sm_90a", {"VALUE": value}, name="one") == b"\x7fELF machine code"
    assert runs == ["one", "one"]
    files = list((tmp_path / "cubin").iterdir())
    assert len(files) == 2
    assert all(f.suffix == ".cubin" for f in files)
    files[0].write_bytes(b"torn")  # a damaged entry is compiled again, not loaded
    files[1].write_bytes(b"torn")
    nvrtc.compile_cuda(TEXT, "sm_90a", {"VALUE": 1}, name="one")
    assert len(runs) == 3


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(nvrtc, "_run_nvrtc", lambda text, command, name: b"\x7fELF")
    monkeypatch.setattr(nvrtc, "library_version", lambda: "13.0")
    assert nvrtc.compile_cuda(TEXT, "sm_90a", {}, name="one") == b"\x7fELF"


@needs_nvrtc
def test_errors_carry_the_compilers_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path))
    with pytest.raises(QtoolError, match=r"kernel one does not compile[\s\S]*VALUE"):
        nvrtc.compile_cuda(TEXT, "sm_90a", {}, name="one")
    assert not (tmp_path / "cubin").exists()


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_compile(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path))
    weight = {"WEIGHT_BITS": 4, "ACT_BITS": 16, "BF16": 1, "SCALE_BF16": 0, "GROUP": 128, "ASYM": 1}
    skinny = {"CH": 2, "MT": 1, "NT": 2, "KW": 8, "SK": 1, "PF": 2, "XPF": 1, "MINB": 1}
    rows = {"BF16": 1, "THREADS": 256, "UNITS": 2, "ROUNDED": 0, "QUANT": 1, "ADD": 1, "WEIGHT_BITS": 8}
    heads = {"BF16": 1, "D": 128, "KV": 1, "QK_NORM": 1, "WEIGHT_BITS": 8}
    jobs = [
        ("skinny.cu", weight | skinny),
        ("dequantize.cu", weight),
        ("quantize.cu", rows),
        ("norm.cu", rows),
        ("silu.cu", rows | {"ROUNDED": 1}),
        ("rotate.cu", heads | {"BS": 16}),
        ("decode_attention.cu", heads | {"G": 4, "BS": 16, "NT": 2, "WARPS": 4, "MINB": 3}),
        ("greedy.cu", rows | {"THREADS": 1024}),
        ("feed.cu", rows),
        ("unpack.cu", rows),
    ]
    if arch == "sm_90a":
        gemm = {"TOKENS": 96, "CW": 3, "SPLIT": 1, "STAGES": 3, "BLOCKS": 160, "LAUNCHES": 2}
        whole = weight | gemm | {"COLUMNS": 128, "PROGRESSIVE": 0, "GATED": 0, "FUSED": 0}
        stream = {"MT": 1, "NT": 4, "KW": 4, "PF": 3, "MINB": 3, "GATED": 1}
        jobs += [
            ("gemm.cu", whole | {"COLUMNS": 64}),
            ("gemm.cu", whole | {"SPLIT": 2, "GATED": 1}),
            ("gemm.cu", whole | {"ASYM": 0, "FUSED": 1}),
            ("gemm.cu", whole | {"GROUP": 0, "FUSED": 1}),
            ("gemm.cu", whole | {"ACT_BITS": 8}),
            ("gemm.cu", whole | {"ACT_BITS": 8, "PROGRESSIVE": 1, "SPLIT": 2}),
            ("stream.cu", weight | stream),
        ]
    for file, macros in jobs:
        image = nvrtc.compile_cuda(source(file), arch, macros, name=file.removesuffix(".cu"))
        assert image.startswith(b"\x7fELF")
