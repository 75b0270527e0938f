"""Streaming text: equal to decoding at once, no half characters, nothing of a stop string."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qtool.runtime.detokenizer import Detokenizer

SPECIAL = 256  # a token without text


class Bytes:
    """A byte is a token."""

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        return b"".join(map(self.spell, token_ids)).decode("utf-8", errors="replace")

    def spell(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id != SPECIAL else b""


def stream(text: str, stop: Sequence[str] = (), prompt: str = "prompt: ") -> tuple[list[str], Detokenizer]:
    """What is shown after each token, up to a stop string."""
    detokenizer = Detokenizer(Bytes(), list(prompt.encode()), stop)
    shown = []
    for token in text.encode():
        ended = detokenizer.append(token)
        shown.append(detokenizer.text)
        if ended:
            break
    return shown, detokenizer


@given(st.text(max_size=60), st.text(max_size=10))
def test_a_stream_adds_up_and_never_takes_back(text: str, prompt: str) -> None:
    shown, detokenizer = stream(text, prompt=prompt)
    for before, after in itertools.pairwise(shown):
        assert after.startswith(before)
    assert detokenizer.finish() == text


STOPS = st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=3)


@given(st.text(alphabet="abé", max_size=40), STOPS)
def test_stop_strings_cut_the_text_where_they_first_end(text: str, stop: list[str]) -> None:
    shown, detokenizer = stream(text, stop)
    final = detokenizer.finish()
    ends = [text.find(s) + len(s) for s in stop if s in text]
    if ends:
        first = min(ends)
        cut = min(text.find(s) for s in stop if 0 <= text.find(s) and text.find(s) + len(s) <= first)
        assert final == text[:cut]
        assert detokenizer.stop_reason in stop
    else:
        assert final == text
        assert detokenizer.stop_reason is None
    assert all(final.startswith(s) for s in shown), "something of a stop string was shown"


def test_half_characters_are_held_back() -> None:
    shown, _ = stream("a€b")
    assert shown == ["a", "a", "a", "a€", "a€b"]


def test_what_is_no_character_does_not_hold_up_the_rest() -> None:
    detokenizer = Detokenizer(Bytes(), [])
    for token in (0xFF, ord("a"), 0xFE, 0xFE, 0xFE, 0xFE, 0xFE):
        detokenizer.append(token)
    assert detokenizer.text.startswith("\ufffda")
    assert detokenizer.finish() == "\ufffda" + 5 * "\ufffd"


class Pieces(Bytes):
    """A token is a piece of some bytes, wherever they were cut."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    def spell(self, token_id: int) -> bytes:
        return self._pieces[token_id]


PIECES = st.lists(st.one_of(st.binary(min_size=1, max_size=3), st.sampled_from([b"\xcb", b"\xa6", b"\xf0\x9f"])))


@given(PIECES)
@example([b"\xe4\xbd", b"\xa0\xe5", b"\xa5\xbd\xe4", b"\xbd\xa0\xe5", b"\xa5\xbd"])  # no token ends a character
@example([b"\xfe", b"\xfe", b"\xfe", b"\xcb", b"\xa6"])  # a character after three bytes that are none
def test_tokens_cut_anywhere_give_the_text_of_their_bytes(pieces: list[bytes]) -> None:
    detokenizer = Detokenizer(Pieces(pieces), [])
    shown = ""
    for token in range(len(pieces)):
        detokenizer.append(token)
        assert detokenizer.text.startswith(shown)
        shown = detokenizer.text
    whole = b"".join(pieces).decode("utf-8", errors="replace")
    assert whole.startswith(shown)
    assert detokenizer.finish() == whole


@pytest.mark.parametrize("text", ["one two</s>", "x</", "</s>"])
def test_a_stop_string_across_tokens(text: str) -> None:
    shown, detokenizer = stream(text, ["</s>"])
    assert "<" not in "".join(shown)
    assert detokenizer.finish() == text.removesuffix("</s>")


def test_tokens_without_text_do_not_break_the_character_after_them() -> None:
    detokenizer = Detokenizer(Bytes(), [])
    for token in [SPECIAL] * 5 + list("🙂".encode()):
        detokenizer.append(token)
        assert detokenizer.text in ("", "🙂")
    assert detokenizer.finish() == "🙂"


class Words:
    """A token is a word; decoding tidies the spaces before full stops unless it is told not to."""

    WORDS = ("a ", "b ", ". ", "stop\ufffd")

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        text = "".join(self.WORDS[t] for t in token_ids)
        return text if clean_up_tokenization_spaces is False else text.replace(" .", ".")


def test_tidying_of_spaces_loses_nothing() -> None:
    detokenizer = Detokenizer(Words(), [])
    for token in (0, 2, 1, 2):
        detokenizer.append(token)
    assert detokenizer.finish() == "a . b . "


def test_a_stop_string_in_front_of_half_a_character_is_found_at_the_end() -> None:
    detokenizer = Detokenizer(Words(), [0], stop=["stop"])
    assert not detokenizer.append(1)
    assert not detokenizer.append(3)
    assert detokenizer.finish() == "b "
    assert detokenizer.stop_reason == "stop"
