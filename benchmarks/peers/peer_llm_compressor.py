"""llm-compressor: `python peer_llm_compressor.py REQUEST.json`; variant gptq (static activation order) or awq."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def recipe(variant: str, group_size: int, symmetric: bool) -> list[Any]:
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size, "symmetric": symmetric}
    common: dict[str, Any] = {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    if variant == "awq":
        return [AWQModifier(), QuantizationModifier(**common)]
    return [GPTQModifier(**common)]


def main(request_file: Path) -> None:
    request = json.loads(request_file.read_text())

    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.pipelines.cache import IntermediatesCache
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not torch.accelerator.is_available():
        # 0.14 pins cached activations for a device that is to fetch them, and stops where there is none
        IntermediatesCache.pin_memory = lambda self, *args, **named: None
    tokens = request["tokens"]
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype="auto")
    oneshot(
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(request["model"]),
        dataset=Dataset.from_dict({"input_ids": tokens, "attention_mask": [[1] * len(ids) for ids in tokens]}),
        recipe=recipe(request["variant"], request["group_size"], request["symmetric"]),
        max_seq_length=len(tokens[0]),
        num_calibration_samples=len(tokens),
        shuffle_calibration_samples=False,
    )
    model.save_pretrained(request["out"], save_compressed=True)
    Path(request["out"], "result.json").write_text("{}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
