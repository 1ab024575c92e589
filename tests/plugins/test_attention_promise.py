"""One row, one answer: the bits of a row do not depend on its company, its chunk or the threads."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attention_cases import Heads, Pool, rows_of, step
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from enginebay.plugins import ops
from enginebay.plugins.load import KernelLibrary

HEADS = {
    "gqa": Heads(num_heads=9, num_kv_heads=3, head_dim=64, rotary_dim=64),
    "mha_odd": Heads(num_heads=2, num_kv_heads=2, head_dim=20, rotary_dim=8, qk_norm=True),
    "mqa": Heads(num_heads=12, num_kv_heads=1, head_dim=32, rotary_dim=32, sinks=True),
    "window": Heads(num_heads=4, num_kv_heads=2, head_dim=80, rotary_dim=32, attributes={"window": 90}),
    "softcap": Heads(num_heads=4, num_kv_heads=4, head_dim=128, rotary_dim=0, attributes={"softcap": 5.0}),
}
DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "int8": np.int8,
    "int4": np.uint8,
}


def alone(
    library: KernelLibrary,
    heads: Heads,
    rows: NDArray[np.float32],
    chunks: list[int],
    constants: Any,
    dtype: Any,
) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """A sequence by itself, in chunks; its attention rows and its cache as [tokens, 2, Hkv, D]."""
    rng = np.random.default_rng()
    pool = Pool(heads, rng, block_size=16, dtype=dtype, blocks=-(-len(rows) // 16) + 3)
    table = pool.table([len(rows)], -(-len(rows) // 16) + 1)
    outputs, start = [], 0
    for chunk in chunks:
        now = step([rows[start : start + chunk]], [start], table, 16)
        outputs.append(library.run_attention(cache=pool.cache, **now, **constants, **heads.keywords()))
        start += chunk
    assert start == len(rows)
    written = pool.cache[table[0, : -(-len(rows) // 16)]].swapaxes(1, 2).reshape(-1, 2, *pool.cache.shape[3:])
    return np.concatenate(outputs), written[: len(rows)]


def partition(draw: st.DrawFn, total: int) -> list[int]:
    """Chunks that add up to `total`: single tokens and long runs alike."""
    chunks = []
    while total:
        chunk = draw(st.one_of(st.just(1), st.integers(1, total), st.integers(1, min(total, 20))))
        chunks.append(chunk)
        total -= chunk
        if len(chunks) > 12 and total:
            chunks.append(total)
            total = 0
    return chunks


@st.composite
def schedules(draw: st.DrawFn) -> tuple[str, str, list[list[int]], int]:
    """Heads, cache dtype, the chunks of some sequences, threads."""
    lengths = draw(st.lists(st.integers(1, 200), min_size=1, max_size=4))
    if draw(st.booleans()):
        lengths.append(draw(st.integers(500, 1100)))
    chunks = [partition(draw, length) for length in lengths]
    return (
        draw(st.sampled_from(sorted(HEADS))),
        draw(st.sampled_from(sorted(DTYPES))),
        chunks,
        draw(st.integers(1, 3)),
    )


@settings(max_examples=40, deadline=None)
@given(schedules())
def test_any_schedule_gives_the_same_bits(schedule: tuple[str, str, list[list[int]], int]) -> None:
    """Sequences in one batch, each chunked in its own way, against each alone and whole on one thread."""
    name, dtype_name, all_chunks, threads = schedule
    assume(dtype_name != "int4" or HEADS[name].head_dim % ops.INT4_CACHE_GROUP == 0)
    heads, dtype = HEADS[name], DTYPES[dtype_name]
    rng = np.random.default_rng(len(all_chunks))
    constants = heads.constants(rng)
    if np.dtype(dtype).name in ("int8", "float8_e4m3fn"):
        constants["cache_scales"] = rng.uniform(0.01, 0.02, (2, heads.num_kv_heads)).astype(np.float32)
    prompts = [rows_of(rng, heads, sum(chunks)) for chunks in all_chunks]
    one = KernelLibrary()
    wanted = [alone(one, heads, rows, [len(rows)], constants, dtype)[0] for rows in prompts]

    library = KernelLibrary(threads=threads)
    lengths = [len(rows) for rows in prompts]
    pool = Pool(heads, rng, block_size=16, dtype=dtype, blocks=sum(-(-n // 16) for n in lengths))
    table = pool.table(lengths, -(-max(lengths) // 16) + 1)
    starts = [0] * len(prompts)
    for turn in range(max(map(len, all_chunks))):
        counts = [chunks[turn] if turn < len(chunks) else 0 for chunks in all_chunks]
        parts = [rows[s : s + c] for rows, s, c in zip(prompts, starts, counts, strict=True)]
        now = step(parts, starts, table, 16, padding=turn % 3)
        got = library.run_attention(cache=pool.cache, **now, **constants, **heads.keywords())
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            rows = got[now["query_start"][b] : now["query_start"][b + 1]]
            np.testing.assert_array_equal(rows, wanted[b][start : start + count], f"sequence {b} at {start}")
        starts = [s + c for s, c in zip(starts, counts, strict=True)]


@pytest.mark.parametrize("name", HEADS)
def test_decode_equals_prefill_on_every_instruction_set(isa_library: KernelLibrary, name: str) -> None:
    """Token by token against all at once: the two inner loops add in one order."""
    heads = HEADS[name]
    rng = np.random.default_rng()
    constants = heads.constants(rng)
    rows = rows_of(rng, heads, 150)
    for dtype_name, dtype in DTYPES.items():
        if dtype_name == "int4" and heads.head_dim % ops.INT4_CACHE_GROUP:
            continue
        whole, cache = alone(isa_library, heads, rows, [150], constants, dtype)
        steps, stepped_cache = alone(isa_library, heads, rows, [1] * 150, constants, dtype)
        np.testing.assert_array_equal(steps, whole)
        np.testing.assert_array_equal(stepped_cache.view(np.uint8), cache.view(np.uint8))


def test_threads_share_a_long_decode() -> None:
    """One token over 8,000: cut along the cache for two threads, whole for one."""
    heads = HEADS["gqa"]
    rng = np.random.default_rng()
    constants = {**heads.constants(rng)}
    for name in ("rope_cos", "rope_sin"):
        constants[name] = np.tile(constants[name], (2, 1))
    pool = Pool(heads, rng, block_size=16, blocks=501)
    pool.cache[:] = rng.normal(size=pool.cache.shape)
    table = pool.table([8000], 500)
    now = step([rows_of(rng, heads, 1)], [7999], table, 16)
    answers = [
        KernelLibrary(threads=threads).run_attention(cache=pool.cache, **now, **constants, **heads.keywords())
        for threads in (1, 2, 3)
    ]
    np.testing.assert_array_equal(answers[0], answers[1])
    np.testing.assert_array_equal(answers[0], answers[2])


def test_a_broken_sequence_breaks_itself_alone(library: KernelLibrary) -> None:
    """NaN and infinity in one sequence's rows leave its neighbours' bits as they were."""
    heads = HEADS["gqa"]
    rng = np.random.default_rng()
    constants = heads.constants(rng)
    parts = [rows_of(rng, heads, 40) for _ in range(3)]

    def run(middle: NDArray[np.float32]) -> NDArray[np.float32]:
        pool = Pool(heads, np.random.default_rng(1), block_size=16)
        table = pool.table([40] * 3, 3)
        now = step([parts[0], middle, parts[2]], [0] * 3, table, 16)
        return library.run_attention(cache=pool.cache, **now, **constants, **heads.keywords())

    broken = parts[1].copy()
    broken[10] = np.nan
    broken[20, 0] = np.inf
    healthy, sick = run(parts[1]), run(broken)
    np.testing.assert_array_equal(sick[:40], healthy[:40])
    np.testing.assert_array_equal(sick[80:], healthy[80:])
    assert np.isnan(sick[50:80]).any(), "NaN is shown, not hidden"
