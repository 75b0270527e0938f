"""Output that has to have a form: what a client asks for, and what the engine expects of a matcher. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

from qtool.quant.errors import QtoolError

FORMS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """One form that the whole output has; exactly one of the first five. Names and meanings follow vLLM.

    Attributes:
        json: a JSON schema, as a mapping or as text.
        regex: a regular expression that the output matches from end to end (Rust's syntax, without look-around).
        choice: texts, one of which the output is.
        grammar: a context-free grammar in Lark's syntax (rule `start`) or in GBNF (rule `root`).
        json_object: any JSON object.
        disable_any_whitespace: JSON without spaces and line ends between its parts.
        whitespace_pattern: regular expression of what may stand between the parts of JSON; None: any whitespace.

    Raises:
        QtoolError: none or several forms, or one of the wrong type. What it says is checked when it is compiled.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise QtoolError(f"structured_outputs: give exactly one of {', '.join(FORMS)}; got {found}")

        def need(ok: bool, what: str) -> None:
            if not ok:
                raise QtoolError(f"structured_outputs: {given[0]} must be {what}, got {str(value)[:80]!r}")

        value = getattr(self, given[0])
        if given[0] == "json":
            need(isinstance(value, str | Mapping), "a JSON schema, as an object or as text")
        elif given[0] == "choice":
            texts = isinstance(value, Sequence) and not isinstance(value, str)
            need(texts and bool(value) and all(isinstance(v, str) and v for v in value), "a list of non-empty texts")
        elif given[0] == "json_object":
            need(value is True, "true")
        else:
            need(isinstance(value, str) and bool(value.strip()), "a text, not empty")
        if not isinstance(self.disable_any_whitespace, bool):
            raise QtoolError(f"disable_any_whitespace must be true or false, got {self.disable_any_whitespace!r}")
        if self.whitespace_pattern is not None and not isinstance(self.whitespace_pattern, str):
            raise QtoolError(f"whitespace_pattern must be a regular expression, got {self.whitespace_pattern!r}")

    @property
    def form(self) -> str:
        """Which of FORMS is given."""
        return next(name for name in FORMS if getattr(self, name) not in (None, False))

    @property
    def text(self) -> str:
        """The form as one text, which with `form` and the whitespace says everything.

        Raises:
            QtoolError: a schema that is no JSON.
        """
        value = getattr(self, self.form)
        if self.form == "json_object":
            return json.dumps({"type": "object"})
        if self.form == "choice":
            return json.dumps(list(value))
        if self.form != "json":
            return str(value)
        try:
            schema = json.loads(value) if isinstance(value, str) else value
            found = json.dumps(schema, allow_nan=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise QtoolError(f"structured_outputs: the JSON schema is not valid JSON: {error}") from None
        if not isinstance(schema, Mapping | bool):
            raise QtoolError(f"structured_outputs: a JSON schema is an object, got {found[:80]}")
        return found


class Misfit(NamedTuple):
    """Why an output cannot go on in its form.

    Attributes:
        limit: the form has grown beyond what may be spent on it, so that the client can mend it with a simpler one.
            False: a token does not fit, which is nobody's wish.
    """

    reason: str
    limit: bool = False


class TokenMatcher(Protocol):
    """Where one output stands in its form. Owned by its request; advances by the tokens of the output alone, so that
    a preempted request goes on where it was."""

    @property
    def finished(self) -> bool:
        """The form is complete and nothing can follow."""
        ...

    @property
    def misfit(self) -> Misfit | None:
        """Why nothing fits any more, since the last token or since its tokens that may follow were looked for."""
        ...

    def accept(self, token_id: int) -> None:
        """Advance by a token; `misfit` says whether it fits."""
        ...

    def rollback(self, count: int) -> None:
        """Take the last `count` tokens back, the end of the sequence among them."""
        ...

    def count_permitted(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, one after the other, could be accepted now. Changes nothing."""
        ...

    def fork(self) -> Self:
        """A matcher of its own that stands where this one does."""
        ...
