"""Round-to-nearest block quantisation, in numpy, a few rows at a time.

Scales and minimums are rounded to half precision's 11 significant bits first, and the weights to the grid
they then span: a kernel that stores 16-bit scales multiplies by exactly what was fitted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn
from numpy.typing import NDArray

from enginebay.builder.quant.formats import QuantizationError, WeightFormat

Float32 = NDArray[np.float32]

I8_MAX = 127
F8_SCALES = 8
F8_MAX = 448.0  # of E4M3; beyond it a cast gives NaN
I4_LEVELS = 15
I4_CENTRE = 8
WEIGHT_MAX = 2.0**126  # beyond it the span of a block, or rounding its scale, may overflow float32
TINY = np.finfo(np.float32).tiny
HALF_MAX = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of a quantised N x K matrix.

    values    [n, K]: the float kinds: that dtype; f8: float8_e4m3fn; i8: int8; i4: uint8, a value 0..15 each
    scales    float32 [n, K/block], None for the float kinds
    minimums  float32 [n, K/block], only for asymmetric i4
    """

    format: WeightFormat
    values: NDArray[np.generic]
    scales: Float32 | None = None
    minimums: Float32 | None = None


def quantize_rows(weights: Float32, fmt: WeightFormat, name: str, first_row: int = 0) -> QuantizedRows:
    """Rows `weights` [n, K] of tensor `name` in `fmt`, each value rounded to the nearest grid point.

    Raises QuantizationError naming tensor and row for NaN and infinity and for a value that the format's
    dtype cannot hold, and for a block size that does not divide K.
    """
    check_finite(weights, name, first_row)
    if fmt.kind == "f32":
        return QuantizedRows(fmt, weights)
    if fmt.kind == "f16":
        _check_half_range(weights, name, first_row)
        return QuantizedRows(fmt, weights.astype(np.float16))
    if fmt.kind == "bf16":
        return QuantizedRows(fmt, weights.astype(bfloat16))
    blocks = split_blocks(weights, fmt)
    scales, minimums = grid(blocks, fmt)
    values = round_to_grid(blocks, fmt, scales, minimums)
    return QuantizedRows(fmt, values.reshape(weights.shape), scales, minimums)


def dequantize_rows(rows: QuantizedRows) -> Float32:
    """float32 [n, K]: what the values stand for."""
    if rows.format.is_float:
        return rows.values.astype(np.float32)
    assert rows.scales is not None
    blocks = split_blocks(rows.values.astype(np.float32), rows.format)
    if rows.format.kind == "i4" and rows.format.symmetric:
        blocks -= I4_CENTRE
    blocks *= rows.scales[:, :, None]
    if rows.minimums is not None:
        blocks += rows.minimums[:, :, None]
    return blocks.reshape(rows.values.shape)


def split_blocks(weights: Float32, fmt: WeightFormat) -> Float32:
    """[n, K] as [n, K/block, block]."""
    n, k = weights.shape
    block = fmt.scale_block(k)
    return weights.reshape(n, k // block, block)


def grid(blocks: Float32, fmt: WeightFormat) -> tuple[Float32, Float32 | None]:
    """Scales and, for asymmetric i4, minimums [n, blocks] of the smallest grid that reaches every weight.

    Symmetric i4 reaches -8 and +7 steps: the end that asks for the larger scale decides. A constant block
    gets scale 1: no scale is ever 0, and zeros come back as zeros.
    """
    low, high = blocks.min(axis=2), blocks.max(axis=2)
    if fmt.kind == "f8":
        return _f8_scales(blocks, np.maximum(high, -low)), None
    if fmt.kind == "i8":
        return storable_scales(np.maximum(high, -low) / I8_MAX), None
    if fmt.symmetric:
        return storable_scales(np.maximum(high / (I4_LEVELS - I4_CENTRE), low / -I4_CENTRE)), None
    minimums = eleven_bits(low)
    # Of the span from the minimum as stored, so that the largest weight stays in reach.
    return storable_scales(np.maximum(high - minimums, 0) / I4_LEVELS), minimums


def round_to_grid(
    blocks: Float32, fmt: WeightFormat, scales: Float32, minimums: Float32 | None
) -> NDArray[Any]:
    """[n, blocks, block] values whose grid points are nearest: E4M3 for f8, int8 for i8, uint8 0..15 for
    i4."""
    if fmt.kind == "f8":
        return np.clip(blocks / scales[:, :, None], -F8_MAX, F8_MAX).astype(float8_e4m3fn)
    if minimums is not None:
        blocks = blocks - minimums[:, :, None]
    steps = np.rint(blocks / scales[:, :, None])
    if fmt.kind == "i8":
        return np.clip(steps, -I8_MAX, I8_MAX).astype(np.int8)
    if fmt.symmetric:
        steps += I4_CENTRE
    return np.clip(steps, 0, I4_LEVELS).astype(np.uint8)


def _f8_scales(blocks: Float32, largest: Float32) -> Float32:
    """Scales of E4M3 blocks [n, blocks]: of the F8_SCALES that bring the largest into its top octave, the
    one whose rounding changes the block least. Where in an octave values fall decides how near the grid
    is."""
    base = np.where(largest > 0, np.maximum(largest / np.float32(F8_MAX), TINY), np.float32(1)).astype(
        np.float32
    )
    best, chosen = np.full(base.shape, np.inf, np.float32), base
    fmt = WeightFormat("f8", blocks.shape[2])
    for step in range(F8_SCALES):
        scales = base * np.float32(2 ** (step / F8_SCALES))
        rounded = round_to_grid(blocks, fmt, scales, None).astype(np.float32) * scales[:, :, None]
        lost = np.square((rounded - blocks) / base[:, :, None]).sum(axis=2)
        chosen, best = np.where(lost < best, scales, chosen), np.minimum(lost, best)
    return np.where(largest > 0, chosen, np.float32(1))


def eleven_bits(values: Float32) -> Float32:
    """`values` rounded to the 11 significant bits of half precision, ties to even, with float32's
    exponents; no -0."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x0FFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFFE000)).view(np.float32) + np.float32(0)


def storable_scales(scales: Float32) -> Float32:
    """Scales as a kernel stores them, 1 where the block has no extent."""
    rounded = eleven_bits(scales)
    return np.where(rounded > 0, rounded, np.float32(1))


def check_finite(weights: Float32, name: str, first_row: int) -> None:
    """QuantizationError naming the first NaN, infinity or absurdly large weight of rows `weights` of
    `name`."""
    finite = np.abs(weights) < WEIGHT_MAX  # false for NaN
    if not finite.all():
        row, column = np.argwhere(~finite)[0]
        raise QuantizationError(
            f"tensor {name}: weight [{first_row + row}, {column}] is {weights[row, column]:g}; "
            "a checkpoint with such weights cannot be built"
        )


def _check_half_range(weights: Float32, name: str, first_row: int) -> None:
    outside = np.abs(weights) > HALF_MAX
    if outside.any():
        row, column = np.argwhere(outside)[0]
        raise QuantizationError(
            f"tensor {name}: weight [{first_row + row}, {column}] is {weights[row, column]:g}, beyond "
            f"float16's {HALF_MAX:g}; build this layer as bf16 or f32"
        )
