"""The options of verbs that run an engine, and their way into its arguments."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from qtool.quant.errors import QtoolError
from qtool.runtime.engine.policy import POLICIES
from qtool.runtime.engine.speculation import METHODS, MOST, speculation_config
from qtool.runtime.engine.swap import MODES

Dtype = Annotated[str, typer.Option("--dtype", help="Activations: auto, float32, bfloat16 or float16.")]
MaxNumSeqs = Annotated[int, typer.Option("--max-num-seqs", help="Most requests in one step.")]
MaxNumBatchedTokens = Annotated[
    int, typer.Option("--max-num-batched-tokens", help="Most tokens in one step, prompts and answers together.")
]
MaxModelLen = Annotated[
    str,
    typer.Option(
        "--max-model-len",
        metavar="TOKENS|auto",
        help="Longest prompt and answer together. auto: the model's context, less where the memory holds less.",
    ),
]
GpuMemoryUtilization = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory-utilization",
        help="Share of the GPU's memory for weights, steps and KV cache. Default: nine tenths of what is free.",
    ),
]
KVCacheMemory = Annotated[
    str | None,
    typer.Option("--kv-cache-memory", metavar="SIZE", help="Memory for the KV cache, such as 512MiB or 4GiB."),
]
KVCacheDtype = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        help="int8 halves the KV cache; float never quantizes it; auto does as the model's artifact says.",
    ),
]
HeadDtype = Annotated[
    str,
    typer.Option(
        "--head-dtype",
        help="int8 serves an output projection that is stored in 16 bits in int8; auto serves it as it is stored.",
    ),
]
SchedulingPolicy = Annotated[
    str,
    typer.Option(
        "--scheduling-policy",
        help="Who is served first: fcfs (first come), priority (lowest `priority`), shortest (shortest prompt).",
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic", help="The same tokens alone or among others, cached or not. On a CPU alone; slower."
    ),
]
Speculative = Annotated[
    str | None,
    typer.Option(
        "--speculative",
        metavar="|".join(METHODS),
        help="Propose tokens and verify several in one step: copied from the text, by a smaller model, or by the "
        "model's own INT4 artifact. The output stays as it is.",
    ),
]
DraftModel = Annotated[
    str | None, typer.Option("--draft-model", metavar="MODEL", help="What proposes, for --speculative draft or self.")
]
NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        help=f"Tokens to propose where it pays, 1 to {MOST}. Default: by how many are accepted.",
        show_default=False,
    ),
]
SwapSpace = Annotated[
    str | None,
    typer.Option(
        "--swap-space",
        metavar="SIZE",
        help="Host memory for requests that make room for others, such as 4GiB; 0: none. Default: 4GiB on a GPU.",
    ),
]
PreemptionMode = Annotated[
    str,
    typer.Option("--preemption-mode", help="How requests make room: recompute, swap, or auto (what costs less)."),
]
BlockSize = Annotated[int, typer.Option("--block-size", help="Tokens in one block of the KV cache.")]

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_bytes(text: str) -> int:
    """`4GiB`, `512M`, `1.5g` or a plain number of bytes → bytes; units are powers of 1024.

    Raises:
        QtoolError: not a size, or not above zero.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    size = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 1 <= size < float("inf"):
        raise QtoolError(f"{text!r} is no memory size; write for example 512MiB or 4GiB")
    return int(size)


def _tokens(text: str) -> int | None:
    if text.strip().lower() == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise QtoolError(f"--max-model-len must be a number of tokens or auto, got {text!r}") from None


def check_kv_cache_dtype(kv_cache_dtype: str) -> None:
    """Raise QtoolError, naming the option, for a value that is none."""
    if kv_cache_dtype not in ("auto", "int8", "float"):
        raise QtoolError(f"--kv-cache-dtype must be auto, int8 or float, got {kv_cache_dtype!r}")


def check_head_dtype(head_dtype: str) -> None:
    """Raise QtoolError, naming the option, for a value that is none."""
    if head_dtype not in ("auto", "int8"):
        raise QtoolError(f"--head-dtype must be auto or int8, got {head_dtype!r}")


def _as_options(message: str) -> str:
    """An engine's message with its arguments named as options."""
    names = r"\b(num_speculative_tokens|draft_model|speculative)\b"
    return re.sub(names, lambda found: "--" + found[1].replace("_", "-"), message)


def engine_args(
    *,
    dtype: str,
    device: str,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: str | int | None,
    kv_cache_memory: str | None,
    kv_cache_dtype: str,
    block_size: int,
    head_dtype: str = "auto",
    scheduling_policy: str = "fcfs",
    deterministic: bool = False,
    gpu_memory_utilization: float | None = None,
    speculative: str | None = None,
    draft_model: str | None = None,
    num_speculative_tokens: int | None = None,
    swap_space: str | None = None,
    preemption_mode: str = "auto",
) -> dict[str, Any]:
    """The engine's keyword arguments, checked before a model is loaded.

    Raises:
        QtoolError: a value out of range, named as its option.
    """
    length = _tokens(max_model_len) if isinstance(max_model_len, str) else max_model_len
    numbers = {
        "--max-num-seqs": max_num_seqs,
        "--max-num-batched-tokens": max_num_batched_tokens,
        "--max-model-len": length,
        "--block-size": block_size,
    }
    for option, value in numbers.items():
        if value is not None and value < 1:
            raise QtoolError(f"{option} must be at least 1, got {value}")
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise QtoolError(f"--dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")
    if scheduling_policy not in POLICIES:
        raise QtoolError(f"--scheduling-policy must be {', '.join(POLICIES)}, got {scheduling_policy!r}")
    if gpu_memory_utilization is not None and not 0 < gpu_memory_utilization <= 1:
        raise QtoolError(f"--gpu-memory-utilization must be in (0, 1], got {gpu_memory_utilization}")
    if preemption_mode not in MODES:
        raise QtoolError(f"--preemption-mode must be {', '.join(MODES)}, got {preemption_mode!r}")
    check_kv_cache_dtype(kv_cache_dtype)
    check_head_dtype(head_dtype)
    try:
        speculation_config(speculative, draft_model, num_speculative_tokens)
    except QtoolError as error:
        raise QtoolError(_as_options(str(error))) from None
    return {
        "dtype": dtype,
        "device": device,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": length,
        "gpu_memory_utilization": gpu_memory_utilization,
        "block_size": block_size,
        "scheduling_policy": scheduling_policy,
        "deterministic": deterministic,
        "speculative": speculative,
        "draft_model": draft_model,
        "num_speculative_tokens": num_speculative_tokens,
        "kv_cache_dtype": kv_cache_dtype,
        "head_dtype": head_dtype,
        "preemption_mode": preemption_mode,
        "swap_space": None if swap_space is None else 0 if swap_space == "0" else parse_bytes(swap_space),
        "kv_cache_memory": None if kv_cache_memory is None else parse_bytes(kv_cache_memory),
    }
