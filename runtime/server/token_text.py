"""The bytes that one token stands for, whichever way the tokenizer writes them; log-probabilities in OpenAI's forms."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Any

from qtool.runtime.engine.params import TokenLogprobs
from qtool.runtime.server.schemas import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LOWEST = -9999.0  # JSON has no -inf


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-in of every byte in byte-level BPE (Radford et al. 2019, GPT-2's encoder)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenText:
    """Token id → bytes, for a fast tokenizer of transformers with byte-level or SentencePiece-like tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = backend.to_str() if backend is not None else ""
        self._alphabet = _byte_level_alphabet() if '"ByteLevel"' in decoder else None
        self._added: dict[int, str] = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        self._special = frozenset(tokenizer.all_special_ids)

    def to_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text; an id that the tokenizer does not know (padding of the vocabulary): b""."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if self._alphabet is not None:
            if all(char in self._alphabet for char in token):
                return bytes(self._alphabet[char] for char in token)
            return str(token).encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return str(token).replace("\u2581", " ").encode()

    def to_text(self, token_id: int) -> str:
        """The token as text; where its bytes are no whole characters, OpenAI's form `bytes:\\xe2\\x80`."""
        return _show(self.to_bytes(token_id))

    def offsets(self, token_ids: Iterable[int]) -> list[int]:
        """Where in the text each token begins, in characters.

        A token that begins inside a character begins where that does; special tokens are not part of the text.
        """
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        offsets, start = [], 0
        for token_id in token_ids:
            offsets.append(start)
            if token_id not in self._special:
                start += len(decoder.decode(self.to_bytes(token_id)))
        return offsets


def _show(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _likeliest(entry: TokenLogprobs, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest tokens, likeliest first."""
    return sorted(entry.top.items(), key=lambda pair: -pair[1])[:count]


def completion_logprobs(
    text: TokenText, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], count: int, first: int
) -> CompletionLogprobs:
    """The form of /v1/completions: the `count` likeliest tokens, and the chosen one where it is not among them.

    Args:
        token_ids, entries: all tokens of the choice's text and their log-probabilities (None: a prompt's first token).
        first: the first token to show; those before it were shown in earlier chunks.
    """
    offsets = text.offsets(token_ids)[first:]
    token_ids, entries = token_ids[first:], entries[first:]
    top: list[dict[str, float] | None] = []
    for entry in entries:
        if entry is None:
            top.append(None)
            continue
        best = dict(_likeliest(entry, count)) | {entry.token_id: entry.logprob}
        shown: dict[str, float] = {}
        for token_id, logprob in best.items():
            shown.setdefault(text.to_text(token_id), max(logprob, _LOWEST))
        top.append(shown)
    return CompletionLogprobs(
        tokens=[text.to_text(token_id) for token_id in token_ids],
        token_logprobs=[None if entry is None else max(entry.logprob, _LOWEST) for entry in entries],
        top_logprobs=top,
        text_offset=offsets,
    )


def chat_logprobs(text: TokenText, entries: Sequence[TokenLogprobs], count: int) -> ChatLogprobs:
    """The form of /v1/chat/completions, with `count` likeliest tokens at every position."""

    def show(token_id: int, logprob: float) -> dict[str, Any]:
        raw = text.to_bytes(token_id)
        return {"token": _show(raw), "logprob": max(logprob, _LOWEST), "bytes": list(raw)}

    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                **show(entry.token_id, entry.logprob),
                top_logprobs=[TopLogprob(**show(*pair)) for pair in _likeliest(entry, count)],
            )
            for entry in entries
        ]
    )
