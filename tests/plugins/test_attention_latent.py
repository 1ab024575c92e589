"""PagedAttention with a latent cache (multi-head latent attention) against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_cases import step
from numpy.typing import NDArray

from enginebay.plugins import reference
from enginebay.plugins.load import KernelLibrary, PluginError

HEADS, LATENT, ROTARY, BLOCK, BLOCKS = 5, 40, 12, 8, 200
WIDTH = LATENT + ROTARY


class Latents:
    """A pool, and steps over it that both sides run."""

    def __init__(self, dtype: str = "float32", rotary: int = ROTARY, interleaved: bool = True) -> None:
        self.rng = np.random.default_rng()
        self.width = LATENT + rotary
        self.cache = np.full((BLOCKS, BLOCK, self.width), np.nan, np.float32)
        self.cache = (np.nan_to_num(self.cache) if dtype == "int8" else self.cache).astype(dtype)
        angles = self.rng.uniform(-3, 3, (700, rotary // 2))
        self.attributes: dict[str, Any] = {
            "num_heads": HEADS,
            "num_kv_heads": 1,
            "head_dim": self.width,
            "latent_dim": LATENT,
            "scale": 0.17,
            "rope_interleaved": interleaved,
        }
        self.tables = {
            "rope_cos": np.cos(angles).astype(np.float32),
            "rope_sin": np.sin(angles).astype(np.float32),
        }
        if dtype in ("int8", "float8_e4m3fn"):
            largest = 127 if dtype == "int8" else 448
            scales = self.rng.uniform(4, 5, (1, 1, self.width)).astype(np.float32)
            self.tables["cache_scales"] = scales / largest
        self.free = list(self.rng.permutation(BLOCKS))

    def rows(self, count: int) -> NDArray[np.float32]:
        return self.rng.normal(size=(count, (HEADS + 1) * self.width)).astype(np.float32)

    def check(self, library: KernelLibrary, inputs: dict[str, Any], tolerance: float) -> NDArray[np.float32]:
        wide = {
            key: value.astype(np.float64) if value.dtype == np.float32 else value
            for key, value in inputs.items()
        }
        expected, cache = reference.paged_attention(
            cache=self.cache, **wide, **self.tables, **self.attributes
        )
        actual = library.run_attention(cache=self.cache, **inputs, **self.tables, **self.attributes)
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)
        written = ~np.isnan(cache.astype(np.float32))
        assert written.any()
        # A value beside a rounding boundary may take the next 8-bit code.
        rtol, atol = {"int8": (0, 1), "float8_e4m3fn": (0.13, 2e-3)}.get(cache.dtype.name, (1e-2, 1e-6))
        np.testing.assert_allclose(
            self.cache.astype(np.float32)[written], cache.astype(np.float32)[written], rtol=rtol, atol=atol
        )
        return actual


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 2e-6), ("float16", 2e-3), ("int8", 1e-2), ("float8_e4m3fn", 6e-2)]
)
def test_prefill_chunks_and_decode(
    isa_library: KernelLibrary, dtype: str, tolerance: float, interleaved: bool
) -> None:
    pool = Latents(dtype, interleaved=interleaved)
    table = np.array([[pool.free.pop() for _ in range(12)] for _ in range(3)], np.int32)
    starts = [0, 0, 0]
    for counts in ([70, 1, 9], [1, 5, 1], [3, 1, 20], [1, 1, 1]):
        rows = [pool.rows(count) for count in counts]
        inputs = step(rows, starts, table, BLOCK, padding=2)
        actual = pool.check(isa_library, inputs, tolerance)
        assert actual.shape == (sum(counts) + 2, HEADS * LATENT)
        assert not actual[sum(counts) :].any()
        starts = [start + count for start, count in zip(starts, counts, strict=True)]


def test_a_row_does_not_depend_on_its_company() -> None:
    alone, shared = KernelLibrary(), KernelLibrary(threads=3)
    pool = Latents()
    table = np.array([[pool.free.pop() for _ in range(80)] for _ in range(2)], np.int32)
    rows = [pool.rows(600), pool.rows(33)]
    together = shared.run_attention(
        cache=pool.cache, **step(rows, [0, 0], table, BLOCK), **pool.tables, **pool.attributes
    )
    for first in range(0, 600, 150):
        part = step([rows[0][first : first + 150]], [first], table[:1], BLOCK)
        chunk = alone.run_attention(cache=pool.cache, **part, **pool.tables, **pool.attributes)
        np.testing.assert_array_equal(chunk, together[first : first + 150])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_kv_heads": 5}, "num_kv_heads 5 with latent_dim 40"),
        ({"latent_dim": 39}, "latent_dim 39 and rotary_dim 12 do not make up head_dim 52"),
        ({"latent_dim": 52}, "latent_dim is 52, expected 0 to 51"),
    ],
)
def test_refusals(library: KernelLibrary, changes: dict[str, Any], words: str) -> None:
    pool = Latents()
    table = np.array([[0, 1]], np.int32)
    inputs = step([pool.rows(2)], [0], table, BLOCK)
    with pytest.raises(PluginError, match=words):
        library.run_attention(cache=pool.cache, **inputs, **pool.tables, **{**pool.attributes, **changes})
