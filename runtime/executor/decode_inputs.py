"""The inputs of captured decode steps: fixed buffers on the device, block tables copied only where one has changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_TURNS = 2  # host buffers: one is filled while the device still reads the other

_Row = tuple[Sequence[int], int]  # a block table, and how much of it


@dataclass(frozen=True)
class _HostRows:
    """Inputs of one step on the host, pinned. `given`, `sources`, `positions` are the rows of `head`."""

    head: Tensor  # [3, most] int32
    tables: Tensor  # [most, blocks] int32
    held: list[_Row]  # what each row of `tables` holds


class DecodeInputs:
    """What graphs of decode steps read.

    Attributes:
        given, sources, positions: [max_num_seqs] int32. Token ids as in tokens.feed; position -1: a row of padding.
        tables: [max_num_seqs, max_blocks] int32.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int, device: torch.device) -> None:
        self._head = torch.zeros(3, max_num_seqs, dtype=torch.int32, device=device)
        self.given, self.sources, self.positions = self._head
        self.tables = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._hosts = [
            _HostRows(
                torch.zeros(3, max_num_seqs, dtype=torch.int32, pin_memory=pinned),
                torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, pin_memory=pinned),
                [((), 0)] * max_num_seqs,
            )
            for _ in range(_TURNS)
        ]
        self._turn = 0
        self._rows: list[_Row] = [((), 0)] * max_num_seqs  # of `tables`
        self.positions.fill_(-1)

    def put(
        self,
        tokens: Sequence[int],
        sources: Sequence[int],
        positions: Sequence[int],
        tables: Sequence[Sequence[int]],
        size: int,
    ) -> None:
        """Make the first `size` rows those of a step of len(tokens) sequences and of padding.

        Tables only grow: one that is the same object and as long as before is taken for the same.
        """
        count = len(tokens)
        host = self._hosts[self._turn]
        self._turn = (self._turn + 1) % _TURNS
        head = host.head.numpy()
        head[0, :count], head[1, :count], head[2, :count] = tokens, sources, positions
        head[1, count:size], head[2, count:size] = -1, -1
        self._head.copy_(host.head, non_blocking=True)
        rows = [(table, len(table)) for table in tables]
        if not all(map(_same, rows, self._rows)):
            self._lay_out(rows, host)
            self.tables[:count].copy_(host.tables[:count], non_blocking=True)
            self._rows[:count] = rows

    def _lay_out(self, rows: list[_Row], host: _HostRows) -> None:
        laid_out: np.ndarray = host.tables.numpy()
        for i, row in enumerate(rows):
            if not _same(row, host.held[i]):
                table, length = host.held[i] = row
                laid_out[i, :length] = table


def _same(row: _Row, other: _Row) -> bool:
    return row[0] is other[0] and row[1] == other[1]
