"""Token-level comparison of two served models on windows of text, with one model in memory at a time.

The base's logits are put on disk in float32 (kept for later runs, or in an unnamed temporary file that vanishes with
the process); the candidate is compared with them window by window. llama.cpp's perplexity tool works in the same two
passes.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from qtool.evalsets.harness import Served
from qtool.evalsets.metrics import TokenScores, token_scores
from qtool.quant.errors import QtoolError
from qtool.quant.progress import ProgressFn, silent

WORST = 20
SHOWN_TOKENS = 24  # of the text before a position
SHOWN_CHOICES = 3
BROKEN_BASE = "a broken base, with which nothing can be compared"


class LogitSpool:
    """Logits of some windows on disk: each [positions, vocab] float32. Use it as a context.

    Without a path, or where it cannot be written, the file has no name and vanishes with the process; else it appears
    there when `seal` is called.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._partial = None, None
        if path is not None:
            partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
            with suppress(OSError):
                self._file: IO[bytes] = partial.open("w+b")
                self._path, self._partial = path, partial
        if self._partial is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._shape: tuple[int, int] | None = None
        self.checksums: list[int] = []  # one a window

    @classmethod
    def open(cls, path: Path, shape: tuple[int, int], checksums: Sequence[int]) -> LogitSpool:
        """Windows that were kept at `path`, each of `shape`. Raises ValueError where they are damaged."""
        spool = cls.__new__(cls)
        spool._path, spool._partial, spool._file = path, None, path.open("rb")
        spool._shape, spool.checksums = (int(shape[0]), int(shape[1])), list(checksums)
        for index, checksum in enumerate(spool.checksums):
            flat = spool._read(index)
            if flat.nbytes != spool.positions * spool.vocab * 4 or zlib.crc32(flat.data) != checksum:
                spool._file.close()
                raise ValueError(f"the logits of window {index} in {path.name} differ from what was kept")
        with suppress(OSError):  # a folder that others write
            os.utime(path)
        return spool

    @property
    def named(self) -> bool:
        """Whether the file has a name, or will have one."""
        return self._path is not None

    @property
    def kept(self) -> bool:
        """Whether the file has a name for later runs."""
        return self.named and self._partial is None

    @property
    def positions(self) -> int:
        return self._shape[0] if self._shape else 0

    @property
    def vocab(self) -> int:
        return self._shape[1] if self._shape else 0

    def reserve(self, windows: int, positions: int, vocab: int) -> None:
        """Raise QtoolError where the temporary folder has no room for all the windows."""
        need, folder = windows * positions * vocab * 4, tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
        if free < need:
            raise QtoolError(
                f"{folder}: {free / 1e9:.1f} GB free, the base's logits need {need / 1e9:.1f} GB; set TMPDIR to a "
                "larger disk, or pass fewer --windows"
            )

    def append(self, logits: Tensor) -> None:
        """Add the next window's logits [positions, vocab]. Raises QtoolError where the disk is full."""
        self._shape = (logits.shape[0], logits.shape[1])
        values = logits.float().cpu().contiguous().numpy()
        try:
            self._file.seek(0, 2)
            values.tofile(self._file)
        except OSError as error:  # numpy's says how many numbers it wrote, and neither where nor why
            folder, way = (
                (self._path.parent, "pass --no-cache") if self._path else (tempfile.gettempdir(), "set TMPDIR")
            )
            raise QtoolError(
                f"{folder}: the base's logits cannot be written ({error.strerror or error}); is the disk full? Free "
                f"space, or {way}"
            ) from None
        self.checksums.append(zlib.crc32(values.data))

    def seal(self) -> None:
        """All windows are there: give the file its name, where that can be done."""
        if self._partial is not None and self._path is not None:
            self._file.flush()
            try:
                self._partial.replace(self._path)
            except OSError:
                self._partial.unlink(missing_ok=True)
                self._path = None
            self._partial = None

    def window(self, index: int) -> Tensor:
        """The logits of one window, [positions, vocab] float32. Raises IndexError where there is none."""
        if self._shape is None or not 0 <= index < len(self.checksums):
            raise IndexError(index)
        return torch.from_numpy(self._read(index)).view(self._shape)

    def _read(self, index: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        size = self.positions * self.vocab
        self._file.seek(index * size * 4)
        return np.fromfile(self._file, dtype=np.float32, count=size)

    def __enter__(self) -> LogitSpool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._partial is not None:
            self._partial.unlink(missing_ok=True)


@dataclass(frozen=True)
class Position:
    """One place in the text where the two models differ much.

    Attributes:
        window, token: which window, and which token of it is to be predicted.
        kl: nats.
        before, following: the text before it, and the token that follows in the text.
        base, candidate: each model's likeliest tokens with their probabilities.
    """

    window: int
    token: int
    kl: float
    before: str
    following: str
    base: tuple[tuple[str, float], ...]
    candidate: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class WindowComparison:
    """Token scores of each window (fields [context − 1]) and the places that differ most, worst first."""

    scores: tuple[TokenScores, ...]
    worst: tuple[Position, ...]

    def joined(self, field: str) -> Tensor:
        """One field over all windows, [windows · (context − 1)]."""
        return torch.cat([getattr(s, field) for s in self.scores])

    def window_means(self, field: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """One field's mean per window, [windows] float64."""
        return np.array([getattr(s, field).double().mean().item() for s in self.scores])


def _logits(served: Served, tokens: Tensor) -> Iterator[Tensor]:
    """Logits [context − 1, vocab] of each window's positions that have a next token."""
    for logits in served.prompt_logits(tokens.tolist(), keep_broken=True):
        yield logits[:-1]


def spool_base(
    served: Served,
    tokens: Tensor,
    path: Path | None = None,
    room: Callable[[int], bool] = lambda size: False,
    *,
    progress: ProgressFn = silent,
) -> LogitSpool:
    """The base's logits for `tokens` [windows, context] on disk: at `path` where `room(bytes)` allows, else unnamed.

    Raises:
        QtoolError: no room on the disk, or logits that are not finite numbers.
    """
    windows, context = tokens.shape
    spool: LogitSpool | None = None
    try:
        for index, logits in enumerate(_logits(served, tokens)):
            if spool is None:
                size = windows * (context - 1) * logits.shape[1] * 4
                spool = LogitSpool(path if path is not None and room(size) else None)
                if not spool.named:
                    spool.reserve(windows, context - 1, logits.shape[1])
            finite = logits.isfinite().all(dim=1)
            if not finite.all():
                token = int((~finite).nonzero()[0, 0]) + 1
                raise QtoolError(f"text: NaN or infinity, first for token {token} of window {index}: {BROKEN_BASE}")
            spool.append(logits)
            progress("base: text", index + 1, windows)
        assert spool is not None  # there are windows: text_windows sees to it
        spool.seal()
    except BaseException:
        if spool is not None:
            spool.__exit__(None, None, None)
        raise
    return spool


def repeat_kl(served: Served, tokens: Tensor, spool: LogitSpool, *, count: int) -> Tensor:
    """KL of the base against itself, computed once more on the first `count` windows in reverse order; [tokens]."""
    again = list(range(min(count, len(tokens))))[::-1]
    parts = [
        token_scores(spool.window(index), logits.cpu(), tokens[index, 1:]).kl
        for index, logits in zip(again, _logits(served, tokens[again]))
    ]
    return torch.cat(parts)


def compare_windows(
    served: Served,
    tokens: Tensor,
    spool: LogitSpool,
    tokenizer: Any,
    *,
    who: str = "candidate",
    progress: ProgressFn = silent,
) -> WindowComparison:
    """Compare the candidate's logits for `tokens` [windows, context] with the base's on disk.

    Raises:
        QtoolError: the candidate's vocabulary has another size.
    """
    scores: list[TokenScores] = []
    worst: list[Position] = []
    for index, logits in enumerate(_logits(served, tokens)):
        if logits.shape[1] != spool.vocab:
            raise QtoolError(
                f"the candidate predicts {logits.shape[1]} tokens, the base {spool.vocab}: not the same model"
            )
        base = spool.window(index).to(logits.device)
        targets = tokens[index, 1:].to(logits.device)
        scores.append(token_scores(base, logits, targets))
        order = scores[-1].kl.nan_to_num(nan=torch.inf).sort(descending=True, stable=True).indices
        top = order[:WORST].tolist()
        worst += [_position(index, at, scores[-1], base[at], logits[at], tokens[index], tokenizer) for at in top]
        progress(f"{who}: text", index + 1, len(tokens))
    worst.sort(key=lambda p: -p.kl if math.isfinite(p.kl) else -math.inf)
    return WindowComparison(tuple(scores), tuple(worst[:WORST]))


def _position(
    window: int, at: int, scores: TokenScores, base: Tensor, candidate: Tensor, tokens: Tensor, tokenizer: Any
) -> Position:
    def likeliest(logits: Tensor) -> tuple[tuple[str, float], ...]:
        probabilities, ids = logits.float().softmax(-1).topk(SHOWN_CHOICES)
        return tuple((tokenizer.decode([i]), p) for i, p in zip(ids.tolist(), probabilities.tolist()))

    before = tokenizer.decode(tokens[max(0, at + 1 - SHOWN_TOKENS) : at + 1].tolist())
    following = tokenizer.decode(tokens[at + 1 : at + 2].tolist())
    return Position(window, at + 1, scores.kl[at].item(), before, following, likeliest(base), likeliest(candidate))
