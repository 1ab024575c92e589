"""INT4 caches: what is stored, what is read, what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from attention_cases import Heads, Pool, rows_of, step

from enginebay.plugins import ops, reference
from enginebay.plugins.load import KernelLibrary, PluginError
from enginebay.plugins.reference_cache import decode_int4, encode_int4

SHAPES = {
    "smollm2": Heads(num_heads=9, num_kv_heads=3, head_dim=64, rotary_dim=64),
    "dim128": Heads(num_heads=8, num_kv_heads=2, head_dim=128, rotary_dim=128),
    "dim96_window": Heads(num_heads=4, num_kv_heads=2, head_dim=96, rotary_dim=32, attributes={"window": 37}),
    "dim32_norm": Heads(num_heads=12, num_kv_heads=1, head_dim=32, rotary_dim=32, qk_norm=True, sinks=True),
}
MIX = [(0, 70), (0, 0), (100, 1), (63, 2), (31, 40), (127, 5)]


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_reference(isa_library: KernelLibrary, shape: str) -> None:
    rng = np.random.default_rng()
    heads = SHAPES[shape]
    pool = Pool(heads, rng, block_size=16, dtype=np.uint8)
    table = pool.table([start + count for start, count in MIX], 12)
    constants, keywords = heads.constants(rng), heads.keywords()
    past = step([rows_of(rng, heads, s) for s, _ in MIX], [0] * len(MIX), table, 16)
    isa_library.run_attention(cache=pool.cache, **past, **constants, **keywords)
    now = step([rows_of(rng, heads, c) for _, c in MIX], [s for s, _ in MIX], table, 16, padding=3)
    before = pool.cache.copy()
    got = isa_library.run_attention(cache=pool.cache, **now, **constants, **keywords)
    _, cache = reference.paged_attention(cache=before, **now, **constants, **keywords)
    # A float32 value beside a rounding boundary may take the next code, a factor the next fp16; few do.
    values, wanted = decode_int4(pool.cache), decode_int4(cache)
    assert np.nanmax(np.abs(values - wanted)) < 1.0
    assert np.nanmean(np.abs(values - wanted) > 2e-3) < 1e-3
    np.testing.assert_array_equal(np.isnan(values), np.isnan(wanted), "slots written")
    unwritten = {**now, "slot_mapping": np.full_like(now["slot_mapping"], -1)}
    wanted, _ = reference.paged_attention(cache=pool.cache, **unwritten, **constants, **keywords)
    np.testing.assert_allclose(got, wanted, rtol=3e-5, atol=3e-5)


def test_error_beside_a_float_cache(library: KernelLibrary) -> None:
    """15 steps over the range of 32 normal values leave an error near 8 % a value, less after averaging."""
    rng = np.random.default_rng()
    heads = replace(SHAPES["dim128"], rotary_dim=0)
    qkv = rows_of(rng, heads, 200)
    answers = []
    for dtype in (np.float32, np.uint8):
        pool = Pool(heads, np.random.default_rng(3), block_size=16, dtype=dtype)
        inputs = step([qkv], [0], pool.table([200], 13), 16)
        answers.append(library.run_attention(cache=pool.cache, **inputs, **heads.keywords()))
    error = np.sqrt(np.mean((answers[1] - answers[0]) ** 2) / np.mean(answers[0] ** 2))
    assert error < 0.2


def stored(library: KernelLibrary, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows of the cache for values [n, 64], what a query that sees that token alone gets back)."""
    heads = Heads(num_heads=1, num_kv_heads=1, head_dim=64, rotary_dim=0)
    qkv = np.zeros((len(values), 3 * 64), np.float32)
    qkv[:, 128:] = values
    cache = np.zeros((len(values), 2, 1, 1, ops.int4_cache_row_bytes(64)), np.uint8)
    table = np.arange(len(values), dtype=np.int32)[:, None]
    inputs = step([row[None] for row in qkv], [0] * len(values), table, 1)
    out = library.run_attention(cache=cache, **inputs, **heads.keywords())
    return cache[:, 1, 0, 0], out


def test_extremes(isa_library: KernelLibrary) -> None:
    """Constants, tiny and huge groups, NaN and infinity."""
    rng = np.random.default_rng()
    rows = rng.normal(size=(9, 64)).astype(np.float32)
    rows[0], rows[1], rows[2] = 0.0, -3.5, 1e-30
    rows[3] *= 1e-6
    rows[4] *= 1e6
    rows[5, 3], rows[6, 40], rows[7, 63] = np.nan, np.inf, -np.inf
    codes, out = stored(isa_library, rows)
    wanted = decode_int4(encode_int4(rows.astype(np.float64)))
    np.testing.assert_array_equal(np.isnan(out), np.isnan(wanted))
    assert np.isnan(out[5, :32]).all()
    assert np.isnan(out[[6, 7], 32:]).all()
    assert np.isfinite(out[5:8, 32:][0]).all()
    np.testing.assert_array_equal(out[:2], rows[:2])
    np.testing.assert_allclose(out, decode_int4(codes), rtol=1e-6, atol=1e-7)
    groups = np.clip(rows[[0, 1, 3, 4, 8]], -65504, 65504).reshape(5, 2, 32)
    step_size = (groups.max(axis=2) - groups.min(axis=2)) / 15
    error = np.abs(out[[0, 1, 3, 4, 8]].reshape(5, 2, 32) - groups).max(axis=2)
    # Half a step, and what fp16 loses of scale and minimum.
    slack = 2.0**-10 * np.abs(groups).max(axis=2) + 16 * 2.0**-25
    assert (error <= 0.5 * step_size + 15 * step_size * 2.0**-11 + slack).all()


def test_head_dim_that_no_group_divides(library: KernelLibrary) -> None:
    heads = Heads(num_heads=2, num_kv_heads=1, head_dim=48, rotary_dim=0)
    inputs = step([rows_of(np.random.default_rng(), heads, 3)], [0], np.array([[2]], np.int32), 16)
    cache = np.zeros((4, 2, 16, 1, 30), np.uint8)
    with pytest.raises(PluginError, match="head_dim 48 is no multiple of 32, which an int4 cache takes"):
        library.run_attention(cache=cache, **inputs, **heads.keywords())
    with pytest.raises(ValueError, match="head_dim 48 is no positive multiple of 32"):
        ops.int4_cache_row_bytes(48)


def test_scales_and_latents_are_refused(library: KernelLibrary) -> None:
    heads = SHAPES["dim128"]
    rng = np.random.default_rng()
    cache = np.zeros((4, 2, 16, 2, ops.int4_cache_row_bytes(128)), np.uint8)
    inputs = step([rows_of(rng, heads, 3)], [0], np.array([[2]], np.int32), 16)
    arguments = {**inputs, **heads.constants(rng), **heads.keywords()}
    with pytest.raises(PluginError, match="cache_scales given for a int4 cache, which has none"):
        library.run_attention(cache=cache, **arguments, cache_scales=np.ones((2, 2), np.float32))
    latent = {**arguments, "num_kv_heads": 1, "latent_dim": 64}
    with pytest.raises(PluginError, match="latent_dim 64 with an int4 cache"):
        library.run_attention(cache=np.zeros((4, 16, 144), np.uint8), **latent)
