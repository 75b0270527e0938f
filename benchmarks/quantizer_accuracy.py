"""Perplexity and KL divergence of quantized artifacts against their 16-bit model, in float32 by plain transformers.

Each run quantizes the model through qtool.quant.pipeline, reads the artifact back, puts its dequantized weights into
transformers' model (which rounds activations too, where the scheme says so), and evaluates non-overlapping windows of
the text. For example:

    python benchmarks/quantizer_accuracy.py --model smollm2-135m --calibration calib.jsonl --evaluation test.txt \
        --run rtn:w4g64 --run gptq:w4g64 --run awq:w4g64 --run rtn:w8
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from qtool.quant.calibration import calibration_set
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.formats import open_reader
from qtool.quant.hub import resolve_model
from qtool.quant.job import DEFAULT_ITERS
from qtool.quant.pipeline import quantize
from qtool.quant.scheme import QuantScheme
from qtool.quant.structure import linear_shapes


def windows(tokenizer: Any, text: str, length: int, count: int) -> Tensor:
    """The first `count` windows [count, length] of the whole text's tokens."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids[: length * count]).view(-1, length)


def round_input(module: torch.nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """A forward pre-hook: symmetric int8 per token, as compressed-tensors does it."""
    scale = args[0].abs().amax(-1, keepdim=True) / 127.5
    return ((args[0] / scale).round_().clamp_(-128, 127).nan_to_num_() * scale,)


def artifact_model(folder: Path) -> Any:
    """transformers' float32 model of an artifact, with its weights dequantized by qtool.

    The inputs of layers whose scheme says so are rounded to 8 bits, one scale a token.
    """
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with Checkpoint(folder) as checkpoint:
        reader = open_reader(checkpoint)
        assert reader is not None
        state = {name: checkpoint.tensor(name).float() for name in model.state_dict() if name in checkpoint}
        for layer in linear_shapes(checkpoint):
            scheme = reader.scheme(layer)
            if scheme is None:
                continue
            state[f"{layer}.weight"] = reader.read(layer).dequantize()
            if scheme.act_bits:
                model.get_submodule(layer).register_forward_pre_hook(round_input)
        missing, _ = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    if set(missing) - ({"lm_head.weight"} if config.tie_word_embeddings else set()):
        raise SystemExit(f"{folder}: lacks {missing}")
    return model


@torch.no_grad()
def evaluate(model: Any, data: Tensor, cache: Path, *, write: bool = False) -> dict[str, float]:
    """Perplexity, and against the cached 16-bit log-probabilities mean and p99 KL and top-1 agreement per token."""
    nll, kls, same = 0.0, [], []
    for i, window in enumerate(data):
        logp = torch.log_softmax(model(window[None]).logits[0].float(), -1)
        nll -= float(logp[:-1].gather(1, window[1:, None]).sum(dtype=torch.float64))
        path = cache / f"window{i}.pt"
        if write:
            torch.save(logp, path)
        base = torch.load(path, mmap=True)
        for ours, theirs in zip(logp.split(128), base.split(128), strict=True):
            kls.append((theirs.exp() * (theirs - ours)).sum(-1))
            same.append(theirs.argmax(-1) == ours.argmax(-1))
    kl = torch.cat(kls)
    return {
        "perplexity": math.exp(nll / (data.shape[0] * (data.shape[1] - 1))),
        "mean_kl": float(kl.mean()),
        "p99_kl": float(kl.quantile(0.99)),
        "top1": float(torch.cat(same).float().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--calibration", type=Path, help="calibration text; default: the Python standard library")
    parser.add_argument("--evaluation", type=Path, required=True, help="plain text")
    parser.add_argument("--run", action="append", required=True, metavar="METHOD:SCHEME[:GRID]")
    parser.add_argument("--untie", action="store_true", help="store a tied head by itself (rotation needs it)")
    parser.add_argument("--iters", type=int, default=DEFAULT_ITERS, help="steps of the rounding search in each block")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window-length", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--chat", action="store_true", help="calibrate on answers in the model's chat template")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    parser.add_argument("--work", type=Path, required=True, help="folder for artifacts and cached log-probabilities")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    folder = resolve_model(args.model)
    data = windows(AutoTokenizer.from_pretrained(folder), args.evaluation.read_text(), args.window_length, args.windows)
    calibration = calibration_set(
        folder, data=args.calibration, num_sequences=args.samples, seq_len=args.seq_len, seed=0, chat=args.chat
    )
    args.work.mkdir(parents=True, exist_ok=True)
    if not (args.work / f"window{args.windows - 1}.pt").is_file():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        print(json.dumps({"run": "16-bit", **evaluate(model, data, args.work, write=True)}), flush=True)
    for run in args.run:
        method, scheme, *grid = run.split(":")
        out = args.work / run.replace(":", "-")
        started = time.perf_counter()
        report = quantize(
            folder,
            out,
            scheme=QuantScheme.parse(scheme),
            method=method,
            calibration=calibration,
            untie=args.untie,
            iters=args.iters,
            grid=grid[0] if grid else None,
            overwrite=True,
        )
        seconds = time.perf_counter() - started
        scores = evaluate(artifact_model(out), data, args.work)
        print(json.dumps({"run": run, "bits": report.average_bits, "seconds": seconds, **scores}), flush=True)


if __name__ == "__main__":
    main()
