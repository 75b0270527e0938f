"""Preemption by swap: the KV blocks of a request that must make room are kept in host memory until it runs again.

Beside recomputation, after vLLM (Kwon et al., SOSP 2023, section 4.5), by what costs less: twice the bytes over the
measured copy rate, or the tokens over the measured prefill rate. No torch here.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from qtool.runtime.engine.request import Request

PreemptionMode = Literal["auto", "recompute", "swap"]
MODES: tuple[PreemptionMode, ...] = ("auto", "recompute", "swap")


class BlockCopy(NamedTuple):
    """Blocks to copy before the next step, in the order in which copies are given: device to host where `out`, else
    host to device; `device_blocks[i]` and `host_blocks[i]` belong together."""

    request: Request
    out: bool
    device_blocks: Sequence[int]
    host_blocks: Sequence[int]


@dataclass
class SwapCosts:
    """What was measured, in seconds; the executor keeps it up to date.

    Attributes:
        block_copy_s: to copy one block one way.
        token_s: to compute one token of a prompt. None: not yet known.
    """

    block_copy_s: float
    token_s: float | None = None

    def prefer_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Copying the blocks out and back takes less time than computing the tokens again."""
        return self.token_s is not None and 2 * num_blocks * self.block_copy_s < num_tokens * self.token_s

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Enter a step of `num_tokens` tokens of prompts; the newest counts a fifth."""
        found = seconds / num_tokens
        self.token_s = found if self.token_s is None else self.token_s + 0.2 * (found - self.token_s)


class SwapSpace:
    """`num_blocks` KV blocks in host memory, and the copies that the next step must wait for.

    Args:
        costs: decide in the mode `auto`; `swap` swaps whenever the blocks fit.
    """

    def __init__(self, num_blocks: int, costs: SwapCosts, mode: PreemptionMode = "auto") -> None:
        self.num_blocks = num_blocks
        self.costs = costs
        self.mode = mode
        self.num_swaps = 0
        self._free = list(range(num_blocks))  # a heap: the lowest first, so that a request's blocks lie side by side
        self._copies: list[BlockCopy] = []

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def store(self, request: Request, block_size: int) -> bool:
        """Keep the computed blocks of a request that is about to lose them; False where recomputing it is better."""
        tokens = request.num_computed_tokens
        count = -(-tokens // block_size)
        if not 0 < count <= len(self._free) or self.mode == "recompute":
            return False
        if self.mode == "auto" and not self.costs.prefer_swap(count, tokens):
            return False
        request.host_blocks = [heapq.heappop(self._free) for _ in range(count)]
        request.num_swapped_tokens = tokens
        request.num_swaps += 1
        self.num_swaps += 1
        self._copies.append(BlockCopy(request, True, request.block_table[:count], request.host_blocks))
        return True

    def restore(self, request: Request, block_size: int) -> None:
        """Bring a request's blocks back into its table, behind those that it found in the prefix cache."""
        found = request.num_computed_tokens // block_size
        if request.num_swapped_tokens > request.num_computed_tokens:
            count = len(request.host_blocks)
            device, host = request.block_table[found:count], request.host_blocks[found:]
            self._copies.append(BlockCopy(request, False, device, host))
            request.num_computed_tokens = request.num_swapped_tokens
        self.drop(request)

    def drop(self, request: Request) -> None:
        """Forget what is kept of a request, if anything is."""
        for block in request.host_blocks:
            heapq.heappush(self._free, block)
        request.host_blocks = []
        request.num_swapped_tokens = 0

    def take_copies(self) -> list[BlockCopy]:
        """The copies to make before the next step; each is given once."""
        copies, self._copies = self._copies, []
        return copies

    def check_integrity(self, waiting: Iterable[Request]) -> None:
        """Raise RuntimeError unless every block is free or kept for exactly one of the requests that wait."""
        held = [block for request in waiting for block in request.host_blocks]
        if sorted(held + self._free) != list(range(self.num_blocks)):
            raise RuntimeError(
                f"swap space: {len(held)} blocks are held and {len(self._free)} free of {self.num_blocks}"
            )
