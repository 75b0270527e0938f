"""KV-cache blocks: reference counts, an O(1) free list, and the contents of freed blocks kept until they are reused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Block:
    """`digest` names the tokens of a full block and all before it; None: not full, or not to be shared."""

    refs: int = 0
    digest: bytes | None = None


class BlockPool:
    """`num_blocks` blocks with reference counts.

    A block without references is free, keeps its content, and can be taken back by its digest until it is allocated
    anew. The free list begins with blocks whose content has no name, the last one freed first (its memory is warm); the
    others follow from the least to the most recently freed.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, got {num_blocks}")
        self.blocks = [Block() for _ in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_digest: dict[bytes, int] = {}

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self.blocks) - len(self._free)

    def allocate(self) -> int:
        """The first of the free list, with one reference. Raises IndexError when none is free."""
        if not self._free:
            raise IndexError("no free KV-cache block")
        block_id, _ = self._free.popitem(last=False)
        block = self.blocks[block_id]
        if block.digest is not None:
            del self._by_digest[block.digest]
            block.digest = None
        block.refs = 1
        return block_id

    def lookup(self, digest: bytes) -> int | None:
        """The block that holds this content, free or in use."""
        return self._by_digest.get(digest)

    def is_free(self, block_id: int) -> bool:
        return self.blocks[block_id].refs == 0

    def share(self, block_id: int) -> None:
        """One more reference to a block; takes it off the free list where it lies there."""
        block = self.blocks[block_id]
        if block.refs == 0:
            del self._free[block_id]
        block.refs += 1

    def publish(self, block_id: int, digest: bytes) -> None:
        """Name the content of a full block, so that others can share it. The first block of a content stays the one."""
        if digest not in self._by_digest:
            self._by_digest[digest] = block_id
            self.blocks[block_id].digest = digest

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference each; give the last block first, so that prefixes outlive their tails."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.refs == 0:
                raise RuntimeError(f"KV-cache block {block_id} was freed twice")
            block.refs -= 1
            if block.refs == 0:
                self._free[block_id] = None
                if block.digest is None:
                    self._free.move_to_end(block_id, last=False)

    def check_integrity(self, references: dict[int, int]) -> None:
        """Raise RuntimeError unless every block has exactly these references and the free list holds all others."""
        for block_id, block in enumerate(self.blocks):
            want = references.get(block_id, 0)
            if block.refs != want:
                raise RuntimeError(f"KV-cache block {block_id}: {block.refs} references counted, {want} held")
            if (block_id in self._free) != (want == 0):
                raise RuntimeError(f"KV-cache block {block_id}: {want} references, but wrongly on or off the free list")
            if block.digest is not None and self._by_digest.get(block.digest) != block_id:
                raise RuntimeError(f"KV-cache block {block_id}: its digest leads elsewhere")
        if len(self._by_digest) != sum(b.digest is not None for b in self.blocks):
            raise RuntimeError("KV cache: a digest without its block")
