"""Token ids become text as they come: no half characters, nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4  # UTF-8 bytes, hence tokens: what is no character by then is let go, but for a last half
CONTEXT = 6  # tokens decoded again before the new ones, so that spaces and joined characters come out right


class Tokenizer(Protocol):
    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = ..., clean_up_tokenization_spaces: bool | None = ...
    ) -> str: ...


class Detokenizer:
    """The text of one output.

    Two decodings of a short window are compared, with and without the new tokens (as in text-generation-inference): a
    token's text may depend on those before it. Text is held back while it ends in half a character, and while its end
    may be the beginning of a stop string.

    Args:
        tokenizer: anything with `decode(ids, skip_special_tokens)`.
        prompt: the prompt's tokens; the last ones are context, none of them is shown.
        stop: strings that end the output.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stop = tuple(stop)
        self._window = list(prompt[-CONTEXT:])
        self._settled = len(self._window)  # tokens of the window whose text is out
        self._half = 0  # characters at its end that are not: 1 where a half was held back when the rest went
        self._text = ""
        self._shown = 0
        self.stop_reason: str | None = None

    @property
    def text(self) -> str:
        """What may be shown so far."""
        return self._text[: self._shown]

    def _decode(self, token_ids: Sequence[int]) -> str:
        # the tidying of spaces that some tokenizers ask for would change text that is already shown
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)

    def append(self, token_id: int, *, check_stop: bool = True) -> bool:
        """Take one more token; True where a stop string is complete (the text then ends just before it)."""
        self._window.append(token_id)
        known = self._decode(self._window[: self._settled])
        whole = self._decode(self._window)
        out = len(known) - self._half
        waiting = len(self._window) - self._settled
        if len(whole) > out and whole.endswith(REPLACEMENT) and waiting < LONGEST_CHARACTER:
            return False
        self._half = int(len(whole) > len(known) and whole.endswith(REPLACEMENT))
        self._window = self._window[max(0, min(self._settled, len(self._window) - CONTEXT)) :]
        self._settled = len(self._window)
        return self._add(whole[out : len(whole) - self._half], check_stop)

    def _add(self, new: str, check_stop: bool) -> bool:
        before = len(self._text)
        self._text += new
        if not self._stop:
            self._shown = len(self._text)
            return False
        longest = max(map(len, self._stop))
        if check_stop:
            begin = max(0, before - longest + 1)
            found = [(at, s) for s in self._stop if (at := self._text.find(s, begin)) >= 0]
            if found:
                at, self.stop_reason = min(found)
                self._text = self._text[:at]
                self._shown = at
                return True
        self._shown = max(self._shown, len(self._text) - self._partial_stop(longest))
        return False

    def _partial_stop(self, longest: int) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for size in range(min(longest - 1, len(self._text)), 0, -1):
            tail = self._text[-size:]
            if any(s.startswith(tail) for s in self._stop):
                return size
        return 0

    def finish(self, *, check_stop: bool = True) -> str:
        """The whole text, once no more tokens come: what was held back is text after all, up to a stop string in it."""
        if self.stop_reason is None:
            out = len(self._decode(self._window[: self._settled])) - self._half
            self._add(self._decode(self._window)[out:], check_stop)
        self._shown = len(self._text)
        return self._text
