"""Cache tiers by age: a sequence's newest tokens in floats, older ones in pools of fewer bits.

Block ids count on from pool to pool, as PagedAttention reads them. New blocks come from the first pool, the
one that steps write. Once all tokens of a block are old enough it moves: a block of a colder pool takes its
place in the table, and the engine converts the content before the next step. The block it came from stays
findable until it is given out again. A pool that is full leaves blocks where they are.

Every pool has digests of its own, so a prefix may be found in parts, each in the warmest pool that holds it.
A block that several sequences hold is converted once: the others find its twin in the colder pool.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np

from enginebay.triton_repo.runtime.block_pool import BlockPool
from enginebay.triton_repo.runtime.engine import EngineLimits, Int32, Move
from enginebay.triton_repo.runtime.kv_manager import BlockTable, KVManager


class TieredPool(BlockPool):
    """The pool that steps write, with colder pools behind it. `take`, `free` and `usable` are the first's."""

    def __init__(self, sizes: Sequence[int], reserved: int = 0) -> None:
        super().__init__(sizes[0], reserved)
        self._starts = [0, *accumulate(sizes)][: len(sizes)]
        self.colder = tuple(BlockPool(size) for size in sizes[1:])

    @property
    def total(self) -> int:
        return self.usable + sum(pool.usable for pool in self.colder)

    @property
    def held(self) -> int:
        return super().held + sum(pool.held for pool in self.colder)

    def tier(self, block: int) -> int:
        """The pool that `block` lies in; 0 is the warmest."""
        return bisect_right(self._starts, block) - 1

    def references(self, block: int) -> int:
        pool, own = self._own(block)
        return super().references(block) if pool is None else pool.references(own)

    def share(self, block: int) -> None:
        pool, own = self._own(block)
        if pool is None:
            super().share(block)
        else:
            pool.share(own)

    def release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            pool, own = self._own(block)
            if pool is None:
                super().release([block])
            else:
                pool.release([own])

    def find(self, digest: bytes) -> int | None:
        """The block of this content in the warmest pool that has one."""
        warm = super().find(digest)
        return warm if warm is not None else self.find_colder(digest)

    def find_colder(self, digest: bytes) -> int | None:
        """The same, but not in the first pool."""
        for start, pool in zip(self._starts[1:], self.colder, strict=True):
            own = pool.find(digest)
            if own is not None:
                return start + own
        return None

    def forget(self, blocks: Iterable[int]) -> None:
        """Makes the content of these blocks unfindable in every pool."""
        digests = {digest for block in blocks if (digest := self.digest(block)) is not None}
        find = super().find
        super().forget([block for digest in digests if (block := find(digest)) is not None])
        for pool in self.colder:
            pool.forget([own for digest in digests if (own := pool.find(digest)) is not None])

    def digest(self, block: int) -> bytes | None:
        pool, own = self._own(block)
        return super().digest(block) if pool is None else pool.digest(own)

    def demote(self, block: int, tier: int, digest: bytes | None) -> tuple[int, bool] | None:
        """Exchanges a held block for one of a colder pool: (its id, whether it is still to be converted).

        None, and no change, where that pool is full. `digest` is the content's, where prefixes are cached.
        """
        pool, start = self.colder[tier - 1], self._starts[tier]
        own = pool.find(digest) if digest is not None else None
        fresh = own is None
        if own is not None:
            pool.share(own)
        elif pool.free:
            (own,) = pool.take(1)
            if digest is not None:
                pool.publish(own, digest)
        else:
            return None
        self.release([block])
        return start + own, fresh

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        tables = [list(table) for table in holders]
        super().check([[block for block in table if self.tier(block) == 0] for table in tables])
        for tier, pool in enumerate(self.colder, 1):
            start = self._starts[tier]
            pool.check([[block - start for block in table if self.tier(block) == tier] for table in tables])

    def _own(self, block: int) -> tuple[BlockPool | None, int]:
        """The colder pool of `block` and its id there; None: the first pool."""
        tier = self.tier(block)
        return (self.colder[tier - 1], block - self._starts[tier]) if tier else (None, block)


class TieredKV(KVManager):
    """Moves the blocks of sequences to colder pools as their tokens age.

    ValueError where the pools cannot serve one sequence at its longest.
    """

    pool: TieredPool

    def __init__(
        self, limits: EngineLimits, step_tokens: int, reserved: int = 0, *, prefix_caching: bool = True
    ) -> None:
        sizes = [limits.num_blocks, *(tier.num_blocks for tier in limits.tiers)]
        super().__init__(TieredPool(sizes, reserved), limits.block_size, prefix_caching=prefix_caching)
        self._ages = [tier.age for tier in limits.tiers]
        needed = least_blocks(limits)
        for tier, (usable, least) in enumerate(
            zip((self.pool.usable, *(pool.usable for pool in self.pool.colder)), needed, strict=True)
        ):
            if usable < least:
                raise ValueError(
                    f"cache pool {tier} has {usable} blocks to give; one sequence needs {least}: "
                    "allow more cache memory"
                )
        self._window = needed[0] - 1
        self.chunk_tokens = min(step_tokens, (self.pool.usable - self._window) * limits.block_size)
        # The most blocks of the first pool that a sequence holds at once, while the colder ones have room.
        self._peak = self._window + self.blocks_for(self.chunk_tokens)
        self._moves: list[Move] = []

    @property
    def capacity(self) -> int:
        colder = sum(pool.usable for pool in self.pool.colder)
        return self._ages[0] + colder * self.block_size

    def owed(self, table: BlockTable, tokens: int) -> int:
        warm = table.length - table.aged.get(1, 0)
        return min(super().owed(table, tokens), max(0, self._peak - warm))

    def needs(self, hits: list[int], tokens: int) -> int:
        revived = sum(self._revives(block) for block in hits)
        return min(self.blocks_for(tokens) - len(hits), self._peak) + revived

    def match(self, table: BlockTable, tokens: Int32) -> list[int]:
        """As ever, but what it revives in the first pool leaves enough there to go on with."""
        if not self._prefix_caching:
            return []
        spare = self.pool.usable - self._peak
        hits: list[int] = []
        for index in range((len(tokens) - 1) // self.block_size):
            table.extend_digests(tokens, index + 1, self.block_size)
            block = self.pool.find(table.digests[index])
            if block is not None and self._revives(block):
                if spare == 0:
                    block = self.pool.find_colder(table.digests[index])
                else:
                    spare -= 1
            if block is None:
                break
            hits.append(block)
        return hits

    def attach(self, table: BlockTable, hits: list[int]) -> None:
        super().attach(table, hits)
        self._age(table, len(hits) * self.block_size)

    def grow(self, table: BlockTable, tokens: int) -> bool:
        if super().grow(table, tokens):
            return True
        self._age(table, table.computed)  # blocks that found colder pools full may find room now
        return super().grow(table, tokens)

    def publish(self, table: BlockTable, tokens: Int32, computed: int) -> None:
        super().publish(table, tokens, computed)
        self._age(table, computed)

    def take_moves(self) -> tuple[Move, ...]:
        moves, self._moves = tuple(self._moves), []
        return moves

    def _age(self, table: BlockTable, computed: int) -> None:
        """Moves the blocks of `table` that are old enough, the coldest first: that makes room for others."""
        table.computed = computed
        for tier in range(len(self._ages), 0, -1):
            wanted = max(0, computed - self._ages[tier - 1]) // self.block_size
            done = table.aged.get(tier, 0)
            while done < wanted and self._demote(table, done, tier):
                done += 1
            table.aged[tier] = done

    def _demote(self, table: BlockTable, index: int, tier: int) -> bool:
        """Whether the table's block `index` is now in `tier` or a colder one."""
        block = int(table.blocks[index])
        if self.pool.tier(block) >= tier:
            return True
        moved = self.pool.demote(block, tier, table.digests[index] if self._prefix_caching else None)
        if moved is None:
            return False
        table.blocks[index], fresh = moved
        if fresh:
            self._moves.append((block, moved[0]))
        return True

    def _revives(self, block: int) -> bool:
        return self.pool.tier(block) == 0 and self.pool.references(block) == 0


def least_blocks(limits: EngineLimits) -> list[int]:
    """Blocks of each pool without which a sequence cannot run: the first holds the newest tokens and a block
    of new ones, the others what ages up to the next age; the last may be of any size."""
    ages = [0, *(tier.age for tier in limits.tiers)]
    ranges = [-(-(end - start) // limits.block_size) + 1 for start, end in pairwise(ages)]
    return [ranges[0] + 1, *ranges[1:], 1]


def sequence_blocks(limits: EngineLimits, tokens: int) -> list[int]:
    """The most blocks of each pool that a sequence of `tokens` holds between steps."""
    ages = [0, *(tier.age for tier in limits.tiers), tokens]
    spans = [min(end, tokens) - min(start, tokens) for start, end in pairwise(ages)]
    partial = bool(limits.tiers)  # where spans begin within a block
    return [-(-span // limits.block_size) + (partial and span > 0) for span in spans]


def move_batches(moves: Sequence[Move], sizes: Sequence[int]) -> list[tuple[int, int, Int32]]:
    """(source pool, destination pool, pairs [N, 2] of ids within them), to be carried out in this order.

    Within a batch destinations differ; that a block is read before it is written anew is the order's doing.
    """
    starts = [0, *accumulate(sizes)][: len(sizes)]
    batches: list[tuple[int, int, list[Move]]] = []
    written: set[int] = set()
    for source, destination in moves:
        pools = (bisect_right(starts, source) - 1, bisect_right(starts, destination) - 1)
        if not batches or batches[-1][:2] != pools or destination in written:
            batches.append((*pools, []))
            written = set()
        written.add(destination)
        batches[-1][2].append((source - starts[pools[0]], destination - starts[pools[1]]))
    return [(source, into, np.array(pairs, np.int32)) for source, into, pairs in batches]
