"""What a captured decode step reads, over random traffic: always what the step wants."""

from __future__ import annotations

import random

import pytest
import torch

from qtool.runtime.executor.decode_inputs import DecodeInputs

MOST, BLOCKS = 6, 9
CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(8))
def test_a_step_always_reads_what_it_wants(seed: int) -> None:
    rng = random.Random(seed)
    inputs = DecodeInputs(MOST, BLOCKS, CPU)
    sizes = [1, 2, 4, 6]
    alive: list[dict[str, object]] = []
    for _ in range(300):
        if rng.random() < 0.15:
            rng.shuffle(alive)
        if alive and rng.random() < 0.1:
            alive.pop(rng.randrange(len(alive)))
        while not alive or (len(alive) < MOST and rng.random() < 0.1):
            table = rng.sample(range(100), rng.randrange(1, 4))
            alive.append({"position": rng.randrange(4), "table": table, "row": -1})
        positions, sources, tables = [], [], []
        for request in alive:
            table = request["table"]
            assert isinstance(table, list)
            if len(table) < BLOCKS and rng.random() < 0.1:
                table.append(rng.randrange(100))
            positions.append(request["position"])
            sources.append(request["row"] if rng.random() < 0.97 else -1)
            tables.append(table)
        tokens = [rng.randrange(50) for _ in alive]
        size = min(s for s in sizes if s >= len(alive))
        inputs.put(tokens, sources, positions, tables, size)  # type: ignore[arg-type]
        count = len(alive)
        assert inputs.positions[:size].tolist() == positions + [-1] * (size - count)
        assert inputs.sources[:size].tolist() == sources + [-1] * (size - count)
        for row, (token, source, table) in enumerate(zip(tokens, sources, tables)):
            assert source != -1 or inputs.given[row] == token
            assert inputs.tables[row, : len(table)].tolist() == table
        for row, request in enumerate(alive):
            request["position"] += 1  # type: ignore[operator]
            request["row"] = row


def test_tables_are_copied_again_only_when_one_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = DecodeInputs(MOST, BLOCKS, CPU)
    copied = []
    lay_out = inputs._lay_out
    monkeypatch.setattr(inputs, "_lay_out", lambda *args: (copied.append(step), lay_out(*args)))
    tables = [[1], [2, 3]]
    for step in range(12):
        if step == 6:
            tables[0].append(7)
        if step == 9:
            tables[1] = [2, 3]  # of another request: a list of its own
        inputs.put([0, 0], [0, 1], [step, step + 20], tables, 2)
    assert copied == [0, 6, 9]
