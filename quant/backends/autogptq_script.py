"""Runs AutoGPTQ 0.7.1 in its environment: `python autogptq_script.py REQUEST.json`. Stands alone: no qtool there.

The request: model (folder that transformers 4.53.3 reads), out (folder to write), tokens (list of equally long lists of
ids), bits, group_size, symmetric, act_order, first_block (safetensors file: what the first block must give for the
first sequence, [seq_len, hidden] float32).
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

MOST_DIFFERENCE = 0.02  # relative, of the first block's output; float16 alone makes about 0.001


class ProgressHandler(logging.Handler):
    """Turns AutoGPTQ's `Start quantizing layer 3/30` into a progress line."""

    def emit(self, record: logging.LogRecord) -> None:
        if found := re.match(r"Start quantizing layer (\d+)/(\d+)", record.getMessage()):
            print(f"@progress {int(found[1]) - 1} {found[2]}", flush=True)


def use_cpu() -> None:
    """Let AutoGPTQ work where there is no CUDA. It sends each block to a device constant and waits for that device;
    what it computes there is plain torch.
    """
    import torch
    from auto_gptq.modeling import _base

    _base.CUDA_0 = torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None


def check_first_block(model: Any, tokens: list[int], expected_file: str) -> None:
    """Exit with a line where the older transformers reads the model otherwise than the newer one, which saved it."""
    import torch
    from safetensors.torch import load_file

    expected = load_file(expected_file)["first_block"]
    found: list[Any] = []
    handle = model.model.layers[0].register_forward_hook(
        lambda module, args, output: found.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False)
    handle.remove()
    difference = float((found[0][0].cpu().float() - expected).norm() / expected.norm())
    if not difference <= MOST_DIFFERENCE:
        sys.exit(
            f"transformers {importlib.metadata.version('transformers')} reads this model otherwise than the present "
            f"one: the first block's output differs by {difference:.1%}"
        )


def main(request_file: Path) -> None:
    request = json.loads(request_file.read_text(encoding="utf-8"))

    import torch
    import transformers
    from auto_gptq import BaseQuantizeConfig
    from auto_gptq.modeling.auto import GPTQ_CAUSAL_LM_MODEL_MAP

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        use_cpu()
    settings = {
        "bits": request["bits"],
        "group_size": request["group_size"],
        "sym": request["symmetric"],
        "desc_act": request["act_order"],
        "static_groups": request["act_order"],  # groups in the weights' own order: nothing to look up when served
        "true_sequential": True,
        "damp_percent": 0.01,
    }
    # its own from_pretrained refuses to start without CUDA; this is what it does besides
    source = transformers.AutoModelForCausalLM.from_pretrained(
        request["model"], torch_dtype=torch.float16 if on_gpu else torch.float32
    ).eval()
    check_first_block(source, request["tokens"][0], request["first_block"])
    kind = GPTQ_CAUSAL_LM_MODEL_MAP[source.config.model_type]
    model = kind(source, False, BaseQuantizeConfig(**settings))
    logging.getLogger("auto_gptq.modeling._base").addHandler(ProgressHandler())
    ones = [1] * len(request["tokens"][0])
    model.quantize([{"input_ids": ids, "attention_mask": ones} for ids in request["tokens"]])
    model.half()  # what it stores where it works on a GPU
    model.save_quantized(request["out"])
    versions = {
        name: importlib.metadata.version(name)
        for name in ("auto-gptq", "transformers", "torch", "peft", "accelerate", "numpy")
    }
    result = {"versions": versions, "settings": settings}
    Path(request["out"], "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
