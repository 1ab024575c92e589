"""Block tables of sequences and the prefix cache over them.

A full block is found by a SHA-256 chain: digest(block) = SHA-256(digest(parent) + its tokens), and the root
of the chain is a digest of what else the cached keys depend on (`Namespace`). Blocks are published once they
are computed. Full blocks are never written again, so sharing copies nothing.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass

import numpy as np

from enginebay.triton_repo.runtime.block_pool import BlockPool
from enginebay.triton_repo.runtime.engine import Int32, Move


@dataclass(frozen=True)
class Namespace:
    """What cached keys and values depend on beside the tokens.

    `lora` is (adapter id, load generation): an adapter loaded again under its name is another adapter.
    `salt` keeps tenants apart. `long_rope`: beyond the switch of a model with two RoPE tables.
    """

    lora: tuple[str, int] | None = None
    salt: str | None = None
    long_rope: bool = False

    def root(self) -> bytes:
        """The parent digest of a sequence's first block. Each field is tagged and carries its length."""
        digest = hashlib.sha256(b"enginebay prefix cache 1")
        if self.lora is not None:
            name = self.lora[0].encode()
            digest.update(b"L%d:" % len(name) + name + b"G%d:" % self.lora[1])
        if self.salt is not None:
            salt = self.salt.encode()
            digest.update(b"S%d:" % len(salt) + salt)
        if self.long_rope:
            digest.update(b"R")
        return digest.digest()


class BlockTable:
    """The blocks of one sequence in order, and the digests of its full blocks as far as they are known."""

    def __init__(self, capacity: int, namespace: Namespace) -> None:
        self._blocks: Int32 = np.zeros(capacity, np.int32)
        self.length = 0
        self.published = 0  # leading blocks that are in the prefix cache, or whose twin is
        self.digests: list[bytes] = []
        self.computed = 0  # tokens, where the cache has tiers
        self.aged: dict[int, int] = {}  # by tier: leading blocks in it or a colder one
        self.namespace = namespace
        self._root = namespace.root()

    @property
    def blocks(self) -> Int32:
        """[length] block ids: a view that later growth does not change."""
        return self._blocks[: self.length]

    def append(self, blocks: list[int]) -> None:
        self._blocks[self.length : self.length + len(blocks)] = blocks
        self.length += len(blocks)

    def clear(self) -> None:
        """Drops the blocks. The digests stay: the tokens have not changed. So do views given out."""
        self._blocks = np.zeros_like(self._blocks)
        self.length = self.published = self.computed = 0
        self.aged = {}

    def extend_digests(self, tokens: Int32, count: int, block_size: int) -> None:
        """Makes sure that the digests of the first `count` blocks of `tokens` are known."""
        parent = self.digests[-1] if self.digests else self._root
        for block in range(len(self.digests), count):
            content = (
                tokens[block * block_size : (block + 1) * block_size].astype("<i4", copy=False).tobytes()
            )
            parent = hashlib.sha256(parent + content).digest()
            self.digests.append(parent)


class KVManager:
    """Gives sequences their blocks, finds prefixes that are cached, publishes what was computed."""

    def __init__(self, pool: BlockPool, block_size: int, *, prefix_caching: bool = True) -> None:
        self.pool = pool
        self.block_size = block_size
        self._prefix_caching = prefix_caching
        self.chunk_tokens = sys.maxsize  # of one sequence in a step, at most

    @property
    def capacity(self) -> int:
        """Tokens that one sequence may hold in the cache."""
        return self.pool.usable * self.block_size

    def owed(self, table: BlockTable, tokens: int) -> int:
        """Free blocks that a running sequence will take for this many tokens in all."""
        return self.blocks_for(tokens) - table.length

    def needs(self, hits: list[int], tokens: int) -> int:
        """Free blocks that a sequence with these hits takes for this many tokens in all."""
        revived = sum(self.pool.references(block) == 0 for block in hits)
        return self.blocks_for(tokens) - len(hits) + revived

    def take_moves(self) -> tuple[Move, ...]:
        """Blocks to convert before the next step; none where the cache is one pool."""
        return ()

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-tokens // self.block_size)

    def match(self, table: BlockTable, tokens: Int32) -> list[int]:
        """Cached blocks that hold the beginning of `tokens`, all but the last token at most.

        At least one token is left to compute, because its logits are wanted. Takes no reference.
        """
        if not self._prefix_caching:
            return []
        limit = (len(tokens) - 1) // self.block_size
        hits: list[int] = []
        for index in range(limit):
            table.extend_digests(tokens, index + 1, self.block_size)
            block = self.pool.find(table.digests[index])
            if block is None:
                break
            hits.append(block)
        return hits

    def attach(self, table: BlockTable, hits: list[int]) -> None:
        """Makes an empty table begin with these cached blocks."""
        assert table.length == 0
        for block in hits:
            self.pool.share(block)
        table.append(hits)
        table.published = len(hits)

    def grow(self, table: BlockTable, tokens: int) -> bool:
        """Gives the table room for `tokens` tokens in all. False, and no change, if the pool lacks blocks."""
        missing = self.blocks_for(tokens) - table.length
        if missing <= 0:
            return True
        if missing > self.pool.free:
            return False
        table.append(self.pool.take(missing))
        return True

    def publish(self, table: BlockTable, tokens: Int32, computed: int) -> None:
        """Lets others find the blocks that the first `computed` tokens have filled."""
        full = computed // self.block_size
        if not self._prefix_caching or full <= table.published:
            return
        table.extend_digests(tokens, full, self.block_size)
        for index in range(table.published, full):
            self.pool.publish(int(table.blocks[index]), table.digests[index])
        table.published = full

    def close(self, table: BlockTable, *, forget: bool = False) -> None:
        """Gives the blocks back, the last first, so that a prefix outlives what follows it.

        `forget` says that their content is not to be trusted (it produced NaN): nobody finds them again.
        """
        blocks = table.blocks.tolist()
        if forget:
            self.pool.forget(blocks)
        self.pool.release(reversed(blocks))
        table.clear()
