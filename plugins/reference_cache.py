"""What the codes of a quantised cache mean, in float64: encode on write, decode on read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

GROUP = 32  # values of an INT4 row that share a scale and a minimum
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def channel_scales(scales: NDArray[Any] | None, heads: int, dim: int) -> Array:
    """cache_scales [2, Hkv] or [2, Hkv, D] as [2, Hkv, D]; ones where there are none."""
    if scales is None:
        return np.ones((2, heads, dim))
    wide: Array = scales.astype(np.float64)
    return np.repeat(wide[:, :, None], dim, axis=2) if wide.ndim == 2 else wide


def encode(values: Array, scales: Array, dtype: np.dtype[Any], offsets: Array | None = None) -> NDArray[Any]:
    """Stored elements of values [..., D]: floats as they are, INT4 rows, or 8 bits of value / scale.

    8 bits round to the nearest, ties to even, and saturate; NaN is NaN in E4M3 and 0 in int8.
    """
    if dtype == np.uint8:
        return encode_int4(values, offsets)
    if dtype.name not in LARGEST:
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    codes = np.clip(values / scales, -LARGEST[dtype.name], LARGEST[dtype.name])
    if dtype.name == "int8":
        codes = np.nan_to_num(np.rint(codes), nan=0.0)
    return codes.astype(dtype)


def decode(stored: NDArray[Any], scales: Array, offsets: Array | None = None) -> Array:
    """Values of stored elements [..., D]."""
    if stored.dtype == np.uint8:
        return decode_int4(stored, offsets)
    values: Array = stored.astype(np.float64)
    return values * scales if stored.dtype.name in LARGEST else values


def encode_int4(values: Array, offsets: Array | None = None) -> NDArray[np.uint8]:
    """INT4 rows [..., D/2 + D/8] of values [..., D] (include/enginebay/paged_attention.h).

    `offsets`, of a shape that broadcasts to the values': taken off where a group spans less without them.
    """
    groups = values.reshape(*values.shape[:-1], -1, GROUP)
    bounded = np.clip(groups, -65504, 65504)
    moved = np.zeros(groups.shape[:-1], bool)
    if offsets is not None:
        without = np.clip((values - offsets).reshape(groups.shape), -65504, 65504)
        moved = np.ptp(without, axis=-1) < np.ptp(bounded, axis=-1)
        bounded = np.where(moved[..., None], without, bounded)
    low = bounded.min(axis=-1)
    factors = np.stack([(bounded.max(axis=-1) - low) / 15, low], axis=-1).astype(np.float16)
    factors[~np.isfinite(groups).all(axis=-1)] = np.nan
    scale, minimum = (factors[..., i, None].astype(np.float64) for i in range(2))
    with np.errstate(invalid="ignore", divide="ignore"):
        codes = np.where(scale > 0, np.rint((bounded - minimum) / scale), 0)
    codes = np.clip(np.nan_to_num(codes), 0, 15).astype(np.uint8)
    factors[..., 0] = np.where(moved, -factors[..., 0], factors[..., 0])
    pairs = codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4
    rows = [part.reshape(*values.shape[:-1], -1) for part in (pairs, factors.view(np.uint8))]
    return np.concatenate(rows, axis=-1)


def decode_int4(rows: NDArray[np.uint8], offsets: Array | None = None) -> Array:
    """Values [..., D] of INT4 rows [..., D/2 + D/8]."""
    groups = rows.shape[-1] // (GROUP // 2 + 4)
    pairs = rows[..., : groups * GROUP // 2].reshape(*rows.shape[:-1], groups, GROUP // 2)
    codes = np.concatenate([pairs & 15, pairs >> 4], axis=-1).astype(np.float64)
    factors = np.ascontiguousarray(rows[..., groups * GROUP // 2 :]).view(np.float16).astype(np.float64)
    factors = factors.reshape(*rows.shape[:-1], groups, 2)
    values: Array = (np.abs(factors[..., :1]) * codes + factors[..., 1:]).reshape(*rows.shape[:-1], -1)
    if offsets is None:
        return values
    values += offsets * np.repeat(np.signbit(factors[..., 0]), GROUP, axis=-1)
    return values


def cache_convert(
    source: NDArray[Any],
    destination: NDArray[Any],
    pairs: NDArray[np.int32],
    cache_scales: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """CacheConvert: the destination after blocks pairs[:, 0] of the source became its blocks pairs[:, 1]."""
    scales = channel_scales(cache_scales, source.shape[3], source.shape[4])[:, None]  # [2, 1, Hkv, D]
    after = destination.copy()
    for block, into in pairs:
        after[into] = encode(decode(source[block], scales), scales, destination.dtype)
    return after
