"""What the codes of a quantised cache mean, in float64: encode on write, decode on read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def channel_scales(scales: NDArray[Any] | None, heads: int, dim: int) -> Array:
    """cache_scales [2, Hkv] or [2, Hkv, D] as [2, Hkv, D]; ones where there are none."""
    if scales is None:
        return np.ones((2, heads, dim))
    wide: Array = scales.astype(np.float64)
    return np.repeat(wide[:, :, None], dim, axis=2) if wide.ndim == 2 else wide


def encode(values: Array, scales: Array, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Stored elements of values [..., D]: floats as they are, 8 bits of value / scale.

    8 bits round to the nearest, ties to even, and saturate; NaN is NaN in E4M3 and 0 in int8.
    """
    if dtype.name not in LARGEST:
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    codes = np.clip(values / scales, -LARGEST[dtype.name], LARGEST[dtype.name])
    if dtype.name == "int8":
        codes = np.nan_to_num(np.rint(codes), nan=0.0)
    return codes.astype(dtype)


def decode(stored: NDArray[Any], scales: Array) -> Array:
    """Values of stored elements [..., D]."""
    values: Array = stored.astype(np.float64)
    return values * scales if stored.dtype.name in LARGEST else values
