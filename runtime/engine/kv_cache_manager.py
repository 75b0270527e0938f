"""Which KV-cache blocks belong to which request: block tables that grow as tokens come, and shared prefixes."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from qtool.runtime.engine.block_pool import BlockPool
from qtool.runtime.engine.request import Request


@dataclass(slots=True)
class _Table:
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of its full blocks that are published


def block_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Name of a full block: sha256 over the digest before it and its tokens."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


class KVCacheManager:
    """Block tables of the running requests over one BlockPool.

    Args:
        num_blocks, block_size: size of the cache; a block holds `block_size` tokens of every layer.
        prefix_caching: share full blocks whose tokens, and all tokens before them, are the same.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._tables: dict[Request, _Table] = {}
        self.prefix_queries = 0  # tokens looked up
        self.prefix_hits = 0  # tokens found

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def block_table(self, request: Request) -> list[int]:
        return self._tables[request].blocks

    def admit(self, request: Request) -> None:
        """Open a table for a request, with the longest cached prefix already in it.

        Sets `request.num_computed_tokens` to the prefix's length.
        """
        table = self._tables[request] = _Table()
        request.num_computed_tokens = 0
        if not self.prefix_caching:
            return
        limit = request.max_cached_tokens // self.block_size
        size, digest = self.block_size, b""
        for i in range(limit):
            digest = block_digest(digest, request.token_ids[i * size : (i + 1) * size])
            block_id = self.pool.lookup(digest)
            if block_id is None:
                break
            self.pool.share(block_id)
            table.blocks.append(block_id)
            table.digests.append(digest)
        request.num_computed_tokens = len(table.blocks) * size

    def missing_blocks(self, request: Request, num_tokens: int) -> int:
        """Blocks that the table lacks to cover `num_tokens` tokens."""
        return max(0, -(-num_tokens // self.block_size) - len(self._tables[request].blocks))

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make the table cover `num_tokens` tokens; False, and nothing changed, where too few blocks are free."""
        table = self._tables[request]
        need = -(-num_tokens // self.block_size) - len(table.blocks)
        if need <= 0:
            return True
        if need > self.pool.num_free:
            return False
        for _ in range(need):
            table.blocks.append(self.pool.allocate())
        return True

    def publish(self, request: Request, num_tokens: int) -> None:
        """Name the blocks that the first `num_tokens` tokens fill, so that later requests can share them."""
        if not self.prefix_caching:
            return
        table, size = self._tables[request], self.block_size
        full = num_tokens // size
        if full == len(table.digests):
            return
        for i in range(len(table.digests), full):
            parent = table.digests[-1] if table.digests else b""
            digest = block_digest(parent, request.token_ids[i * size : (i + 1) * size])
            table.digests.append(digest)
            self.pool.publish(table.blocks[i], digest)

    def free(self, request: Request) -> None:
        """Close the request's table; its blocks become free, the tail first."""
        self.pool.release(reversed(self._tables.pop(request).blocks))

    def num_unfilled_slots(self) -> int:
        """Slots that are allocated but hold no token (the ends of the last blocks)."""
        size = self.block_size
        return sum(len(t.blocks) * size - r.num_computed_tokens for r, t in self._tables.items())

    def check_integrity(self) -> None:
        """Raise RuntimeError where reference counts, free list and block tables disagree."""
        references: dict[int, int] = {}
        for table in self._tables.values():
            for block_id in table.blocks:
                references[block_id] = references.get(block_id, 0) + 1
        self.pool.check_integrity(references)
