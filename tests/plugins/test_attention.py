"""PagedAttention against its float64 meaning, on every instruction set this processor has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attention_cases import Heads, Pool, rows_of, step

from enginebay.plugins import reference
from enginebay.plugins.load import KernelLibrary

# Relative to values of order 1: fp32 sums of some hundred terms. A rounded cache adds nothing, for the
# reference rounds alike, except where the fp32 key lies on a rounding boundary.
TOLERANCE = {np.float32: 2e-5, np.float16: 1e-3, ml_dtypes.bfloat16: 8e-3}

SHAPES = {
    "gqa": Heads(),
    "mha": Heads(num_heads=3, num_kv_heads=3, head_dim=16, rotary_dim=16),
    "mqa_wide": Heads(num_heads=71, num_kv_heads=1, head_dim=64, rotary_dim=64),
    "smollm2": Heads(num_heads=9, num_kv_heads=3, head_dim=64, rotary_dim=64),
    "dim128": Heads(num_heads=8, num_kv_heads=2, head_dim=128, rotary_dim=128),
    "dim80_partial": Heads(num_heads=4, num_kv_heads=4, head_dim=80, rotary_dim=32),
    "dim20_odd": Heads(num_heads=4, num_kv_heads=2, head_dim=20, rotary_dim=6),
    "dim96": Heads(num_heads=2, num_kv_heads=1, head_dim=96, rotary_dim=96),
    "dim1": Heads(num_heads=2, num_kv_heads=1, head_dim=1, rotary_dim=0),
    "no_rope": Heads(rotary_dim=0),
    "interleaved": Heads(attributes={"rope_interleaved": True}),
    "qk_norm": Heads(qk_norm=True, attributes={"norm_epsilon": 1e-3}),
    "window": Heads(attributes={"window": 37}),
    "window_one": Heads(attributes={"window": 1}),
    "softcap": Heads(attributes={"softcap": 2.0, "scale": 3.0}),
    "sinks": Heads(sinks=True),
    "sinks_window": Heads(sinks=True, attributes={"window": 20}),
    "bidirectional": Heads(attributes={"causal": False}),
}
# (tokens already cached, tokens of this step) of each sequence: padding, decode, chunks and whole prompts.
MIX = [(0, 70), (0, 0), (100, 1), (63, 2), (64, 1), (31, 40), (0, 1), (127, 5)]


def run_mix(
    library: KernelLibrary, heads: Heads, mix: list[tuple[int, int]], rng: np.random.Generator, **options: Any
) -> tuple[Any, Any, Any, Any]:
    """Fill each sequence's cache, then run one step of the mix; (got, wanted, got cache, wanted cache)."""
    pool = Pool(heads, rng, **options)
    lengths = [start + count for start, count in mix]
    width = max(-(-length // pool.block_size) for length in lengths) + 1
    table = pool.table(lengths, width)
    constants, keywords = heads.constants(rng), heads.keywords()
    past = step([rows_of(rng, heads, s) for s, _ in mix], [0] * len(mix), table, pool.block_size)
    library.run_attention(cache=pool.cache, **past, **constants, **keywords)
    now = step(
        [rows_of(rng, heads, c) for _, c in mix], [s for s, _ in mix], table, pool.block_size, padding=3
    )
    before = pool.cache.copy()
    got = library.run_attention(cache=pool.cache, **now, **constants, **keywords)
    wanted, cache = reference.paged_attention(cache=before, **now, **constants, **keywords)
    return got, wanted, pool.cache, cache


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_reference(library: KernelLibrary, shape: str, dtype: Any) -> None:
    rng = np.random.default_rng()
    heads = SHAPES[shape]
    got, wanted, cache, wanted_cache = run_mix(library, heads, MIX, rng, block_size=16, dtype=dtype)
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)
    assert not got[-3:].any(), "padding rows are zeros"
    np.testing.assert_array_equal(np.isnan(cache), np.isnan(wanted_cache), "slots written")
    np.testing.assert_allclose(
        cache.astype(np.float64), wanted_cache.astype(np.float64), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize(
    "shape", ["smollm2", "dim80_partial", "dim20_odd", "softcap", "sinks_window", "qk_norm"]
)
def test_every_instruction_set(isa_library: KernelLibrary, shape: str) -> None:
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        rng = np.random.default_rng()
        mix = [(30, 50), (66, 1), (0, 20)]
        got, wanted, *_ = run_mix(isa_library, SHAPES[shape], mix, rng, block_size=16, dtype=dtype)
        np.testing.assert_allclose(got, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 100])
def test_block_sizes(library: KernelLibrary, block_size: int) -> None:
    rng = np.random.default_rng()
    got, wanted, *_ = run_mix(library, SHAPES["gqa"], MIX, rng, block_size=block_size, blocks=700)
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", ["gqa", "window", "sinks", "wide_window"])
def test_splits_of_a_long_context(shape: str, threads: int) -> None:
    """Positions around multiples of 512, where partial softmaxes are merged."""
    heads = SHAPES[shape] if shape in SHAPES else replace(SHAPES["gqa"], attributes={"window": 600})
    mix = [(511, 1), (512, 1), (1023, 3), (1300, 1), (500, 30)]
    rng = np.random.default_rng()
    got, wanted, *_ = run_mix(KernelLibrary(threads=threads), heads, mix, rng, block_size=16, blocks=400)
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


def test_slot_minus_one_writes_nothing(library: KernelLibrary) -> None:
    rng = np.random.default_rng()
    heads = SHAPES["gqa"]
    pool = Pool(heads, rng, block_size=16)
    table = pool.table([20], 2)
    rows = rows_of(rng, heads, 20)
    constants = heads.constants(rng)
    first = step([rows], [0], table, 16)
    wanted = library.run_attention(cache=pool.cache, **first, **constants, **heads.keywords())
    before = pool.cache.copy()
    again = {**first, "slot_mapping": np.full(20, -1, np.int32)}
    got = library.run_attention(cache=pool.cache, **again, **constants, **heads.keywords())
    np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(pool.cache, before)


def test_half_precision_conversions_are_exact(isa_library: KernelLibrary) -> None:
    """Every fp16 and bf16 value but NaN, written from float32 and read back by a one-token step."""
    heads = Heads(num_heads=1, num_kv_heads=1, head_dim=128, rotary_dim=0)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        every = np.arange(2**16, dtype=np.uint32).astype(np.uint16).view(dtype)
        wide = np.nan_to_num(every.astype(np.float32), nan=1.0)
        for values in (wide, np.nextafter(wide, np.float32(0))):
            rows = values.reshape(-1, 128)
            qkv = np.zeros((len(rows), 3 * 128), np.float32)
            qkv[:, 256:] = rows
            cache = np.zeros((len(rows), 2, 1, 1, 128), dtype)
            table = np.arange(len(rows), dtype=np.int32)[:, None]
            inputs = step([row[None] for row in qkv], [0] * len(rows), table, 1)
            got = isa_library.run_attention(cache=cache, **inputs, **heads.keywords())
            with np.errstate(over="ignore"):
                wanted = rows.astype(dtype)
            np.testing.assert_array_equal(cache[:, 1, 0, 0].view(np.uint16), wanted.view(np.uint16))
            finite = np.isfinite(wanted.astype(np.float32)).all(axis=1)
            np.testing.assert_array_equal(got[finite], wanted.astype(np.float32)[finite])
