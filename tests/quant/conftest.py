"""Tiny random models for the quantizer's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 Llama folder: hidden 64, 2 blocks, 4 query and 2 key-value heads, tied head, with heavy input channels."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny") / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        tie_word_embeddings=True,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.exp(torch.randn_like(parameter)))  # uneven channels, so that scaling has a point
            elif "layers" in name:
                parameter.normal_(0, 0.15)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def _hard_inputs(kind: str, scale: float, generator: torch.Generator, samples: int = 64) -> torch.Tensor:
    x = torch.randn(3 if kind == "few" else samples, 24, generator=generator) * scale
    match kind:
        case "dead":
            x[:, ::3] = 0
        case "zero":
            x = x * 0
        case "repeated":
            x = x[:, :1].expand(-1, 24).contiguous()
        case "outlier":
            x[:, 4] *= 1e3
        case _:
            assert kind in ("plain", "few")
    return x


@pytest.fixture(scope="session")
def hard_inputs() -> Callable[..., torch.Tensor]:
    """(kind, scale, generator, samples) → inputs [samples, 24] that may make a Hessian singular or lopsided."""
    return _hard_inputs


@pytest.fixture(autouse=True)
def own_resume_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that a test cuts short leave nothing in the user's cache."""
    monkeypatch.setattr("qtool.quant.resume.cache_folder", lambda: tmp_path / "cache")
