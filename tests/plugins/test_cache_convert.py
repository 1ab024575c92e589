"""CacheConvert: blocks that move to a pool of narrower elements."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from enginebay.plugins import load, load_cache, ops
from enginebay.plugins.load import KernelLibrary, PluginError
from enginebay.plugins.load_cache import convert_cache
from enginebay.plugins.reference_cache import cache_convert, decode, decode_int4

BLOCK, HEADS = 16, 3
SOURCES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int8": np.int8,
}


def pools(
    rng: np.random.Generator, source: str, destination: str, dim: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int32]]:
    """A filled source of 9 blocks, a poisoned destination of 7, and 4 pairs."""
    values = rng.normal(size=(9, 2, BLOCK, HEADS, dim))
    from_pool = np.rint(values * 40).clip(-127, 127) if source == "int8" else values
    row = ops.int4_cache_row_bytes(dim) if destination == "int4" else dim
    into = np.full((7, 2, BLOCK, HEADS, row), 0x7E, np.uint8 if destination == "int4" else np.int8)
    pairs = np.stack([rng.permutation(9)[:4], rng.permutation(7)[:4]], axis=1).astype(np.int32)
    return from_pool.astype(SOURCES[source]), into, pairs


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("dim", [64, 96])
@pytest.mark.parametrize(
    ("source", "destination"),
    [(s, d) for s in SOURCES for d in ("int8", "int4") if (s, d) != ("int8", "int8")],
)
def test_equals_reference(
    isa_library: KernelLibrary, source: str, destination: str, dim: int, channels: bool
) -> None:
    rng = np.random.default_rng()
    from_pool, into, pairs = pools(rng, source, destination, dim)
    scales = None
    if "int8" in (source, destination):
        scales = rng.uniform(0.02, 0.03, (2, HEADS, dim) if channels else (2, HEADS)).astype(np.float32)
    wanted = cache_convert(from_pool, into, pairs, scales)
    before = from_pool.copy()
    convert_cache(isa_library, from_pool, into, pairs, scales)
    np.testing.assert_array_equal(from_pool.view(np.uint8), before.view(np.uint8), "the source is read only")
    untouched = np.setdiff1d(np.arange(7), pairs[:, 1])
    assert (into[untouched] == 0x7E).all()
    if destination == "int8":
        # float32 division and float64's part only at a rounding boundary.
        different = into.astype(int) - wanted.astype(int)
        assert np.abs(different).max() <= 1
        assert np.count_nonzero(different) < 1e-3 * different.size
        return
    got = decode_int4(into[pairs[:, 1]])
    error = np.abs(got - decode_int4(wanted[pairs[:, 1]]))
    assert np.mean(error > 2e-3) < 2e-3, "a value may take the next code, a factor the next fp16"
    whole = decode(from_pool, np.ones(dim) if scales is None else expanded(scales, dim))[pairs[:, 0]]
    assert np.abs(got - whole).max() < 0.3


def expanded(scales: NDArray[np.float32], dim: int) -> NDArray[np.float64]:
    wide = scales if scales.ndim == 3 else np.repeat(scales[:, :, None], dim, axis=2)
    return wide[:, None].astype(np.float64)


def test_threads_change_nothing() -> None:
    rng = np.random.default_rng()
    from_pool, into, pairs = pools(rng, "float16", "int4", 64)
    other = into.copy()
    convert_cache(KernelLibrary(), from_pool, into, pairs)
    convert_cache(KernelLibrary(threads=3), from_pool, other, pairs)
    np.testing.assert_array_equal(into, other)


def test_no_pairs(library: KernelLibrary) -> None:
    from_pool, into, pairs = pools(np.random.default_rng(), "float32", "int8", 64)
    convert_cache(library, from_pool, into, pairs[:0], np.ones((2, HEADS), np.float32))
    assert (into == 0x7E).all()


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([[9, 0]], r"pairs\[0\] names source block 9; there are 9"),
        ([[0, 0], [-1, 1]], r"pairs\[1\] names source block -1"),
        ([[0, 7]], r"pairs\[0\] names destination block 7; there are 7"),
        ([[0, 2], [1, 3], [2, 2]], "destination block 2 is in two pairs"),
        ([[0, 0]] * 8, "8 pairs; the destination has 7 blocks"),
    ],
)
def test_wrong_pairs(library: KernelLibrary, pairs: list[list[int]], words: str) -> None:
    from_pool, into, _ = pools(np.random.default_rng(), "float16", "int8", 64)
    with pytest.raises(PluginError, match=words):
        convert_cache(library, from_pool, into, np.array(pairs, np.int32))
    assert (into == 0x7E).all(), "nothing was written"


def test_refusals(library: KernelLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    from_pool, into, pairs = pools(np.random.default_rng(), "float16", "int8", 64)

    def refused(words: str, *arguments: Any) -> None:
        with pytest.raises(PluginError, match=words):
            convert_cache(library, *arguments)

    scales = np.ones((2, HEADS), np.float32)
    refused("from int8 to int8; it goes from", into, into.copy(), pairs)
    refused("cache_scales of keys of key head 0, channel 0 is 0", from_pool, into, pairs, 0 * scales)
    refused("from float8e4m3 to int8", from_pool.astype(ml_dtypes.float8_e4m3fn), into, pairs)
    refused(r"blocks of .* float16 do not become blocks of .* int8", from_pool[:, :, :8], into, pairs)
    refused(r"pairs are int64 \[4, 2\], not int32", from_pool, into, pairs.astype(np.int64))
    refused(r"cache_scales are float32 \[1, 3\]", from_pool, into, pairs, scales[:1])
    refused(
        "cache_scale_dim is 5, expected 1 or head_dim 64", from_pool, into, pairs, np.ones((2, 3, 5), "f4")
    )
    both = np.zeros((18, 2, BLOCK, HEADS, 64), np.int8)
    overlapping = both[:8].view(np.float16).reshape(-1)[: 4 * 2 * BLOCK * HEADS * 64]
    refused("overlap", overlapping.reshape(4, 2, BLOCK, HEADS, 64), both[7:14], pairs[:1] % 4)
    narrow = np.zeros((2, 2, BLOCK, HEADS, 80), np.uint8)
    refused(
        "cache_scales given from float16 to int4", from_pool, narrow[..., :40].copy(), pairs[:1] % 2, scales
    )
    with pytest.raises(ValueError, match="head_dim 48"):
        convert_cache(library, from_pool[..., :48].copy(), narrow, pairs)
    assert (into == 0x7E).all()


@pytest.mark.parametrize(("dtype", "bytes_"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_misaligned_source(library: KernelLibrary, dtype: str, bytes_: int) -> None:
    from_pool, into, pairs = pools(np.random.default_rng(), dtype, "int8", 64)
    room = np.zeros(from_pool.nbytes + 16, np.uint8)
    start = -room.ctypes.data % bytes_ + 1
    moved = room[start : start + from_pool.nbytes].view(from_pool.dtype).reshape(from_pool.shape)
    with pytest.raises(PluginError, match=f"source is 1 bytes past a multiple of {bytes_}"):
        convert_cache(library, moved, into, pairs)
    assert (into == 0x7E).all(), "nothing was written"


def test_pools_beyond_addresses(library: KernelLibrary) -> None:
    """Sizes whose product wraps: refused before a pointer is followed."""
    library.declare(load_cache._SIGNATURES)
    f16, i8 = (load.CACHE_DTYPES[name] for name in ("float16", "int8"))
    desc = load_cache._Desc(1 << 16, 640, 1 << 20, 2**31 - 1, 1, f16, i8, 0)
    room, pairs = np.zeros(16, np.float16), np.zeros((1, 2), np.int32)
    with pytest.raises(PluginError, match=r"source has 2147483647 blocks of .* together 2\^63 or more"):
        library.call(
            *("eb_cache_convert", ctypes.byref(desc), room.ctypes.data, room.ctypes.data + 16),
            *(pairs.ctypes.data, 1, None),
        )


def test_struct_layout_matches_the_header(tmp_path: Path) -> None:
    size = ctypes.sizeof(load_cache._Desc)
    source = tmp_path / "size.c"
    check = f'_Static_assert(sizeof(eb_cache_convert_desc) == {size}, "desc");'
    source.write_text(f'#include "enginebay/cache_convert.h"\n{check}\n')
    include = Path(load.__file__).parent / "include"
    command = ["gcc", "-std=c11", "-fsyntax-only", f"-I{include}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
