"""Which KV-cache blocks belong to which request: block tables that grow as tokens come, and shared prefixes."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from qtool.runtime.engine.block_pool import BlockPool
from qtool.runtime.engine.request import Request


def block_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Name of a full block: sha256 over the digest before it and its tokens."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


class KVCacheManager:
    """Block tables of the running requests over one BlockPool; a request's own is its `block_table`.

    Args:
        num_blocks, block_size: size of the cache; a block holds `block_size` tokens of every layer.
        prefix_caching: share full blocks whose tokens, and all tokens before them, are the same.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._digests: dict[Request, list[bytes]] = {}  # of the full blocks that are published
        self.prefix_queries = 0  # tokens looked up
        self.prefix_hits = 0  # tokens found

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def admit(self, request: Request) -> None:
        """Open a table for a request, with the longest cached prefix already in it.

        Sets `request.num_computed_tokens` to the prefix's length.
        """
        digests = self._digests[request] = []
        limit = request.max_cached_tokens // self.block_size if self.prefix_caching else 0
        size, digest = self.block_size, b""
        for i in range(limit):
            digest = block_digest(digest, request.token_ids[i * size : (i + 1) * size])
            block_id = self.pool.lookup(digest)
            if block_id is None:
                break
            self.pool.share(block_id)
            request.block_table.append(block_id)
            digests.append(digest)
        request.num_computed_tokens = request.num_slots = len(digests) * size

    def missing_blocks(self, request: Request, num_tokens: int) -> int:
        """Blocks that the table lacks to cover `num_tokens` tokens."""
        return max(0, self.blocks_for(num_tokens) - len(request.block_table))

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make the table cover `num_tokens` tokens; False, and nothing changed, where too few blocks are free."""
        need = self.missing_blocks(request, num_tokens)
        if need > self.pool.num_free:
            return False
        request.block_table.extend(self.pool.allocate() for _ in range(need))
        request.num_slots += need * self.block_size
        return True

    def publish(self, request: Request, num_tokens: int) -> None:
        """Name the blocks that the first `num_tokens` tokens fill, so that later requests can share them."""
        if not self.prefix_caching:
            return
        digests, size = self._digests[request], self.block_size
        for i in range(len(digests), num_tokens // size):
            parent = digests[-1] if digests else b""
            digest = block_digest(parent, request.token_ids[i * size : (i + 1) * size])
            digests.append(digest)
            self.pool.publish(request.block_table[i], digest)

    def free(self, request: Request) -> None:
        """Close the request's table; its blocks become free, the tail first."""
        del self._digests[request]
        self.pool.release(reversed(request.block_table))
        request.block_table = []  # a step on the device still has the old one
        request.num_slots = 0

    def num_unfilled_slots(self) -> int:
        """Slots that are allocated but hold no token (the ends of the last blocks)."""
        return sum(request.num_slots - request.num_computed_tokens for request in self._digests)

    def check_integrity(self) -> None:
        """Raise RuntimeError where reference counts, free list and block tables disagree."""
        references: dict[int, int] = {}
        for request in self._digests:
            for block_id in request.block_table:
                references[block_id] = references.get(block_id, 0) + 1
        self.pool.check_integrity(references)
