"""AutoRound, 50 iterations: `python peer_autoround.py REQUEST.json`. Writes AutoAWQ's layout: it holds zero points."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(request_file: Path) -> None:
    request = json.loads(request_file.read_text())

    import torch
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = torch.tensor(request["tokens"])
    rounding = AutoRound(
        AutoModelForCausalLM.from_pretrained(request["model"], dtype="auto"),
        AutoTokenizer.from_pretrained(request["model"]),
        bits=4,
        group_size=request["group_size"],
        sym=request["symmetric"],
        iters=50,
        dataset=[{"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]} for ids in tokens],
        nsamples=len(tokens),
        seqlen=tokens.shape[1],
        batch_size=4,
        device_map="cpu",
        enable_torch_compile=False,  # compiling takes longer than it saves here
    )
    folder = Path(request["out"])
    rounding.quantize_and_save(str(folder), format="auto_awq")
    found = next(folder.rglob("config.json")).parent  # it writes into a folder below, named by itself
    (folder / "result.json").write_text(json.dumps({"folder": str(found)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
