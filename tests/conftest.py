"""Shared fixtures: where development data lies, the default model, tiny random models of every family."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the CLI sets it; before torch is imported

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: kernels run in its interpreter


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--emulated", action="store_true", help="run tests of kernels (-m gpu) without a GPU, by tests/ptx"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--emulated"):
        from ptx.device import emulated

        stack = ExitStack()
        stack.enter_context(emulated())
        config.add_cleanup(stack.close)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(autouse=True)
def _level_of_the_log() -> Iterator[None]:
    """A command that was run with --quiet leaves the next test's log as it was."""
    logger = logging.getLogger("qtool")
    before = logger.level
    yield
    logger.setLevel(before)


SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of development data beside the checkout; tests that need it skip where it is missing."""
    if not SHARED.is_dir():
        pytest.skip("the development data folder (shared/, beside the checkout) is not on this machine")
    return SHARED


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The folder of the default model, fetched on first use."""
    from qtool.quant.errors import QtoolError
    from qtool.quant.hub import resolve_model

    try:
        return resolve_model("smollm2-135m")
    except QtoolError as error:
        pytest.skip(str(error))


TinyModel = Callable[..., Path]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte (ids 1 to 256), id 0 being the end of a sequence."""
    vocab = {"<eos>": 0} | {c: i + 1 for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """tiny_model(model_type, **config) → folder of a random float32 model; the same arguments give the same folder."""
    made: dict[str, Path] = {}

    def make(model_type: str = "llama", **changes: Any) -> Path:
        key = repr((model_type, sorted(changes.items(), key=lambda kv: kv[0])))
        if key not in made:
            settings = {
                "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
                "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "eos_token_id": 0, "bos_token_id": None,
                "pad_token_id": None, "initializer_range": 0.15,
            } | changes  # fmt: skip
            torch.manual_seed(11)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings), dtype=torch.float32)
            with torch.no_grad():  # norms and biases start at ones and zeros: make them matter
                for name, weight in model.named_parameters():
                    if weight.ndim == 1:
                        weight.add_(torch.randn_like(weight) * 0.1)
                    assert weight.isfinite().all(), name
            folder = tmp_path_factory.mktemp(model_type)
            model.save_pretrained(folder)
            byte_tokenizer().save_pretrained(folder)
            made[key] = folder
        return made[key]

    return make
