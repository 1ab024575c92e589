"""INT4 caches with offsets: what keys and values are near to is taken off where that helps."""

from __future__ import annotations

import numpy as np
import pytest
from attention_cases import Heads, Pool, rows_of, step

from enginebay.plugins import ops, reference
from enginebay.plugins.load import KernelLibrary, PluginError
from enginebay.plugins.reference_cache import decode_int4, encode_int4

SHAPES = {
    "smollm2": Heads(num_heads=9, num_kv_heads=3, head_dim=64, rotary_dim=64),
    "dim128_softcap": Heads(
        num_heads=8, num_kv_heads=2, head_dim=128, rotary_dim=128, attributes={"softcap": 30.0}
    ),
    "dim32_sinks": Heads(num_heads=12, num_kv_heads=1, head_dim=32, rotary_dim=32, sinks=True),
}
MIX = [(0, 70), (100, 1), (63, 2), (31, 40)]


def near(rng: np.random.Generator, heads: Heads) -> np.ndarray:
    """Offsets [2, Hkv, D] of the size of the values."""
    return (2 * rng.standard_normal((2, heads.num_kv_heads, heads.head_dim))).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_reference(isa_library: KernelLibrary, shape: str) -> None:
    rng = np.random.default_rng()
    heads = SHAPES[shape]
    offsets = near(rng, heads)
    pool = Pool(heads, rng, block_size=16, dtype=np.uint8)
    table = pool.table([start + count for start, count in MIX], 12)
    constants, keywords = {**heads.constants(rng), "cache_offsets": offsets}, heads.keywords()

    def rows(count: int) -> np.ndarray:
        values = rows_of(rng, heads, count)
        values[::2, heads.num_heads * heads.head_dim :] += offsets.reshape(-1)  # near them before RoPE
        return values

    past = step([rows(s) for s, _ in MIX], [0] * len(MIX), table, 16)
    isa_library.run_attention(cache=pool.cache, **past, **constants, **keywords)
    now = step([rows(c) for _, c in MIX], [s for s, _ in MIX], table, 16, padding=3)
    before = pool.cache.copy()
    got = isa_library.run_attention(cache=pool.cache, **now, **constants, **keywords)
    _, cache = reference.paged_attention(cache=before, **now, **constants, **keywords)
    wide = offsets[:, None].astype(np.float64)
    values, wanted = decode_int4(pool.cache, wide), decode_int4(cache, wide)
    # A float32 value beside a rounding boundary may take the next code, a factor the next fp16; few do.
    assert np.nanmax(np.abs(values - wanted)) < 2.0
    assert np.nanmean(np.abs(values - wanted) > 4e-3) < 2e-3
    unwritten = {**now, "slot_mapping": np.full_like(now["slot_mapping"], -1)}
    wanted, _ = reference.paged_attention(cache=pool.cache, **unwritten, **constants, **keywords)
    np.testing.assert_allclose(got, wanted, rtol=5e-5, atol=5e-5)


def test_each_group_takes_the_way_that_spans_less() -> None:
    rng = np.random.default_rng()
    offsets = 10 * rng.standard_normal(64)
    values = rng.standard_normal((50, 64))
    values[:, :32] += offsets[:32]
    rows = encode_int4(values, offsets)
    scales = np.ascontiguousarray(rows[:, 32:]).view(np.float16)[:, ::2]
    np.testing.assert_array_equal(np.signbit(scales), [[True, False]] * 50)
    error = np.abs(decode_int4(rows, offsets) - values)
    assert error.max() < 0.6 * 6 / 15
    assert error.max() < np.abs(decode_int4(encode_int4(values)) - values).max() / 3


def test_without_offsets_no_scale_has_a_sign(library: KernelLibrary) -> None:
    rng = np.random.default_rng()
    heads = SHAPES["smollm2"]
    inputs = {**step([rows_of(rng, heads, 40)], [0], np.arange(3, dtype=np.int32)[None], 16)}
    caches = []
    for extra in ({}, {"cache_offsets": np.zeros((2, 3, 64), np.float32)}):
        cache = np.zeros((3, 2, 16, 3, ops.int4_cache_row_bytes(64)), np.uint8)
        constants = heads.constants(np.random.default_rng(0))
        library.run_attention(cache=cache, **inputs, **constants, **heads.keywords(), **extra)
        scales = np.ascontiguousarray(cache[..., 32:]).view(np.float16)[..., ::2]
        assert not np.signbit(scales).any()
        caches.append(cache)
    np.testing.assert_array_equal(*caches)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_offsets_that_are_no_numbers_are_refused(library: KernelLibrary, value: float) -> None:
    rng = np.random.default_rng()
    heads = SHAPES["smollm2"]
    inputs = {**step([rows_of(rng, heads, 3)], [0], np.zeros((1, 1), np.int32), 16), **heads.constants(rng)}
    cache = np.zeros((1, 2, 16, 3, ops.int4_cache_row_bytes(64)), np.uint8)
    offsets = near(rng, heads)
    offsets[1, 2, 5] = value
    with pytest.raises(PluginError, match=r"cache_offsets\[325\] is .*; offsets are finite"):
        library.run_attention(cache=cache, cache_offsets=offsets, **inputs, **heads.keywords())
    assert not cache.any()


def test_other_caches_have_no_offsets(library: KernelLibrary) -> None:
    rng = np.random.default_rng()
    heads = SHAPES["smollm2"]
    inputs = {**step([rows_of(rng, heads, 3)], [0], np.zeros((1, 1), np.int32), 16), **heads.constants(rng)}
    cache = np.zeros((1, 2, 16, 3, 64), np.float16)
    with pytest.raises(PluginError, match="cache_offsets given for a float16 cache; int4 has them"):
        library.run_attention(cache=cache, cache_offsets=near(rng, heads), **inputs, **heads.keywords())
