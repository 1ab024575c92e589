"""BlockPool: every invariant after every operation, and the order of eviction."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from enginebay.triton_repo.runtime.block_pool import BlockPool

BLOCKS, RESERVED = 9, 1


class PoolMachine(RuleBasedStateMachine):
    """Several holders take, share, publish, forget and release; a model predicts what can be found."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, RESERVED)
        self.tables: list[list[int]] = []
        self.digests = 0

    @rule(count=st.integers(1, 5))
    def take(self, count: int) -> None:
        if count > self.pool.free:
            with pytest.raises(AssertionError):
                self.pool.take(count)
            return
        held = {block for table in self.tables for block in table}
        blocks = self.pool.take(count)
        assert held.isdisjoint(blocks), "a held block was given out"
        assert len(set(blocks)) == count
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        digest = b"%d" % data.draw(st.integers(0, 12))
        block = data.draw(st.sampled_from(table))
        before = self.pool.find(digest)
        self.pool.publish(block, digest)
        if before is not None:
            assert self.pool.find(digest) == before, "the first block published under a digest stays"

    @rule(number=st.integers(0, 12))
    def share(self, number: int) -> None:
        block = self.pool.find(b"%d" % number)
        if block is not None:
            self.pool.share(block)
            self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(reversed(table))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.forget(table)
        found = {self.pool.find(b"%d" % number) for number in range(13)}
        assert found.isdisjoint(table)

    @invariant()
    def consistent(self) -> None:
        self.pool.check(self.tables)

    def teardown(self) -> None:
        for table in self.tables:
            self.pool.release(table)
        self.pool.check([])
        assert self.pool.free == BLOCKS - RESERVED


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_plain_blocks_go_first_then_the_least_recently_used() -> None:
    pool = BlockPool(4)
    first, second, third, fourth = pool.take(4)
    for block in (first, second, third):
        pool.publish(block, b"%d" % block)
    pool.release([second, first])  # second was released first, so it is evicted first
    pool.release([fourth])
    pool.release([third])
    assert pool.take(1) == [fourth]
    pool.share(second)  # used again, so no longer the oldest once released
    pool.release([second])
    assert pool.take(3) == [first, third, second]
    assert pool.find(b"%d" % first) is None
    pool.check([[first, second, third, fourth]])


def test_lowest_blocks_are_used_first_so_that_untouched_memory_stays_untouched() -> None:
    pool = BlockPool(100)
    assert pool.take(3) == [0, 1, 2]
    pool.release([1])
    assert pool.take(2) == [1, 3]


@pytest.mark.parametrize(("blocks", "reserved"), [(0, 0), (3, 3), (3, -1)])
def test_impossible_pools_are_refused(blocks: int, reserved: int) -> None:
    with pytest.raises(ValueError, match=str(blocks)):
        BlockPool(blocks, reserved)


def test_check_notices_each_kind_of_damage() -> None:
    def damaged(damage: str) -> BlockPool:
        pool = BlockPool(4)
        (block,) = pool.take(1)
        pool.publish(block, b"x")
        match damage:
            case "leak":
                pool.take(1)
            case "duplicate":
                pool._plain.append(pool._plain[0])
            case "count":
                pool._references[block] += 1
            case "map":
                pool._by_digest[b"y"] = 2
        return pool

    damaged("none").check([[0]])
    for damage in ("leak", "duplicate", "count", "map"):
        with pytest.raises(AssertionError):
            damaged(damage).check([[0]])
