"""INT8 and E4M3 caches: what is stored, what is read, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attention_cases import Heads, Pool, rows_of, step
from numpy.typing import NDArray

from enginebay.plugins import reference
from enginebay.plugins.load import KernelLibrary, PluginError

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
INT8 = np.dtype(np.int8)
SHAPES = {
    "smollm2": Heads(num_heads=9, num_kv_heads=3, head_dim=64, rotary_dim=64),
    "dim128": Heads(num_heads=8, num_kv_heads=2, head_dim=128, rotary_dim=128),
    "dim20_odd": Heads(num_heads=4, num_kv_heads=2, head_dim=20, rotary_dim=6, qk_norm=True),
    "window_sinks": Heads(sinks=True, attributes={"window": 37}),
}
MIX = [(0, 70), (0, 0), (100, 1), (63, 2), (31, 40), (127, 5)]


def scales_of(rng: np.random.Generator, heads: Heads, dtype: Any, channels: bool) -> NDArray[np.float32]:
    """Scales that cover values of order 1 and saturate a few of them."""
    shape = (2, heads.num_kv_heads, heads.head_dim) if channels else (2, heads.num_kv_heads)
    largest = 127.0 if dtype == INT8 else 448.0
    return (rng.uniform(2.0, 4.0, shape) / largest).astype(np.float32)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("dtype", [INT8, E4M3], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_reference(isa_library: KernelLibrary, shape: str, dtype: Any, channels: bool) -> None:
    rng = np.random.default_rng()
    heads = SHAPES[shape]
    pool = Pool(heads, rng, block_size=16, dtype=dtype)
    lengths = [start + count for start, count in MIX]
    table = pool.table(lengths, 12)
    constants, keywords = heads.constants(rng), heads.keywords()
    constants["cache_scales"] = scales_of(rng, heads, dtype, channels)
    past = step([rows_of(rng, heads, s) for s, _ in MIX], [0] * len(MIX), table, 16)
    isa_library.run_attention(cache=pool.cache, **past, **constants, **keywords)
    now = step([rows_of(rng, heads, c) for _, c in MIX], [s for s, _ in MIX], table, 16, padding=3)
    before = pool.cache.copy()
    got = isa_library.run_attention(cache=pool.cache, **now, **constants, **keywords)
    _, cache = reference.paged_attention(cache=before, **now, **constants, **keywords)
    # A float32 key beside a rounding boundary may take the next code; few do.
    codes = [np.asarray(c).view(np.int8).astype(np.int32) for c in (pool.cache, cache)]
    assert np.abs(codes[0] - codes[1]).max() <= 1
    assert np.count_nonzero(codes[0] != codes[1]) <= 1e-3 * codes[0].size
    # Over the codes that were stored, the answer is float32's.
    unwritten = {**now, "slot_mapping": np.full_like(now["slot_mapping"], -1)}
    wanted, _ = reference.paged_attention(cache=pool.cache, **unwritten, **constants, **keywords)
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("dtype", "bound"), [(INT8, 0.02), (E4M3, 0.06)], ids=str)
def test_error_beside_a_float_cache(library: KernelLibrary, dtype: Any, bound: float) -> None:
    """Scales a channel cover the largest value: half a step of 1/127, or 2^-4 of a value, is lost."""
    rng = np.random.default_rng()
    heads = replace(SHAPES["dim128"], rotary_dim=0)
    constants, keywords = heads.constants(rng), heads.keywords()
    qkv = rows_of(rng, heads, 200)
    keys = qkv.reshape(200, -1, heads.head_dim)[:, heads.num_heads :]
    largest = np.abs(keys.reshape(200, 2, heads.num_kv_heads, heads.head_dim)).max(axis=0)
    answers = []
    for kind in (np.dtype(np.float32), dtype):
        pool = Pool(heads, np.random.default_rng(3), block_size=16, dtype=kind)
        table = pool.table([200], 13)
        if kind == dtype:
            constants["cache_scales"] = largest / np.float32(127 if dtype == INT8 else 448)
        answers.append(
            library.run_attention(cache=pool.cache, **step([qkv], [0], table, 16), **constants, **keywords)
        )
    error = np.sqrt(np.mean((answers[1] - answers[0]) ** 2) / np.mean(answers[0] ** 2))
    assert error < bound


def one_row_cache(library: KernelLibrary, values: NDArray[np.float32], dtype: Any, scale: float) -> Any:
    """(what is stored for values [n, 128], what a query that sees that token alone gets back)."""
    heads = Heads(num_heads=1, num_kv_heads=1, head_dim=128, rotary_dim=0)
    qkv = np.zeros((len(values), 3 * 128), np.float32)
    qkv[:, 256:] = values
    cache = np.zeros((len(values), 2, 1, 1, 128), dtype)
    table = np.arange(len(values), dtype=np.int32)[:, None]
    inputs = step([row[None] for row in qkv], [0] * len(values), table, 1)
    scales = np.array([[1.0], [scale]], np.float32)
    out = library.run_attention(cache=cache, cache_scales=scales, **inputs, **heads.keywords())
    return cache[:, 1, 0, 0], out


def test_every_e4m3_code_and_the_values_between(isa_library: KernelLibrary) -> None:
    every = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    every = np.sort(every[np.isfinite(every)])
    middles = (every[1:] + every[:-1]) / 2
    values = np.concatenate([every, middles, np.nextafter(middles, -np.inf), np.nextafter(middles, np.inf)])
    values = np.concatenate([values, [500, 1e30, -1e30, np.inf, -np.inf]]).astype(np.float32)
    rows = np.resize(values, (-(-len(values) // 128), 128))
    stored, out = one_row_cache(isa_library, rows, E4M3, 1.0)
    wanted = np.clip(rows, -448, 448).astype(E4M3)
    np.testing.assert_array_equal(stored.astype(np.float32), wanted.astype(np.float32))
    np.testing.assert_array_equal(out, wanted.astype(np.float32))


def test_int8_rounds_to_even_and_saturates(isa_library: KernelLibrary) -> None:
    halves = np.arange(-260, 261).astype(np.float32) / 2
    values = np.concatenate([halves, [np.inf, -np.inf, 1e30, -1e30]]).astype(np.float32)
    rows = np.resize(values, (-(-len(values) // 128), 128))
    stored, out = one_row_cache(isa_library, rows * np.float32(0.25), INT8, 0.25)
    wanted = np.clip(np.rint(rows), -127, 127)
    np.testing.assert_array_equal(stored, wanted)
    np.testing.assert_array_equal(out, wanted * 0.25)


def test_nan_is_nan_in_e4m3_and_zero_in_int8(isa_library: KernelLibrary) -> None:
    rows = np.ones((2, 128), np.float32)
    rows[0, 5], rows[0, 90] = np.nan, -np.nan
    stored, out = one_row_cache(isa_library, rows, E4M3, 1.0)
    np.testing.assert_array_equal(np.isnan(stored.astype(np.float32)), np.isnan(rows))
    np.testing.assert_array_equal(out, rows)
    stored, out = one_row_cache(isa_library, rows, INT8, 1.0)
    np.testing.assert_array_equal(stored, np.nan_to_num(rows, nan=0.0))
    np.testing.assert_array_equal(out, np.nan_to_num(rows, nan=0.0))


@pytest.mark.parametrize("scale", [0.0, -0.5, np.nan, np.inf])
def test_bad_scales(library: KernelLibrary, scale: float) -> None:
    heads = SHAPES["dim128"]
    rng = np.random.default_rng()
    cache = np.zeros((4, 2, 16, 2, 128), np.int8)
    constants = heads.constants(rng)
    for where, words in (
        ((1, 1), "values of key head 1, channel 0"),
        ((0, 1, 100), "keys of key head 1, channel 100"),
    ):
        scales = np.ones((2, 2) if len(where) == 2 else (2, 2, 128), np.float32)
        scales[where] = scale
        inputs = step([rows_of(rng, heads, 3)], [0], np.array([[2]], np.int32), 16)
        with pytest.raises(
            PluginError, match=f"cache_scales of {words} is .*; a scale is positive and finite"
        ):
            library.run_attention(cache=cache, **inputs, **constants, **heads.keywords(), cache_scales=scales)
    assert not cache.any(), "nothing was written"


def test_scales_of_a_wide_cache(library: KernelLibrary) -> None:
    heads = SHAPES["dim128"]
    rng = np.random.default_rng()
    cache = np.zeros((4, 2, 16, 2, 128), np.float16)
    inputs = step([rows_of(rng, heads, 3)], [0], np.array([[2]], np.int32), 16)
    scales = np.ones((2, 2), np.float32)
    with pytest.raises(PluginError, match="cache_scales given for a float16 cache, which has none"):
        library.run_attention(
            cache=cache, **inputs, **heads.constants(rng), **heads.keywords(), cache_scales=scales
        )


def test_scale_dim_that_is_no_head(library: KernelLibrary) -> None:
    heads = SHAPES["dim128"]
    rng = np.random.default_rng()
    cache = np.zeros((4, 2, 16, 2, 128), np.int8)
    inputs = step([rows_of(rng, heads, 3)], [0], np.array([[2]], np.int32), 16)
    scales = np.ones((2, 2, 64), np.float32)
    with pytest.raises(PluginError, match="cache_scale_dim is 64, expected 1 or head_dim 128"):
        library.run_attention(
            cache=cache, **inputs, **heads.constants(rng), **heads.keywords(), cache_scales=scales
        )
