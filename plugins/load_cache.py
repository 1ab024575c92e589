"""CacheConvert of a kernel library over numpy arrays: cache blocks into a pool of narrower elements."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginebay.plugins import ops
from enginebay.plugins.load import CACHE_DTYPES, KernelLibrary, PluginError

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "eb_cache_convert": (c_void_p, c_void_p, c_void_p, c_int64, c_void_p),
}


class _Desc(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("num_kv_heads", "head_dim", "block_size", "source_blocks")),
        *((name, c_int32) for name in ("destination_blocks", "source_dtype", "destination_dtype")),
        ("cache_scale_dim", c_int32),
    )


def convert_cache(
    library: KernelLibrary,
    source: NDArray[Any],
    destination: NDArray[Any],
    pairs: NDArray[np.int32],
    cache_scales: NDArray[np.float32] | None = None,
) -> None:
    """Write blocks pairs[:, 0] of `source` into blocks pairs[:, 1] of `destination`, as CacheConvert does.

    source [blocks, 2, block_size, Hkv, D]: float32, float16, bfloat16, or int8 where the destination is INT4.
    destination: int8 of the same block shape, or uint8 with rows of `ops.int4_cache_row_bytes(D)`.
    pairs int32 [N, 2]; cache_scales float32 [2, Hkv] or [2, Hkv, D] of the int8 pool.
    PluginError with the library's words where it refuses, and where the arrays' shapes disagree;
    ValueError where head_dim takes no INT4 rows.
    """
    library.require(["CacheConvert"])
    library.declare(_SIGNATURES)
    _, parts, block_size, heads, dim = source.shape
    row = ops.int4_cache_row_bytes(dim) if destination.dtype == np.uint8 else dim
    if parts != 2 or destination.shape[1:] != (2, block_size, heads, row):
        raise PluginError(
            f"convert_cache: blocks of {list(source.shape[1:])} {source.dtype.name} do not become blocks of "
            f"{list(destination.shape[1:])} {destination.dtype.name}; expected {[2, block_size, heads, row]}"
        )
    if pairs.dtype != np.int32 or pairs.ndim != 2 or pairs.shape[1] != 2:
        raise PluginError(
            f"convert_cache: pairs are {pairs.dtype.name} {list(pairs.shape)}, not int32 [N, 2]"
        )
    channels = 1
    if cache_scales is not None:
        channels = cache_scales.shape[2] if cache_scales.ndim == 3 else 1
        if cache_scales.dtype != np.float32 or cache_scales.shape[:2] != (2, heads):
            raise PluginError(
                f"convert_cache: cache_scales are {cache_scales.dtype.name} {list(cache_scales.shape)}, "
                f"expected float32 [2, {heads}] or [2, {heads}, {dim}]"
            )
    arrays = (
        [source, destination, pairs] if cache_scales is None else [source, destination, pairs, cache_scales]
    )
    if not all(array.flags.c_contiguous for array in arrays):
        raise PluginError("kernels read contiguous arrays; pass numpy.ascontiguousarray of it")
    dtypes = (CACHE_DTYPES[source.dtype.name], CACHE_DTYPES[destination.dtype.name])
    desc = _Desc(heads, dim, block_size, len(source), len(destination), *dtypes, channels)
    scales = None if cache_scales is None else cache_scales.ctypes.data
    library.call(
        *("eb_cache_convert", byref(desc), source.ctypes.data, destination.ctypes.data),
        *(pairs.ctypes.data, len(pairs), scales),
    )
