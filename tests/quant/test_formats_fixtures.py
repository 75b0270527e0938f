"""Checkpoints written by AutoAWQ, AutoGPTQ, GPTQModel and llm-compressor give the logits that their writers gave."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, LlamaForCausalLM

from qtool.quant.checkpoint import Checkpoint
from qtool.quant.formats import open_reader
from qtool.quant.structure import linear_shapes

FIXTURES = Path(__file__).resolve().parents[3] / "shared" / "fixtures"
NAMES = sorted(p.parent.name for p in FIXTURES.glob("*/reference_logits.safetensors"))


def dequantized_model(folder: Path) -> LlamaForCausalLM:
    """transformers' float32 Llama with the weights of a quantized checkpoint, dequantized."""
    with Checkpoint(folder) as checkpoint:
        reader = open_reader(checkpoint)
        assert reader is not None
        config = AutoConfig.from_pretrained(folder)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = LlamaForCausalLM(config).to(torch.float32).eval()
        quantized = [n for n in linear_shapes(checkpoint) if reader.scheme(n) is not None]
        state = {f"{n}.weight": reader.read(n).dequantize() for n in quantized}
        for name in model.state_dict():
            if name not in state and name in checkpoint:
                state[name] = checkpoint.tensor(name).float()
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}
        model.tie_weights()
    return model


@pytest.mark.parametrize(
    "name",
    NAMES
    or [
        pytest.param(
            "-",
            marks=pytest.mark.skip(
                reason="the peers' checkpoints are not on this machine (shared/, beside the checkout)"
            ),
        )
    ],
)
def test_peer_checkpoint_gives_its_reference_logits(name: str) -> None:
    folder = FIXTURES / name
    reference = load_file(folder / "reference_logits.safetensors")
    model = dequantized_model(folder)
    weight = model.state_dict()["model.layers.0.self_attn.k_proj.weight"]
    expected = reference["dequant.model.layers.0.self_attn.k_proj.weight"]
    assert ((weight - expected).abs().max() / expected.abs().max()).item() < 1e-3
    with torch.no_grad():
        logits = model(reference["input_ids"]).logits
    error = torch.linalg.vector_norm(logits - reference["logits"]) / torch.linalg.vector_norm(reference["logits"])
    assert error.item() <= 2e-3
