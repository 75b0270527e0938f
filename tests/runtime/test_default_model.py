"""The default model: greedy tokens are those of transformers, batched and one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from qtool.runtime.engine.params import SamplingParams
from qtool.runtime.llm import LLM

PROMPTS = [
    "The capital of France is", "def fibonacci(n):", "Once upon a time, in a land", "Water boils at", "1, 2, 3, 5, 8,",
    "The three primary colors are", "import numpy as np\n", "Photosynthesis is the process by which", "Dear Sir,",
    "Q: What is the largest planet?\nA:", "To be or not to be,", "<html>\n<head>", "The Second World War began in",
    "A recipe for pancakes:\n1.", "In mathematics, a prime number is", "She opened the door and", "SELECT name FROM",
    "The opposite of hot is", "Gravity was described by", "Über den Wolken",
]  # fmt: skip


@pytest.mark.model
@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers(default_model: Path) -> None:
    llm = LLM(default_model, device="cpu", dtype="float32", max_model_len=512)
    model = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32).eval()
    params = SamplingParams(max_tokens=24, temperature=0)
    together = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params)]
    for prompt, batched in zip(PROMPTS, together):
        ids = llm.tokenizer.encode(prompt)
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *batched]])).logits[0]
        assert len(batched) == 24 or batched[-1] == llm.tokenizer.eos_token_id
        assert batched == logits[len(ids) - 1 : -1].argmax(-1).tolist(), prompt  # each the likeliest after those before
    for prompt, batched in list(zip(PROMPTS, together))[::4]:
        assert list(llm.generate([prompt], params)[0].outputs[0].token_ids) == batched, prompt
    assert llm.engine.stats().kv_blocks_used == 0
