"""The pool of cache blocks: who holds which block, which blocks can be found by their content.

A block is held (reference count above 0), cached (unreferenced, but its content can still be found by its
digest) or plain (nothing of worth inside). Plain blocks are given out first, then the least recently used
cached ones.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """`num_blocks` block ids, the first `reserved` of which are never given out."""

    def __init__(self, num_blocks: int, reserved: int = 0) -> None:
        if not 0 <= reserved < num_blocks:
            raise ValueError(f"a pool of {num_blocks} blocks cannot reserve {reserved} of them")
        self.usable = num_blocks - reserved
        self._reserved = reserved
        self._references = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._by_digest: dict[bytes, int] = {}
        self._plain = list(range(num_blocks - 1, reserved - 1, -1))  # a stack: the lowest id on top
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first

    @property
    def free(self) -> int:
        """Blocks that `take` can give: plain and cached."""
        return len(self._plain) + len(self._cached)

    @property
    def total(self) -> int:
        """Blocks that can be in use at once."""
        return self.usable

    @property
    def held(self) -> int:
        """Blocks with at least one holder, of `total`."""
        return self.usable - self.free

    def references(self, block: int) -> int:
        """How many holders `block` has."""
        return self._references[block]

    def take(self, count: int) -> list[int]:
        """`count` blocks, each with one holder and no content. The caller has checked `free`."""
        assert count <= self.free, f"{count} blocks asked of {self.free} free"
        blocks = []
        for _ in range(count):
            if self._plain:
                block = self._plain.pop()
            else:
                block, _none = self._cached.popitem(last=False)
                self._unlink(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """Adds a holder to a held or cached block."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Takes one holder from each block. Of those without holders, the first named is evicted first."""
        for block in blocks:
            count = self._references[block] - 1
            assert count >= 0, f"block {block} released more often than held"
            self._references[block] = count
            if count == 0:
                if self._digests[block] is None:
                    self._plain.append(block)
                else:
                    self._cached[block] = None

    def publish(self, block: int, digest: bytes) -> None:
        """Lets `find` see a held, computed block. The first one published under a digest stays."""
        assert self._references[block] > 0, f"block {block} published without a holder"
        if digest not in self._by_digest and self._digests[block] is None:
            self._by_digest[digest] = block
            self._digests[block] = digest

    def find(self, digest: bytes) -> int | None:
        """The block whose content has this digest."""
        return self._by_digest.get(digest)

    def digest(self, block: int) -> bytes | None:
        """What the block can be found by."""
        return self._digests[block]

    def forget(self, blocks: Iterable[int]) -> None:
        """Makes the content of these blocks unfindable: it is not to be trusted."""
        for block in blocks:
            self._unlink(block)
            if block in self._cached:
                del self._cached[block]
                self._plain.append(block)

    def _unlink(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None:
            del self._by_digest[digest]
            self._digests[block] = None

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Asserts every invariant, given the block table of each holder."""
        counts = Counter(block for table in holders for block in table)
        total = len(self._references)
        free = [*self._plain, *self._cached]
        assert len(set(free)) == len(free), f"duplicates among the free blocks {free}"
        held = {block for block in range(total) if self._references[block]}
        assert held.isdisjoint(free), f"blocks both held and free: {held & set(free)}"
        assert len(held) + len(free) == self.usable, f"{len(held)} held + {len(free)} free of {self.usable}"
        assert all(block >= self._reserved for block in held | set(free)), "a reserved block is in use"
        for block in range(total):
            assert self._references[block] == counts[block], (
                f"block {block}: {self._references[block]} references, {counts[block]} holders"
            )
        linked = {block: digest for block, digest in enumerate(self._digests) if digest is not None}
        assert {block: digest for digest, block in self._by_digest.items()} == linked, (
            "digest map and blocks differ"
        )
        assert all(self._digests[block] is not None for block in self._cached), "a cached block has no digest"
        assert all(self._digests[block] is None for block in self._plain), "a plain block has a digest"
