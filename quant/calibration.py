"""What quantization is calibrated on (CalibrationSet), and the walk through a model block by block (BlockWalker)."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qtool.quant.checkpoint import Weights
from qtool.quant.corpus import stdlib_documents
from qtool.quant.documents import (
    Document,
    as_answer,
    chat_tokens,
    load_tokenizer,
    plain_tokens,
    read_conversations,
    template_fingerprint,
)
from qtool.quant.errors import QtoolError
from qtool.quant.hidden_states import HiddenStates
from qtool.quant.hub import cache_folder
from qtool.quant.numerics import check_finite
from qtool.quant.skeleton import skeleton
from qtool.quant.spill import Spill
from qtool.quant.structure import structure_of

_BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}  # a GPU needs more at a time, or it waits for Python


@dataclass(frozen=True)
class CalibrationSet:
    """Token sequences to calibrate on.

    Attributes:
        tokens: [num_sequences, seq_len] int64.
        source: where the text is from, for reports.
        fingerprint: sha256 (hex) of tokens and settings.
        notes: what a user should know of it: text left over, fewer sequences than asked for.
        chat_template: sha256 (hex) of the model's chat template, where it wrote some of the documents.
    """

    tokens: Tensor
    source: str
    fingerprint: str
    notes: tuple[str, ...] = ()
    chat_template: str | None = None

    def facts(self) -> dict[str, Any]:
        """What records say of it, as a JSON object."""
        return {
            "source": self.source,
            "num_sequences": self.tokens.shape[0],
            "seq_len": self.tokens.shape[1],
            "fingerprint": self.fingerprint,
            "chat_template": self.chat_template,
        }


def calibration_set(
    tokenizer_folder: Path,
    *,
    data: Path | None,
    num_sequences: int,
    seq_len: int,
    seed: int,
    chat: bool | None = False,
) -> CalibrationSet:
    """Sequences of `seq_len` tokens cut from the documents, which are joined in order.

    Special tokens of plain text are those that the tokenizer itself adds (so a BOS stands where the model expects one),
    with an EOS after each document; conversations are written by the model's chat template, which brings its own. Long
    documents run over into the next sequence and are never dropped. Reading stops when there are enough tokens.

    Args:
        tokenizer_folder: the model folder.
        data: .jsonl or .txt file; None: excerpts of the Python standard library.
        num_sequences, seq_len: how much to take.
        seed: 0 keeps the documents in order; any other value shuffles them.
        chat: write plain documents as answers in the model's chat template; None: where it has one.

    Raises:
        QtoolError: a size below 1 sequence or 2 tokens, unreadable data, too little of it for one sequence, or a
            conversation for a model without a chat template.
    """
    if num_sequences < 1 or seq_len < 2:
        raise QtoolError(
            f"calibration of {num_sequences} sequences of {seq_len} tokens: needs at least 1 sequence of 2 tokens"
        )
    source = "Python standard library" if data is None else data.name
    if data is None:
        documents = [Document(source, text) for text in stdlib_documents("calibration")]
    else:
        documents = read_conversations(data)
    if seed:
        random.Random(seed).shuffle(documents)
    tokenizer = load_tokenizer(tokenizer_folder)
    template = template_fingerprint(tokenizer)
    if chat and template is None:
        raise QtoolError(f"{tokenizer_folder}: the model has no chat template; calibrate it on plain text")
    answers = template is not None if chat is None else chat
    wanted = num_sequences * seq_len
    ids: list[int] = []
    used = conversations = 0
    while len(ids) < wanted and used < len(documents):
        document = documents[used]
        if document.messages or answers:
            ids += chat_tokens(tokenizer, document.messages or as_answer(document.text), document.where)
            conversations += 1
        else:
            ids += plain_tokens(tokenizer, document.text)
        used += 1
    got = len(ids) // seq_len
    if got == 0:
        raise QtoolError(f"{source}: {len(ids)} tokens of text, too short for one sequence of {seq_len}")
    notes = []
    if conversations:
        notes.append(f"{source}: {conversations} of {used} documents are written in the model's chat template")
    if used < len(documents) or len(ids) > wanted:
        notes.append(f"{source}: the first {wanted} tokens are used ({used} of {len(documents)} documents)")
    if got < num_sequences:
        notes.append(
            f"{source}: text for {got} sequences of {seq_len} tokens, not {num_sequences}; "
            f"the last {len(ids) - got * seq_len} tokens fill none"
        )
    tokens = torch.tensor(ids[: min(got, num_sequences) * seq_len], dtype=torch.int64).view(-1, seq_len)
    settings = json.dumps({"num_sequences": num_sequences, "seq_len": seq_len, "seed": seed})
    digest = hashlib.sha256(settings.encode() + tokens.numpy().astype("<i8").tobytes())
    return CalibrationSet(
        tokens, source, digest.hexdigest(), tuple(notes), chat_template=template if conversations else None
    )


class _Positions:
    """Rotary embeddings and attention masks of left-aligned sequences, made once for each length."""

    def __init__(self, config: Any, rotary: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        self._config, self._rotary = config, rotary
        self._like = torch.empty(0, device=device, dtype=dtype)
        self._made: dict[int, dict[str, Any]] = {}

    def _window(self, block: int) -> int | None:
        """Sliding window of a block; None where it attends to everything before."""
        if self._config.model_type == "llama":  # has none, whatever its config.json carries along
            return None
        kinds = getattr(self._config, "layer_types", None)
        if kinds and kinds[block] != "sliding_attention":
            return None
        return getattr(self._config, "sliding_window", None)

    def arguments(self, block: int, seq_len: int) -> dict[str, Any]:
        """Keyword arguments for the decoder layer `block`."""
        if seq_len not in self._made:
            ids = torch.arange(seq_len, device=self._like.device)[None]
            self._made[seq_len] = {"position_ids": ids, "position_embeddings": self._rotary(self._like, ids)}
        made = self._made[seq_len]
        window = self._window(block)
        mask = None  # causal, left to the attention kernel
        if window is not None and window < seq_len:
            distance = made["position_ids"].T - made["position_ids"]  # [query, key]
            mask = ((distance >= 0) & (distance < window))[None, None]
        return {**made, "attention_mask": mask}


def compute_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype | None:
    """What a walk over a model stored in `stored` multiplies in: the model's own 16 bits on a GPU that has them, else
    float32 (None). On CPUs always the latter.
    """
    if device.type != "cuda" or stored not in (torch.bfloat16, torch.float16):
        return None
    if stored == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        return None
    return stored


class Reached(Exception):  # noqa: N818 - no error
    """Raised in a hook, it ends Block.run_until: what was wanted of the block has been seen."""


class Block:
    """One decoder block with real weights. What a consumer leaves in them is what the walk goes on with.

    Attributes:
        index, name: `3`, `model.layers.3`.
        module: the decoder layer of transformers.
        linears: full name → module, of the block's groups in true-sequential order.
        inputs: [b, seq, hidden] each; the sequence changes when the walk goes on, its tensors do not.
        compute: 16-bit dtype in which the linears and attention multiply (sums, norms and the hidden states stay in the
            dtype of the weights); None: everything in the dtype of the weights.
        spill: where tensors as large as the block go that nobody needs for a while.
    """

    def __init__(
        self,
        index: int,
        name: str,
        module: nn.Module,
        linears: dict[str, nn.Linear],
        inputs: Sequence[Tensor],
        positions: _Positions,
        compute: torch.dtype | None = None,
        spill: Spill | None = None,
    ) -> None:
        self.index, self.name, self.module, self.linears, self.inputs = index, name, module, linears, inputs
        self.compute = compute
        self.spill = spill or Spill(cache_folder() / "activations")
        self._positions = positions

    def over(self, inputs: Sequence[Tensor]) -> Block:
        """The same block around other inputs."""
        other = copy.copy(self)
        other.inputs = inputs
        return other

    def precision(self) -> AbstractContextManager[Any]:
        """Within it, modules of the block multiply in `compute`."""
        if self.compute is None:
            return nullcontext()  # and not autocast(enabled=False), which would end a caller's own
        device = next(self.module.parameters()).device.type
        return torch.autocast(device, dtype=self.compute)

    def run(self, inputs: Tensor) -> Tensor:
        """Output [b, seq, hidden] of the block for `inputs` of that shape; follows the caller's grad mode."""
        with self.precision():
            output: Tensor = self.module(inputs, **self._positions.arguments(self.index, inputs.shape[1]))
        return output

    def run_until(self, inputs: Tensor) -> None:
        """Run the block on `inputs` [b, seq, hidden] until a hook raises Reached, or to its end."""
        with suppress(Reached):
            self.run(inputs)

    def as_read(self, x: Tensor) -> Tensor:
        """A linear's input [..., in_features] → [tokens, in_features], in the dtype in which the linear multiplies."""
        x = x.detach().reshape(-1, x.shape[-1])
        return x if self.compute is None else x.to(self.compute)

    def capture(self, names: Iterable[str], on_input: Callable[[str, Tensor], None]) -> None:
        """Run all inputs; call `on_input(name, x)` with x [tokens, in_features] whenever a named linear is reached."""

        def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            return lambda module, args: on_input(name, self.as_read(args[0]))

        handles = [self.linears[name].register_forward_pre_hook(hook(name)) for name in names]
        try:
            with torch.no_grad():
                for inputs in self.inputs:
                    self.run(inputs)
        finally:
            for handle in handles:
                handle.remove()


class BlockWalker:
    """A model's decoder blocks one after another: weights read when a block's turn comes, and let go after it.

    Memory: one block, and up to `activation_memory` bytes of hidden states.

    Args:
        checkpoint: a 16- or 32-bit model.
        samples: [num_sequences, seq_len] int64 tokens.
        device, dtype: where, and in what to hold weights and hidden states.
        compute: 16-bit dtype in which to multiply, see Block; None: in `dtype`.
        batch_tokens: about how many tokens run at a time; None: what suits the device.
        activation_memory: bytes of hidden states past which they go to the disk; None: never.

    Attributes:
        states: [b, seq, hidden] each: what comes out of the blocks walked so far.

    Raises:
        QtoolError: unsupported architecture, a checkpoint that is quantized already, or a token without an embedding.
    """

    def __init__(
        self,
        checkpoint: Weights,
        samples: Tensor,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        compute: torch.dtype | None = None,
        batch_tokens: int | None = None,
        activation_memory: int | None = None,
    ) -> None:
        self.structure = structure_of(checkpoint.config)
        if checkpoint.config.get("quantization_config"):
            raise QtoolError(f"{checkpoint.folder}: is quantized already; start from the 16-bit model")
        self.checkpoint, self.dtype, self.device, self.compute = checkpoint, dtype, torch.device(device), compute
        self._skeleton = skeleton(checkpoint.folder)
        config = self._skeleton.config
        rotary = self._skeleton.get_submodule(self.structure.blocks.rpartition(".")[0] + ".rotary_emb")
        self._positions = _Positions(config, type(rotary)(config).to(self.device), self.device, dtype)
        rows = max(1, (batch_tokens or _BATCH_TOKENS[self.device.type]) // samples.shape[1])
        table = checkpoint.tensor(f"{self.structure.embed}.weight")
        if (highest := int(samples.max())) >= len(table):
            raise QtoolError(
                f"{checkpoint.folder}: its tokenizer gives token {highest}, and the embedding has {len(table)} rows"
            )
        num_bytes = samples.numel() * table.shape[1] * dtype.itemsize
        self.spill = Spill(cache_folder() / "activations", activation_memory)
        self.states = HiddenStates(
            (self._place(table[batch]) for batch in torch.split(samples, rows)),
            num_bytes,
            memory=num_bytes if activation_memory is None else activation_memory,
            folder=self.spill.folder,
        )
        self._finished = 0

    def __len__(self) -> int:
        return self.structure.num_blocks

    def __iter__(self) -> Iterator[Block]:
        """Every block in turn. After each, its inputs run through the weights left in it and become the next inputs;
        then the block's weights are let go.

        Raises:
            QtoolError: NaN or infinity comes out of a block.
        """
        for index in range(self._finished, len(self)):
            block = self.block(index, self.states)
            yield block
            with torch.no_grad():
                for i, states in enumerate(self.states):
                    output = block.run(states)
                    check_finite(output, f"{block.name}: its output on the calibration samples")
                    self.states[i] = output
            block.module.to("meta")  # whoever still holds the block does not hold its memory
            self._finished = index + 1

    def block(self, index: int, inputs: Sequence[Tensor]) -> Block:
        """Block `index` with the checkpoint's weights, around the given inputs; for walks in another order."""
        name = self.structure.block_name(index)
        module = self._load(name)
        members = [member for group in self.structure.groups for member in group.members]
        linears = {f"{name}.{member}": module.get_submodule(member) for member in members}
        return Block(index, name, module, linears, inputs, self._positions, self.compute, self.spill)  # type: ignore[arg-type]

    def head(self) -> nn.Module:
        """Final norm and output projection: hidden states [..., hidden] → logits [..., vocab]."""
        norm = self._load(self.structure.norm)
        if self.structure.tied_head:
            weight = self.checkpoint.tensor(f"{self.structure.embed}.weight")
            projection = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            projection.load_state_dict({"weight": self._place(weight)}, assign=True)
            return nn.Sequential(norm, projection.requires_grad_(False))
        return nn.Sequential(norm, self._load(self.structure.head))

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device).to(self.dtype)  # in two steps: widened on the device, not before the copy

    def _load(self, name: str) -> nn.Module:
        """A copy of the skeleton's module `name` with the checkpoint's weights."""
        module: nn.Module = copy.deepcopy(self._skeleton.get_submodule(name))
        state = {key: self._place(self.checkpoint.tensor(f"{name}.{key}")) for key in module.state_dict()}
        module.load_state_dict(state, assign=True)
        return module.requires_grad_(False)
