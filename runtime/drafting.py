"""Setting up speculation for an engine: the draft model and its checks, step costs, the one who decides."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from qtool.quant.checkpoint import read_config
from qtool.quant.documents import load_tokenizer
from qtool.quant.errors import QtoolError
from qtool.quant.hub import resolve_model
from qtool.quant.progress import ProgressFn, silent
from qtool.runtime.engine.prompt_lookup import PromptLookup
from qtool.runtime.engine.speculation import MODEL_PRIOR, PRIOR, Proposer, SpeculationConfig, Speculator
from qtool.runtime.executor.draft_model import CHUNK, DraftModel
from qtool.runtime.executor.model_runner import ModelRunner
from qtool.runtime.executor.step_costs import measure_step_costs
from qtool.runtime.loader import load_model
from qtool.runtime.models import decoder_config
from qtool.runtime.models.decoder import Decoder

log = logging.getLogger(__name__)


def check_draft(speculation: SpeculationConfig, folder: Path, config: dict[str, Any]) -> Path | None:
    """The draft model's folder; None: none is needed.

    Raises:
        QtoolError: it cannot draft for the model in `folder`: another tokenizer, or, for `self`, another shape.
    """
    if speculation.draft_model is None:
        return None
    draft = resolve_model(speculation.draft_model)
    own, other = decoder_config(config), decoder_config(read_config(draft))
    if speculation.method == "self":
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in sizes:
            if getattr(own, name) != getattr(other, name):
                raise QtoolError(
                    f"speculative self: {draft} is no quantization of {folder}: its {name} is {getattr(other, name)}, "
                    f"not {getattr(own, name)}; take speculative draft for another model"
                )
    if load_tokenizer(draft).get_vocab() != load_tokenizer(folder).get_vocab():
        raise QtoolError(
            f"the draft model {draft} has another tokenizer than {folder}: take a draft model of the same family"
        )
    return draft


def load_draft(
    folder: Path,
    target: Decoder,
    *,
    device: torch.device,
    dtype: str,
    kv_cache_dtype: str,
    max_model_len: int | None,
    progress: ProgressFn = silent,
) -> Decoder:
    """The draft model, for no longer texts than it was made for. Raises QtoolError as load_model.

    On a CPU a quantized one takes the activations' dtype of its kernels, whatever the target's is.
    """
    config = read_config(folder)
    if device.type == "cpu" and "quantization_config" in config:
        dtype = "auto"
    trained = decoder_config(config).max_position_embeddings
    length = min(trained, max_model_len or len(target.cos))
    return load_model(
        folder, device=device, dtype=dtype, kv_cache_dtype=kv_cache_dtype, max_model_len=length, progress=progress
    )


def make_speculator(
    speculation: SpeculationConfig,
    runner: ModelRunner,
    draft: Decoder | None,
    *,
    num_blocks: int,
    max_num_seqs: int,
    max_model_len: int,
    prefix_caching: bool,
    deterministic: bool,
) -> Speculator:
    """Prepare the proposer, measure what steps cost here, and put the one who decides on top."""
    proposer: Proposer = PromptLookup()
    draft_runner = None
    if draft is not None:
        length = min(max_model_len, draft.cos.shape[0])
        model = DraftModel(
            draft,
            num_blocks=num_blocks,
            block_size=runner.block_size,
            vocab_size=runner.model.config.vocab_size,
            max_model_len=length,
            prefix_caching=prefix_caching,
            coupled=deterministic,
        )
        model.runner.prepare(max_num_seqs, length, CHUNK)
        proposer, draft_runner, max_model_len = model, model.runner, length
    costs = measure_step_costs(
        runner, draft_runner, num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_model_len=max_model_len
    )
    for i, count in enumerate(costs.batch):
        log.info(
            "a step of %d: %.2f ms; %.2f ms for a token more of each, %.2f ms to draft it",
            count,
            1000 * costs.plain[i],
            1000 * costs.verify[i],
            1000 * costs.propose[i],
        )
    prior = PRIOR if draft is None else MODEL_PRIOR
    return Speculator(proposer, costs, fixed=speculation.num_speculative_tokens, prior=prior)
