"""One exception type for everything a user can mend: the message says what, where and what to do."""

from __future__ import annotations


class QtoolError(Exception):
    """A refusal with one clear line for the user. The CLI prints it without a traceback; the server maps it to 4xx."""
