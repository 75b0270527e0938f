"""CUDA C++ to machine code at first use, through the NVRTC library that every CUDA build of torch brings along.

ctypes on NVRTC itself rather than `cuda.core`: seven functions are all that is needed, torch alone suffices, and no
version of a third package has to fit. Machine code is cached on disk under a key of everything that shaped it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Literal

from qtool.quant.errors import QtoolError

Macros = Mapping[str, int]
"""Compile-time constants of a kernel: -Dname=value."""


def _library_candidates() -> Iterator[str]:
    """Paths and names under which NVRTC may lie: torch's own dependency, torch's folder, the system."""
    nvidia = util.find_spec("nvidia")
    for root in [] if nvidia is None else list(nvidia.submodule_search_locations or []):
        for path in sorted(Path(root).glob("*/lib/libnvrtc.so.*"), reverse=True):
            yield str(path)
    torch_spec = util.find_spec("torch")
    for root in [] if torch_spec is None else list(torch_spec.submodule_search_locations or []):
        for path in sorted(Path(root).glob("lib/libnvrtc[.-]*so*")):
            if "builtins" not in path.name:
                yield str(path)
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


@functools.cache
def library() -> ctypes.CDLL:
    """NVRTC, loaded. Raises QtoolError where this machine has none."""
    for candidate in _library_candidates():
        try:
            beside = Path(candidate).parent if os.sep in candidate else None
            for part in beside.glob("libnvrtc-builtins*.so*") if beside else ():
                ctypes.CDLL(str(part))  # NVRTC opens it by its bare name, which only finds it once it is loaded
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise QtoolError(
        "NVRTC, which compiles the CUDA kernels, was not found: install a CUDA build of torch "
        "(its package nvidia-cuda-nvrtc brings libnvrtc.so)"
    )


def library_version() -> str:
    """NVRTC's version, `13.0`; a package's patch level is added where it can be told."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    try:
        patch = metadata.version("nvidia-cuda-nvrtc")
    except metadata.PackageNotFoundError:
        patch = "system"
    return f"{major.value}.{minor.value}/{patch}"


def options(arch: str, macros: Macros) -> list[str]:
    """NVRTC's command line for one kernel; `arch` like `sm_90a`. The order of `macros` does not matter."""
    return [f"--gpu-architecture={arch}", "-std=c++17", *(f"-D{k}={v}" for k, v in sorted(macros.items()))]


def cache_key(source: str, command: list[str], version: str) -> str:
    """Name of the cached machine code: one digest of source, options and compiler version."""
    digest = hashlib.sha256()
    for part in (version, *command, source):
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:40]


def cache_folder() -> Path:
    """Where machine code is kept: `$QTOOL_CACHE/cubin`, else `~/.cache/qtool/cubin`."""
    chosen = os.environ.get("QTOOL_CACHE")
    return (Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "qtool") / "cubin"


def _run_nvrtc(source: str, command: list[str], name: str, result: Literal["CUBIN", "PTX"] = "CUBIN") -> bytes:
    """What NVRTC makes of `source`. Raises QtoolError with the compiler's log."""
    lib = library()
    program = ctypes.c_void_p()
    if lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None):
        raise QtoolError(f"kernel {name}: NVRTC could not create a program")
    try:
        args = [o.encode() for o in command]
        status = lib.nvrtcCompileProgram(program, len(args), (ctypes.c_char_p * len(args))(*args))
        size = ctypes.c_size_t()
        if status:
            lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(max(1, size.value))
            lib.nvrtcGetProgramLog(program, log)
            text = log.value.decode(errors="replace").strip()
            how = f"NVRTC {library_version()} {' '.join(command)}"
            raise QtoolError(f"kernel {name} does not compile with {how}:\n{text}")
        getattr(lib, f"nvrtcGet{result}Size")(program, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        getattr(lib, f"nvrtcGet{result}")(program, image)
        return image.raw
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _store(path: Path, image: bytes) -> None:
    """Write beside, then rename; a folder that cannot be written only costs the next process a compilation."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".cubin-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(image)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError:
        return


def compile_ptx(source: str, arch: str, macros: Macros, *, name: str) -> str:
    """The PTX of CUDA C++ `source` for a virtual `arch` like `compute_90a`; else, and for errors, as compile_cuda."""
    return _run_nvrtc(source, options(arch, macros), name, "PTX").rstrip(b"\0").decode()


def compile_cuda(source: str, arch: str, macros: Macros, *, name: str) -> bytes:
    """Machine code (a cubin) of CUDA C++ `source` for `arch`, from the cache where it was compiled before.

    Args:
        source: the whole text; nothing is included.
        arch: `sm_80`, `sm_90a`, ...
        macros: compile-time constants.
        name: of the kernel, for messages.

    Raises:
        QtoolError: no NVRTC on this machine, or the text does not compile (the message holds the compiler's log).
    """
    command = options(arch, macros)
    path = cache_folder() / f"{name}-{cache_key(source, command, library_version())}.cubin"
    try:
        image = path.read_bytes()
        if image.startswith(b"\x7fELF"):
            return image
    except OSError:
        pass
    image = _run_nvrtc(source, command, name)
    _store(path, image)
    return image
