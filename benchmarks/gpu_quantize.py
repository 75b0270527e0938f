"""How long quantizing a large model takes on a GPU, and how much of its memory.

Makes a model of Llama-3-8B's shape with random bf16 weights and a few layers in a temporary folder, quantizes it with
each method on random tokens through qtool.quant.pipeline, and prints seconds a layer and the peak of GPU memory. The
seconds for all 32 layers are: what is done before the first layer (every weight is read and checked) times the bytes of
the whole model over those of this one, plus the first layer (with all that is done once), 31 of the others, and what
comes after the last.
With --phases it runs each method once more on one layer under a profiler that waits for every GPU operation, and prints
where a layer's time goes: those seconds add up to more than the layer takes without it.

    python benchmarks/gpu_quantize.py --methods gptq,awq --phases
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, MODEL_LAYERS = 4096, 14336, 32, 8, 128, 128256, 32
# (file, function) of what a layer's time is spent in; each line includes what it calls
PHASES = (
    ("calibration.py", "_load"),
    ("blockwise.py", "capture_inputs"),
    ("calibration.py", "capture"),
    ("hessian.py", "add"),
    ("hessian.py", "invert"),
    ("channel_scales.py", "_consumer_loss"),
    ("channel_scales.py", "_linear_loss"),
    ("awq.py", "simulate"),
    ("numerics.py", "find_grid"),
    ("gptq.py", "gptq"),
    ("rows.py", "row_errors"),
    ("block_search.py", "search_block"),
    ("blockwise.py", "quantize_block"),
    ("calibration.py", "run"),
    ("resume.py", "save"),
    ("pipeline.py", "_block_tensors"),
    ("artifact.py", "add"),
    ("pipeline.py", "check_weights"),
)


def make_model(folder: Path, layers: int) -> None:
    """A model folder of Llama-3-8B's shape with `layers` blocks of random bf16 weights."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02, generator=generator).cpu()

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": random(VOCAB, HIDDEN), "lm_head.weight": random(VOCAB, HIDDEN)}
    tensors["model.norm.weight"] = ones.clone()
    for i in range(layers):
        prefix = f"model.layers.{i}."
        tensors |= {
            f"{prefix}self_attn.q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}mlp.gate_proj.weight": random(INNER, HIDDEN),
            f"{prefix}mlp.up_proj.weight": random(INNER, HIDDEN),
            f"{prefix}mlp.down_proj.weight": random(HIDDEN, INNER),
            f"{prefix}input_layernorm.weight": ones.clone(),
            f"{prefix}post_attention_layernorm.weight": ones.clone(),
        }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


def num_bytes(layers: int) -> int:
    """Bytes of the model's weights with so many layers (norms left out)."""
    attention = (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM * HIDDEN
    return 2 * (layers * (attention + 3 * HIDDEN * INNER) + 2 * VOCAB * HIDDEN)


def measure(model: Path, out: Path, method: str, scheme: str, samples: int, seq_len: int) -> dict[str, float]:
    """Quantize once; seconds before the first layer, for the first, for each of the others and after them, peak GB, and
    the mean relative error of the layers' outputs beside plain rounding's.
    """
    from qtool.quant.calibration import CalibrationSet
    from qtool.quant.pipeline import quantize
    from qtool.quant.scheme import QuantScheme

    tokens = torch.randint(VOCAB, (samples, seq_len), generator=torch.Generator().manual_seed(1))
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    ends = [started]

    def progress(stage: str, done: int, total: int) -> None:
        torch.cuda.synchronize()
        if stage.startswith("quantize"):
            ends.append(time.perf_counter())
        else:
            ends[0] = time.perf_counter()

    report = quantize(
        model,
        out,
        scheme=QuantScheme.parse(scheme),
        method=method,
        calibration=CalibrationSet(tokens, "random tokens", f"{samples}x{seq_len}"),
        device="cuda",
        overwrite=True,
        progress=progress,
    )
    ended = time.perf_counter()
    layers = [b - a for a, b in pairwise(ends)]
    rest = layers[1:] or layers
    return {
        "before": ends[0] - started,
        "first": layers[0],
        "layer": sum(rest) / len(rest),
        "after": ended - ends[-1],
        "peak": torch.cuda.max_memory_allocated() / 1e9,
        "reserved": torch.cuda.max_memory_reserved() / 1e9,
        "error": sum(r.relative_error for r in report.layers.values()) / len(report.layers),
        "rtn_error": sum(r.rtn_error for r in report.layers.values()) / len(report.layers),
    }


def profile(model: Path, out: Path, method: str, scheme: str, samples: int, seq_len: int) -> None:
    """Print the seconds of one warm run by phase, with every GPU operation waited for."""
    measure(model, out, method, scheme, 2, 64)  # compile, load libraries
    profiler = cProfile.Profile()
    profiler.enable()
    found = measure(model, out, method, scheme, samples, seq_len)
    profiler.disable()
    print(f"  {method}, one layer, waiting for each operation: {found['layer']:.2f} s")
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    for (path, _, name), (_, calls, _, seconds, _) in sorted(stats.items(), key=lambda item: -item[1][3]):
        if (Path(path).name, name) in PHASES and f"quant{os.sep}" in path:
            print(f"    {Path(path).name + ' ' + name:36} {calls:6} calls  {seconds:7.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="gptq,awq")
    parser.add_argument("--scheme", default="w4g128")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--profile", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)  # the child of --phases
    args = parser.parse_args()
    methods = args.methods.split(",")
    if args.profile:
        for method in methods:
            profile(args.profile / "one", args.profile / "out", method, args.scheme, args.samples, args.seq_len)
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.samples} × {args.seq_len} tokens")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        os.environ["QTOOL_CACHE"] = str(work / "cache")
        make_model(work / "model", args.layers)
        print("method        before  first layer  a layer  32 layers  peak GB  (reserved)  error  (rtn)", flush=True)
        for method in methods:
            found = measure(work / "model", work / "out", method, args.scheme, args.samples, args.seq_len)
            whole = found["before"] * num_bytes(MODEL_LAYERS) / num_bytes(args.layers)
            whole += found["first"] + (MODEL_LAYERS - 1) * found["layer"] + found["after"]
            print(
                f"{method:13} {found['before']:6.1f}  {found['first']:11.2f}  {found['layer']:7.2f}  {whole:9.1f}"
                f"  {found['peak']:7.1f}  {found['reserved']:10.1f}  {found['error']:.4f} ({found['rtn_error']:.4f})",
                flush=True,
            )
        if args.phases:
            torch.cuda.empty_cache()
            make_model(work / "one", 1)
            command = [sys.executable, "-P", __file__, "--profile", name, "--methods", args.methods]
            command += ["--scheme", args.scheme, "--samples", str(args.samples), "--seq-len", str(args.seq_len)]
            subprocess.run(command, check=True, env={**os.environ, "CUDA_LAUNCH_BLOCKING": "1"})


if __name__ == "__main__":
    main()
