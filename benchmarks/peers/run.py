"""The public toolkits beside qtool: each quantizes one model in an environment of its own, all are evaluated alike.

Every peer gets the same calibration tokens; its artifact is read back, dequantized and evaluated in float32 by the code
of quantizer_accuracy.py. What is finished is kept in WORK/results.jsonl and not done again. For example:

    python benchmarks/peers/run.py --work DIR --calibration calib.jsonl --evaluation test.txt
    python benchmarks/peers/run.py --work DIR --calibration calib.jsonl --evaluation test.txt --only hqq-w4g64-asym
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qtool.quant.backends.environment import EnvironmentSpec, ensure
from qtool.quant.backends.script import run_script
from qtool.quant.calibration import calibration_set
from qtool.quant.checkpoint import Checkpoint
from qtool.quant.errors import QtoolError
from qtool.quant.formats import open_reader
from qtool.quant.hub import resolve_model
from qtool.quant.structure import linear_shapes

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))
from quantizer_accuracy import artifact_model, evaluate, windows  # noqa: E402 - a script beside, no package

TORCH = "torch==2.13.0"
GROUP = 64


@dataclass(frozen=True)
class Peer:
    """One row: which toolkit's environment, which of its methods.

    Attributes:
        name: of the row.
        toolkit: names the script (peer_TOOLKIT.py) and the requirements files; autoawq and auto-gptq go by
            `qtool quantize --backend`.
        symmetric: or with zero points.
        variant: what the script makes of it.
        sequences: of the calibration set, where not all are used.
    """

    name: str
    toolkit: str
    symmetric: bool
    variant: str = ""
    sequences: int | None = None


PEERS = (
    Peer("hqq-w4g64-asym", "hqq", False),
    Peer("llm-compressor-gptq-w4g64", "llm_compressor", True, "gptq"),
    Peer("llm-compressor-gptq-w4g64-asym", "llm_compressor", False, "gptq"),
    Peer("llm-compressor-awq-w4g64", "llm_compressor", True, "awq", sequences=8),
    Peer("gptqmodel-w4g64", "gptqmodel", True, "plain"),
    Peer("gptqmodel-actorder-w4g64", "gptqmodel", True, "act-order"),
    Peer("auto-gptq-w4g64", "auto-gptq", True),
    Peer("auto-gptq-w4g64-asym", "auto-gptq", False),
    Peer("autoawq-w4g64-asym", "autoawq", False),
    Peer("autoround-50-w4g64-asym", "autoround", False),
)


def lines(name: str) -> tuple[str, ...]:
    """The requirements in a file of requirements/; none where there is no such file."""
    path = HERE / "requirements" / name
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return tuple(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))


def environment_of(toolkit: str) -> EnvironmentSpec:
    """torch and what a toolkit builds with, then its requirements, then those whose own pins are passed over."""
    pinned, unpinned = lines(f"{toolkit.replace('_', '-')}.txt"), lines(f"{toolkit.replace('_', '-')}.no-deps.txt")
    steps = [(TORCH, "numpy==2.4.6", "setuptools==80.9.0", "wheel==0.45.1"), (TORCH, *pinned)]
    if unpinned:
        steps.append(("--no-deps", "--no-build-isolation", *unpinned))
    if toolkit == "autoawq":
        steps.append((TORCH, "--constraint", str(REPOSITORY / "constraints.txt"), "--editable", str(REPOSITORY)))
    return EnvironmentSpec(f"peer-{toolkit}", tuple(steps))


def say(stage: str, done: int, total: int) -> None:
    print(f"{stage}: {done}/{total}", file=sys.stderr, flush=True)


def quantize_by_peer(peer: Peer, model: Path, tokens: list[list[int]], work: Path) -> dict[str, Any]:
    """Run a peer's script; it writes WORK/NAME. Returns what it says, with `seconds`."""
    out = work / peer.name
    shutil.rmtree(out, ignore_errors=True)
    python = ensure(environment_of(peer.toolkit), work / "environments", say)
    request = {
        "model": str(model),
        "out": str(out),
        "tokens": tokens[: peer.sequences],
        "group_size": GROUP,
        "symmetric": peer.symmetric,
        "variant": peer.variant,
    }
    started = time.perf_counter()
    log = work / f"{peer.name}.log"
    result = run_script(python, HERE / f"peer_{peer.toolkit}.py", request, work, log, peer.name, say)
    return {"folder": str(out), **result, "seconds": time.perf_counter() - started}


def quantize_by_backend(peer: Peer, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run `qtool quantize --backend`: AutoAWQ's from an environment that holds both, AutoGPTQ's from here."""
    python = Path(sys.executable)
    if peer.toolkit == "autoawq":
        python = ensure(environment_of(peer.toolkit), args.work / "environments", say)
    out = args.work / peer.name
    command = [str(python), "-m", "qtool.cli", "quantize", str(model), "--out", str(out), "--force", "--json"]
    command += ["--backend", peer.toolkit, "--group", str(GROUP), "--sym" if peer.symmetric else "--asym"]
    command += [
        "--plain",
        "--data",
        str(args.calibration),
        "--samples",
        str(args.samples),
        "--seq-len",
        str(args.seq_len),
    ]
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise QtoolError(f"{peer.name}: qtool quantize failed")
    return {
        "folder": str(out),
        "versions": json.loads(done.stdout)["versions"],
        "seconds": time.perf_counter() - started,
    }


def float_model(folder: Path) -> Any:
    """transformers' float32 model of an artifact, or of the dequantized weights that a peer wrote."""
    with Checkpoint(folder) as checkpoint:
        quantized = open_reader(checkpoint) is not None
    return artifact_model(folder) if quantized else AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def stored_bits(folder: Path) -> float:
    """Bits per weight that the blocks' linears take on disk: codes, scales, zero points and indices."""
    with Checkpoint(folder) as checkpoint:
        shapes = linear_shapes(checkpoint)
        layers = tuple(f"{layer}." for layer in shapes)
        stored = [checkpoint.tensor(name) for name in checkpoint.names() if name.startswith(layers)]
        return (
            8 * sum(t.numel() * t.element_size() for t in stored) / sum(rows * cols for rows, cols in shapes.values())
        )


def table(results: list[dict[str, Any]]) -> str:
    """Markdown."""
    rows = ["| method | bits | perplexity | mean KL | p99 KL | top-1 % | seconds |", "|---|---|---|---|---|---|---|"]
    for r in results:
        rows.append(
            f"| {r['peer']} | {r['bits']:.2f} | {r['perplexity']:.2f} | {r['mean_kl']:.3f} | {r['p99_kl']:.2f} | "
            f"{100 * r['top1']:.1f} | {r['seconds']:.0f} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--calibration", type=Path, required=True, help="calibration text, .txt or .jsonl")
    parser.add_argument("--evaluation", type=Path, required=True, help="plain text")
    parser.add_argument("--work", type=Path, required=True, help="folder for environments, artifacts and results")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="these rows alone: " + ", ".join(p.name for p in PEERS)
    )
    parser.add_argument("--again", action="store_true", help="do finished rows again")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if unknown := set(args.only or ()) - {peer.name for peer in PEERS}:
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    torch.set_num_threads(args.threads)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    folder = resolve_model(args.model)
    data = windows(AutoTokenizer.from_pretrained(folder), args.evaluation.read_text(), 1024, 8)
    calibration = calibration_set(
        folder, data=args.calibration, num_sequences=args.samples, seq_len=args.seq_len, seed=0
    )
    if not (args.work / f"window{len(data) - 1}.pt").is_file():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        print(f"16-bit: {evaluate(model, data, args.work, write=True)}", file=sys.stderr, flush=True)

    record = args.work / "results.jsonl"
    known = [json.loads(line) for line in record.read_text().splitlines()] if record.is_file() else []
    results = {r["peer"]: r for r in known}
    for peer in PEERS:
        if (args.only and peer.name not in args.only) or (peer.name in results and not args.again):
            continue
        try:
            if peer.toolkit in ("autoawq", "auto-gptq"):
                made = quantize_by_backend(peer, folder, args)
            else:
                made = quantize_by_peer(peer, folder, calibration.tokens.tolist(), args.work)
        except QtoolError as error:  # the others are still worth having
            print(f"{peer.name}: {error}", file=sys.stderr, flush=True)
            continue
        artifact = Path(made["folder"])
        bits = made["bits"] if "bits" in made else stored_bits(artifact)
        results[peer.name] = {
            "peer": peer.name,
            **made,
            "bits": bits,
            **evaluate(float_model(artifact), data, args.work),
        }
        with record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(results[peer.name]) + "\n")
    print(table([results[peer.name] for peer in PEERS if peer.name in results]))


if __name__ == "__main__":
    main()
