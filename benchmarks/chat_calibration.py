"""GPTQ calibrated on plain text and on the same text as answers in the chat template: KL on plain text and on chats.

    python benchmarks/chat_calibration.py --calibration calib.jsonl --text wikitext2.txt --chats gsm8k.jsonl --work DIR

KL(base‖quantized) per token in float32, over the first windows of --text, and over the first conversations of every
--chats file ({"messages": [...]} a line), each written in the model's template and run by itself.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from quantizer_accuracy import load_artifact, windows
from torch import Tensor
from transformers import AutoModelForCausalLM

from qtool.quant.calibration import calibration_set
from qtool.quant.documents import chat_tokens, load_tokenizer, read_conversations
from qtool.quant.hub import resolve_model
from qtool.quant.pipeline import quantize
from qtool.quant.scheme import QuantScheme


@torch.no_grad()
def log_probs(model: torch.nn.Module, texts: list[Tensor]) -> list[Tensor]:
    """[seq, vocab] of every text [seq]; in float16, which costs KL less than 1e-4."""
    return [torch.log_softmax(model(text[None]).logits[0], -1).half() for text in texts]


def mean_kl(base: list[Tensor], other: list[Tensor]) -> float:
    """Nats per token."""
    pairs = ((b.float(), o.float()) for b, o in zip(base, other, strict=True))
    return float(torch.cat([(b.exp() * (b - o)).sum(-1) for b, o in pairs]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--calibration", type=Path, help="default: the Python standard library")
    parser.add_argument("--text", type=Path, required=True, help="plain text to evaluate on")
    parser.add_argument("--chats", type=Path, action="append", default=[], help="conversations to evaluate on")
    parser.add_argument("--count", type=int, default=24, help="conversations of each file")
    parser.add_argument("--scheme", default="w4g64")
    parser.add_argument("--work", type=Path, required=True, help="folder for artifacts")
    args = parser.parse_args()
    folder = resolve_model(args.model)
    tokenizer = load_tokenizer(folder)
    texts = {"plain": list(windows(tokenizer, args.text.read_text(encoding="utf-8"), 1024, 4))}
    for path in args.chats:
        chats = read_conversations(path)[: args.count]
        texts[path.stem] = [torch.tensor(chat_tokens(tokenizer, c.messages, c.where)) for c in chats]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    base = {name: log_probs(model, found) for name, found in texts.items()}
    args.work.mkdir(parents=True, exist_ok=True)
    for chat in (False, True):
        calibration = calibration_set(folder, data=args.calibration, num_sequences=32, seq_len=512, seed=0, chat=chat)
        started = time.perf_counter()
        out = args.work / ("chat" if chat else "plain")
        quantize(folder, out, scheme=QuantScheme.parse(args.scheme), calibration=calibration, overwrite=True)
        seconds = time.perf_counter() - started
        load_artifact(model, out)
        kl = {name: mean_kl(base[name], log_probs(model, found)) for name, found in texts.items()}
        print(json.dumps({"calibration": out.name, "seconds": seconds, **kl}), flush=True)


if __name__ == "__main__":
    main()
