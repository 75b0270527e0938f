"""A tiny random Llama with a byte-level tokenizer, and a stand-in for the runtime that transformers computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qtool.quant.progress import ProgressFn, silent
from qtool.runtime.engine.params import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams

VOCAB = 300


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "a"), ("e", "r")]
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *letters, *("".join(m) for m in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)


def save_tiny_model(folder: Path, *, seed: int = 0, noise: float = 0.0) -> Path:
    """A random Llama of 64 hidden units; `noise` perturbs its weights, as a bad quantization would."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=0, eos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise * parameter.std())
    model.save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Models this small lose more to the second thread than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with every weight perturbed by a fifth of its spread."""
    return save_tiny_model(tmp_path_factory.mktemp("noisy"), noise=0.2)


@dataclass(frozen=True)
class FakeScored:
    logprobs: tuple[float, ...]
    greedy: bool


class FakeServed:
    """The runtime's methods, computed one sequence at a time by transformers in float32."""

    def __init__(self, folder: Path, **engine_args: Any) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.max_model_len = int(self.model.config.max_position_embeddings)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def prompt_logits(self, sequences: Sequence[Sequence[int]], *, keep_broken: bool = False) -> Iterator[Tensor]:
        for sequence in sequences:
            with torch.no_grad():
                yield self.model(torch.tensor([list(sequence)])).logits[0].float()

    def loglikelihood(
        self,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        keep_broken: bool = False,
        progress: ProgressFn = silent,
    ) -> list[FakeScored]:
        results = []
        for context, continuation in pairs:
            assert len(context) >= 1
            assert len(continuation) >= 1
            assert len(context) + len(continuation) <= self.max_model_len + 1  # the last token is no input
            (logits,) = self.prompt_logits([[*context, *continuation][:-1]])
            rows = logits[len(context) - 1 :].log_softmax(-1)
            targets = torch.tensor(list(continuation))
            picked = rows.gather(1, targets[:, None])[:, 0]
            results.append(FakeScored(tuple(picked.tolist()), bool((rows.argmax(-1) == targets).all())))
        return results

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, keep_broken: bool = False
    ) -> list[RequestOutput]:
        """Greedy, up to a stop string or the end of the sequence."""
        return [self._greedy(list(prompt), own) for prompt, own in zip(prompts, params, strict=True)]

    def _greedy(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        assert params.greedy
        assert len(prompt) >= 1
        made: list[int] = []
        text = ""
        while len(made) < params.max_tokens and len(prompt) + len(made) < self.max_model_len:
            (logits,) = self.prompt_logits([[*prompt, *made]])
            made.append(int(logits[-1].argmax()))
            if made[-1] == self.model.config.eos_token_id:
                break
            text = self.tokenizer.decode(made, skip_special_tokens=True)
            if ends := [text.index(s) for s in params.stop if s in text]:
                text = text[: min(ends)]
                break
        output = CompletionOutput(0, text, tuple(made), finish_reason="stop")
        return RequestOutput("", tuple(prompt), (output,), True, RequestMetrics(0.0))


@pytest.fixture(scope="session")
def fake_served() -> type[FakeServed]:
    return FakeServed
