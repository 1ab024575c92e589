"""Sequences whose blocks lie in several pools: a float cache, cache_int8 and cache_int4."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attention_cases import Heads, Pool, rows_of, step
from numpy.typing import NDArray

from enginebay.plugins import ops, reference
from enginebay.plugins.load import KernelLibrary, PluginError
from enginebay.plugins.reference_cache import decode_int4, encode_int4

SHAPES = {
    "smollm2": Heads(num_heads=9, num_kv_heads=3, head_dim=64, rotary_dim=64),
    "dim96_window": Heads(num_heads=4, num_kv_heads=2, head_dim=96, rotary_dim=32, attributes={"window": 77}),
}
LENGTHS = [130, 61, 600]
BLOCK = 16


class Tiers:
    """Filled pools and tables that mix them; the last block of every sequence is in the first pool."""

    def __init__(self, heads: Heads, dtype: Any, rng: np.random.Generator) -> None:
        self.heads, self.rng = heads, rng
        counts = [-(-length // BLOCK) for length in LENGTHS]
        total = sum(counts)
        self.cache = rng.normal(size=(total, 2, BLOCK, heads.num_kv_heads, heads.head_dim)).astype(dtype)
        shape = (total, 2, BLOCK, heads.num_kv_heads, heads.head_dim)
        self.int8 = rng.integers(-127, 128, shape).astype(np.int8)
        self.int4 = encode_int4(rng.normal(size=shape))
        self.scales = rng.uniform(0.005, 0.02, (2, heads.num_kv_heads, heads.head_dim)).astype(np.float32)
        self.table = np.full((len(counts), max(counts)), 2**31 - 1, np.int32)
        free = [list(rng.permutation(total)) for _ in range(3)]
        for row, count in zip(self.table, counts, strict=True):
            for i in range(count):
                tier = 0 if i >= count - 2 else int(rng.integers(3))
                row[i] = tier * total + free[tier].pop()

    def inputs(self, chunks: list[int]) -> dict[str, NDArray[Any]]:
        rows = [rows_of(self.rng, self.heads, count) for count in chunks]
        starts = [length - count for length, count in zip(LENGTHS, chunks, strict=True)]
        now = step(rows, starts, self.table, BLOCK)
        pools = {"cache_int8": self.int8, "cache_int4": self.int4, "cache_scales": self.scales}
        return {**now, **pools, **self.heads.constants(self.rng)}


@pytest.mark.parametrize("chunks", [[1, 1, 1], [5, 12, 17]], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_reference(isa_library: KernelLibrary, shape: str, dtype: Any, chunks: list[int]) -> None:
    tiers = Tiers(SHAPES[shape], dtype, np.random.default_rng())
    inputs, keywords = tiers.inputs(chunks), tiers.heads.keywords()
    before = [pool.copy() for pool in (tiers.cache, tiers.int8, tiers.int4)]
    wanted, _ = reference.paged_attention(cache=before[0], **inputs, **keywords)
    got = isa_library.run_attention(cache=tiers.cache, **inputs, **keywords)
    tolerance = {np.float32: 3e-5, np.float16: 1e-3, ml_dtypes.bfloat16: 8e-3}[dtype]
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(tiers.int8, before[1], "colder pools are read only")
    np.testing.assert_array_equal(tiers.int4, before[2])


def test_blocks_of_the_first_pool_keep_their_bits() -> None:
    """A sequence that was never moved answers as without tiers, and threads change nothing."""
    heads = SHAPES["smollm2"]
    rng = np.random.default_rng()
    pool = Pool(heads, rng, block_size=BLOCK, dtype=np.float16, blocks=80)
    pool.cache[:] = rng.normal(size=pool.cache.shape).astype(np.float16)
    table = pool.table([700, 90], 44)
    now = {**step([rows_of(rng, heads, 1), rows_of(rng, heads, 9)], [699, 81], table, BLOCK)}
    now |= heads.constants(rng)
    int8 = np.zeros((2, *pool.cache.shape[1:]), np.int8)
    wanted = KernelLibrary().run_attention(cache=pool.cache.copy(), **now, **heads.keywords())
    for threads in (1, 3):
        library = KernelLibrary(threads=threads)
        got = library.run_attention(cache=pool.cache.copy(), cache_int8=int8, **now, **heads.keywords())
        np.testing.assert_array_equal(got, wanted)


def test_refusals(library: KernelLibrary) -> None:
    tiers = Tiers(SHAPES["smollm2"], np.float16, np.random.default_rng())
    inputs, keywords = tiers.inputs([1, 1, 1]), tiers.heads.keywords()
    blocks = len(tiers.cache)
    before = tiers.cache.copy()

    def refused(words: str, cache: NDArray[Any] = tiers.cache, **changes: Any) -> None:
        with pytest.raises(PluginError, match=words):
            library.run_attention(cache=cache, **{**inputs, **changes}, **keywords)

    beyond = tiers.table.copy()
    beyond[0, 0] = 3 * blocks
    refused(rf"block_table\[0\]\[0\] is {3 * blocks}; the cache has {3 * blocks} blocks", block_table=beyond)
    slots = inputs["slot_mapping"].copy()
    slots[0] = blocks * BLOCK  # the first slot of cache_int8
    refused(rf"slot_mapping\[0\] is {slots[0]}; the cache has {blocks * BLOCK} slots", slot_mapping=slots)
    refused("cache_int8 and cache_int4 beside a int8 cache", cache=tiers.int8)
    refused("cache_scales given for a float16 cache, which has none", cache_int8=None)
    np.testing.assert_array_equal(tiers.cache, before, "nothing was written")


def test_int4_tier_needs_whole_groups(library: KernelLibrary) -> None:
    heads = Heads(num_heads=2, num_kv_heads=1, head_dim=48, rotary_dim=0)
    inputs = step([rows_of(np.random.default_rng(), heads, 3)], [0], np.array([[2]], np.int32), 16)
    cache = np.zeros((4, 2, 16, 1, 48), np.float32)
    with pytest.raises(PluginError, match="head_dim 48 is no multiple of 32"):
        library.run_attention(
            cache=cache, cache_int4=np.zeros((4, 2, 16, 1, 30), np.uint8), **inputs, **heads.keywords()
        )


def test_round_trip_of_int4_rows() -> None:
    values = np.random.default_rng().normal(size=(7, 3, 96))
    rows = encode_int4(values)
    assert rows.shape == (7, 3, ops.int4_cache_row_bytes(96))
    assert np.abs(decode_int4(rows) - values).max() < 0.3
