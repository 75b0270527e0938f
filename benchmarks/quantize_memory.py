"""Peak memory of `qtool quantize` on a CPU, for a synthetic Llama-shaped model of a billion parameters.

    python benchmarks/quantize_memory.py --work DIR

Makes the model (random bfloat16 weights, a byte tokenizer) under DIR, quantizes it with every method in a process of
its own, and prints the largest resident set of that process (VmHWM of /proc: everything, the interpreter, torch and
touched pages of mapped files included) against the limit, 4 × the 16-bit size of one block + 1.5 GB. Memory does not
grow with the number of blocks, so that a few are enough (--layers); all 16 make the billion.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from qtool.quant.artifact import ArtifactWriter

HIDDEN, INNER, HEADS, VOCAB = 2048, 8192, 32, 32_000
METHODS = ("rtn", "gptq", "awq", "awq+gptq", "rounding")


def block_shapes() -> dict[str, tuple[int, ...]]:
    """Tensor name relative to a block → shape."""
    square, wide = (HIDDEN, HIDDEN), (INNER, HIDDEN)
    return {
        "self_attn.q_proj.weight": square,
        "self_attn.k_proj.weight": square,
        "self_attn.v_proj.weight": square,
        "self_attn.o_proj.weight": square,
        "mlp.gate_proj.weight": wide,
        "mlp.up_proj.weight": wide,
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }


def make_model(folder: Path, layers: int) -> None:
    """Write the model folder, one tensor at a time."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    shapes |= {f"model.layers.{i}.{n}": s for i in range(layers) for n, s in block_shapes().items()}
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCAB,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    with ArtifactWriter(folder, overwrite=True) as artifact:
        artifact.add({"model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16)})
        for name, shape in shapes.items():
            ones = torch.ones(shape, dtype=torch.bfloat16)
            tensor = ones if len(shape) == 1 else torch.randn(shape, generator=generator).mul_(0.02).bfloat16()
            artifact.add({name: tensor})
        artifact.write_json("config.json", config.to_dict())
    vocab = {"<eos>": 0} | {c: i + 1 for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)


def peak_bytes(process: subprocess.Popen[bytes]) -> int:
    """Wait for the process; its VmHWM as last seen."""
    peak = 0
    while process.poll() is None:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:
            break
        peak = max([peak, *(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))])
        time.sleep(0.05)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the model and the artifacts")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--iters", type=int, default=4, help="steps of the rounding search: they reuse their memory")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("options", nargs="*", help="further options of qtool quantize, after --")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    model = args.work / f"llama-{args.layers}"
    if not model.exists():
        make_model(model, args.layers)
    block = 2 * sum(torch.Size(shape).numel() for shape in block_shapes().values())
    limit = 4 * block + 1_500_000_000
    parameters = (args.layers * block // 2 + 2 * VOCAB * HIDDEN) / 1e9
    print(f"{parameters:.2f} G parameters, {args.layers} blocks of {block / 1e6:.0f} MB; limit {limit / 1e6:.0f} MB")
    print(f"{args.samples} × {args.seq_len} tokens, w4g128\n")
    print("| method | peak MB | of the limit | seconds |\n|---|---|---|---|")
    for method in args.methods.split(","):
        out = args.work / f"out-{method}"
        options = ["--samples", str(args.samples), "--seq-len", str(args.seq_len), "--iters", str(args.iters)]
        command = [sys.executable, "-m", "qtool.cli", "quantize", str(model), "-o", str(out), "--method", method]
        started = time.perf_counter()
        command += [*options, "--device", "cpu", "--force", "--quiet", *args.options]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        peak = peak_bytes(process)
        if process.returncode:
            raise SystemExit(f"{method}: exit status {process.returncode}")
        seconds = time.perf_counter() - started
        print(f"| {method} | {peak / 1e6:.0f} | {peak / limit:.0%} | {seconds:.0f} |", flush=True)
        shutil.rmtree(out)


if __name__ == "__main__":
    main()
