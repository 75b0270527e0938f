"""Grammars over tokens by llguidance (https://github.com/guidance-ai/llguidance): forms become matchers, matchers give
the tokens that may come next as one bit a token."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qtool.quant.errors import QtoolError
from qtool.runtime.engine.structured_output import Misfit, StructuredOutputsParams, TokenMatcher

KEPT_GRAMMARS = 256
"""Compiled forms that are kept for requests with the same one."""

WORD = 32  # tokens in one element of a mask
MOST_ITEMS = 50_000  # of llguidance's parser at one token, and in one row, where 2,000 would fail with long choices
LIMITS = re.compile("too many|max is|fuel exhausted", re.IGNORECASE)  # how llguidance says that it reached one


class GrammarMatcher:
    """A TokenMatcher of llguidance.

    All forks of a matcher grow one lexer, and most limits are the lexer's: what others wrote counts. A matcher that
    meets a limit therefore starts over, once, with a lexer of its own, so that nothing but its own output can end it.

    Args:
        inner: at the beginning of the output.
        vocab_size: of its tokenizer, at least the model's.
        fresh: makes another `inner`; None: this one's lexer is its own.
    """

    def __init__(self, inner: Any, vocab_size: int, fresh: Callable[[], Any] | None = None) -> None:
        self._inner = inner
        self.vocab_size = vocab_size
        self._fresh = fresh
        self._accepted: list[int] = []

    @property
    def finished(self) -> bool:
        return bool(self._inner.is_stopped())

    @property
    def misfit(self) -> Misfit | None:
        return _misfit(self._inner) if self._inner.is_error() else None

    def accept(self, token_id: int) -> None:
        self._accepted.append(token_id)
        if not self._inner.consume_token(token_id):
            self.start_over()

    def start_over(self) -> bool:
        """Go where it stands again with a lexer of its own; False where no limit of a common one stopped it."""
        if self._fresh is None or self.misfit is None or not self.misfit.limit:
            return False
        self._inner, self._fresh = self._fresh(), None
        return bool(self._inner.consume_tokens(self._accepted))

    def rollback(self, count: int) -> None:
        del self._accepted[len(self._accepted) - count :]
        if count and not self._inner.rollback(count):
            raise ValueError(f"{count} tokens cannot be taken back: {_one_line(self._inner.get_error())}")

    def count_permitted(self, token_ids: Sequence[int]) -> int:
        return int(self._inner.validate_tokens(list(token_ids)))

    def fork(self) -> GrammarMatcher:
        twin = GrammarMatcher(self._inner.deep_copy(), self.vocab_size, self._fresh)
        twin._accepted = list(self._accepted)
        return twin


class GrammarCompiler:
    """Turns forms into matchers for one tokenizer. May be called from several threads.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: of the model.
        eos_token_ids: tokens that end the output once its form is complete.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._tokens: Any = None  # made on first use: it takes a second for a large vocabulary
        self._kept: OrderedDict[tuple[object, ...], GrammarMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, form: StructuredOutputsParams) -> GrammarMatcher:
        """A matcher at the beginning of the output.

        Raises:
            QtoolError: llguidance is not installed, the form is invalid or not supported, or the tokenizer has no end.
        """
        key = (form.form, form.text, form.disable_any_whitespace, form.whitespace_pattern)
        with self._lock:
            found = self._kept.get(key)
        if found is None:  # outside the lock: a large schema holds up nobody else
            found = GrammarMatcher(self._compile(form), self._tokens.vocab_size, lambda: self._compile_again(key, form))
        with self._lock:
            self._kept[key] = found
            self._kept.move_to_end(key)
            if len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
            return found.fork()

    def _compile_again(self, key: tuple[object, ...], form: StructuredOutputsParams) -> Any:
        """For one whose common lexer is used up: nobody shall start with that."""
        with self._lock:
            self._kept.pop(key, None)
        return self._compile(form)

    def _compile(self, form: StructuredOutputsParams) -> Any:
        """llguidance's matcher of a form."""
        llguidance = _llguidance()
        with self._lock:
            if self._tokens is None:
                self._tokens = self._read_tokenizer(llguidance)
        name = {"json_object": "json"}.get(form.form, form.form)
        try:
            if name == "json":
                overrides: dict[str, Any] = {"whitespace_flexible": not form.disable_any_whitespace}
                if form.whitespace_pattern is not None:
                    overrides |= {"whitespace_pattern": form.whitespace_pattern}
                grammar = llguidance.LLMatcher.grammar_from_json_schema(form.text, overrides=overrides)
            elif name == "grammar":
                lark = "start:" in form.text  # GBNF begins with `root ::=`
                grammar = llguidance.grammar_from("lark" if lark else "grammar", form.text)
            else:
                grammar = llguidance.grammar_from(name, form.text)
            limits = llguidance.LLParserLimits(max_items_in_row=MOST_ITEMS, step_max_items=MOST_ITEMS)
            matcher = llguidance.LLMatcher(self._tokens, grammar, log_level=0, limits=limits)
            error = matcher.get_error()
            if not error:
                matcher.compute_bitmask()
                found = _misfit(matcher) if matcher.is_error() else None
                error = "" if found is None else found.reason if found.limit else "no text has this form"
        except (ValueError, RecursionError) as refusal:
            error = str(refusal)
        if error:
            raise QtoolError(f"structured_outputs: this {name} cannot be used: {_one_line(error)}")
        return matcher

    def _read_tokenizer(self, llguidance: Any) -> Any:
        if not self._eos:
            raise QtoolError("structured_outputs: the model names no end-of-sequence token, so no output could end")
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise QtoolError("structured_outputs: the model's tokenizer has no tokenizer.json; it needs one")
        size = max(self._vocab_size, len(self._tokenizer))  # some vocabularies are larger than their model's
        try:
            return llguidance.LLTokenizer(backend.to_str(), n_vocab=size, eos_token=self._eos)
        except ValueError as error:
            raise QtoolError(f"structured_outputs: the model's tokenizer is not supported: {error}") from None


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise QtoolError(
            "structured_outputs needs llguidance, which is not installed: pip install 'qtool[structured]'"
        ) from None
    return llguidance


def _misfit(matcher: Any) -> Misfit:
    """What is wrong with a matcher that says that it cannot go on."""
    reason = _one_line(matcher.get_error())
    return Misfit(reason, LIMITS.search(reason) is not None)


def _one_line(message: str) -> str:
    """What went wrong, without the parser's state and source listing."""
    lines = [line.strip() for line in message.partition("<state>")[0].splitlines()]
    return " ".join(line for line in lines if line.strip("^ |"))[:400]


_workers: Any = None  # llguidance's threads, shared by all engines of the process


def token_masks(matchers: Sequence[tuple[TokenMatcher, Sequence[int]]]) -> np.ndarray:
    """Which tokens may come next: [rows, ceil(vocabulary / 32)] int32, bit i % 32 of element i // 32 being token i.

    A matcher with k draft tokens gets 1 + k rows: what may follow each of them; rows after a draft that is not
    permitted are all ones, since nothing there will be kept. The matchers, each given once, stand where they stood.
    """
    global _workers
    from llguidance import LLExecutor
    from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

    if _workers is None:
        _workers = LLExecutor()
    own = [(m, list(drafts)) for m, drafts in matchers if isinstance(m, GrammarMatcher)]
    first = np.cumsum([0, *(1 + len(drafts) for _, drafts in own)]).tolist()
    words = -(-max(m.vocab_size for m, _ in own) // WORD)
    masks = np.full((first[-1], words), -1, dtype=np.int32)
    work = [(m, at, drafts) for (m, drafts), at in zip(own, first)]
    while work:
        if plain := [(m._inner, at) for m, at, drafts in work if not drafts]:
            fill_next_token_bitmask_par(_workers, plain, masks)
        if drafted := [(m._inner, at, drafts) for m, at, drafts in work if drafts]:
            fill_next_token_bitmask_par_with_draft_tokens(_workers, drafted, masks)
        work = [(m, at, drafts) for m, at, drafts in work if m.start_over()]
    return masks


def apply_masks(logits: Tensor, rows: Sequence[int], masks: np.ndarray) -> Tensor:
    """`logits` [any, vocab_size] with minus infinity where `masks` forbid a token in its row of `rows`."""
    device, vocab = logits.device, logits.shape[1]
    words = torch.from_numpy(masks).to(device)
    bits = torch.arange(WORD, dtype=torch.int32, device=device)
    allowed = ((words[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocab]
    index = torch.tensor(rows, device=device)
    return logits.index_copy(0, index, logits[index].masked_fill(~allowed, float("-inf")))
