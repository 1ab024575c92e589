"""Prefix cache keys and block tables."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from enginebay.triton_repo.runtime.block_pool import BlockPool
from enginebay.triton_repo.runtime.kv_manager import BlockTable, KVManager, Namespace

TOKENS = np.arange(48, dtype=np.int32)


def computed(kv: KVManager, namespace: Namespace, tokens: np.ndarray = TOKENS) -> BlockTable:
    """A table whose blocks hold `tokens`, published and closed."""
    table = BlockTable(64, namespace)
    assert kv.grow(table, len(tokens))
    kv.publish(table, tokens, len(tokens))
    kv.close(table)
    return table


def hits(kv: KVManager, namespace: Namespace, tokens: np.ndarray = TOKENS) -> int:
    return len(kv.match(BlockTable(64, namespace), tokens))


# C03: base, adapter A, adapter B, A loaded again, salts, and an adapter and a salt of one name.
NAMESPACES = [
    Namespace(),
    Namespace(lora=("A", 1)),
    Namespace(lora=("B", 1)),
    Namespace(lora=("A", 2)),
    Namespace(salt="A"),
    Namespace(salt="B"),
    Namespace(salt=""),
    Namespace(lora=("A", 1), salt="A"),
    Namespace(lora=("", 0)),
    Namespace(lora=("AG1:", 1)),
    Namespace(salt="L1:AG1:"),
    Namespace(long_rope=True),
    Namespace(salt="A", long_rope=True),
    Namespace(salt="AR"),
]


def test_c03_no_cross_hits_between_namespaces() -> None:
    for one, other in itertools.permutations(NAMESPACES, 2):
        kv = KVManager(BlockPool(16), 16)
        computed(kv, one)
        assert hits(kv, other) == 0, f"{one} was found as {other}"
        assert hits(kv, one) == 2


def test_a_hit_needs_the_whole_prefix() -> None:
    kv = KVManager(BlockPool(16), 16)
    computed(kv, Namespace())
    changed = TOKENS.copy()
    changed[0] += 1  # blocks 1 and 2 hold the same tokens, but after another first block
    assert hits(kv, Namespace(), changed) == 0
    changed = TOKENS.copy()
    changed[20] += 1
    assert hits(kv, Namespace(), changed) == 1


@pytest.mark.parametrize(
    ("length", "blocks"), [(15, 0), (16, 0), (17, 1), (32, 1), (33, 2), (48, 2), (49, 3)]
)
def test_c01_one_token_is_always_left_to_compute(length: int, blocks: int) -> None:
    kv = KVManager(BlockPool(16), 16)
    tokens = np.arange(length, dtype=np.int32)
    computed(kv, Namespace(), tokens)
    assert hits(kv, Namespace(), tokens) == blocks


def test_only_computed_blocks_are_published() -> None:
    kv = KVManager(BlockPool(16), 16)
    table = BlockTable(64, Namespace())
    kv.grow(table, 48)
    kv.publish(table, TOKENS, 31)
    assert hits(kv, Namespace()) == 1
    kv.publish(table, TOKENS, 32)
    assert hits(kv, Namespace()) == 2


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    kv = KVManager(BlockPool(3), 16)
    computed(kv, Namespace())
    other = BlockTable(64, Namespace(salt="other"))
    assert kv.grow(other, 16)
    longer = np.arange(64, dtype=np.int32)
    assert hits(kv, Namespace(), longer) == 2


def test_grow_takes_nothing_where_the_pool_is_short() -> None:
    pool = BlockPool(3)
    kv = KVManager(pool, 16)
    table = BlockTable(64, Namespace())
    assert kv.grow(table, 17)
    assert not kv.grow(table, 49)
    assert (table.length, pool.free) == (2, 1)


def test_forgotten_blocks_are_not_found_again() -> None:
    kv = KVManager(BlockPool(16), 16)
    table = BlockTable(64, Namespace())
    kv.grow(table, 48)
    kv.publish(table, TOKENS, 48)
    kv.close(table, forget=True)
    assert hits(kv, Namespace()) == 0
    kv.pool.check([])


def test_without_prefix_caching_nothing_is_found() -> None:
    kv = KVManager(BlockPool(16), 16, prefix_caching=False)
    computed(kv, Namespace())
    assert hits(kv, Namespace()) == 0


def test_digests_are_stable() -> None:
    """The chain as documented, computed by hand: another process, another run, the same keys."""
    import hashlib

    table = BlockTable(4, Namespace(salt="t"))
    table.extend_digests(TOKENS, 2, 16)
    root = hashlib.sha256(b"enginebay prefix cache 1" + b"S1:t").digest()
    first = hashlib.sha256(root + TOKENS[:16].tobytes()).digest()
    assert table.digests == [first, hashlib.sha256(first + TOKENS[16:32].tobytes()).digest()]
