"""Integers packed into words, as GPTQ, AWQ and compressed-tensors lay them, to rows of plain values.

Every function returns what one linear layer stands for: w[n, k] = scale[n, g]·(q[n, k] − zero[n, g]), g the
group of column k. Bits are 4 or 8; words are int32 with the first value in the lowest bits unless said
otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from enginebay.export.errors import CheckpointError

Words = NDArray[np.int32]
Values = NDArray[np.uint8]

# Column 8j+i of a row lies in nibble AWQ_ORDER[i] of word j (AWQ's GEMM kernels).
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class PackedLinear:
    """A quantised linear layer, unsigned.

    values  [N, K] 0..2^bits-1
    scales  float32 [N, groups]
    zeros   [N, groups], the value that stands for 0
    order   int32 [K], or None: column k of `values` multiplies input order[k]; groups are contiguous in
            `values`
    """

    values: Values
    scales: NDArray[np.float32]
    zeros: Values
    order: NDArray[np.int32] | None = None


def unpack_words(words: Words, bits: int, axis: int) -> Values:
    """Words to values along `axis`, 32/bits for each."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    spread = np.moveaxis(words, axis, -1).view(np.uint32) if axis in (-1, words.ndim - 1) else None
    if spread is None:
        spread = np.ascontiguousarray(np.moveaxis(words, axis, -1)).view(np.uint32)
    values = (spread[..., None] >> shifts) & np.uint32(2**bits - 1)
    flat = values.reshape(*spread.shape[:-1], -1).astype(np.uint8)
    return np.moveaxis(flat, -1, axis)


def unpack_gptq(
    qweight: Words,
    qzeros: Words,
    scales: NDArray[np.float32],
    g_idx: NDArray[np.int32] | None,
    *,
    bits: int,
    first: int,
) -> PackedLinear:
    """GPTQ: qweight [K·bits/32, N] along K, qzeros [groups, N·bits/32] along N, scales [groups, N].

    `first` is what a stored zero of 0 means: 1 in format v1, whose writers subtracted 1, and 0 in v2. The
    addition is modulo 2^bits for each value by itself. g_idx [K] is the group of each input.
    """
    values = unpack_words(qweight, bits, 0).T  # [N, K]
    zeros = ((unpack_words(qzeros, bits, 1).astype(np.uint16) + first) % 2**bits).astype(np.uint8).T
    groups, inputs = len(scales), values.shape[1]
    order = None
    if g_idx is not None:
        _check_groups(g_idx, groups, inputs)
        if not np.array_equal(g_idx, np.arange(inputs) // (inputs // groups)):
            order = np.argsort(g_idx, kind="stable").astype(np.int32)
            values = values[:, order]
    return PackedLinear(
        np.ascontiguousarray(values), np.ascontiguousarray(scales.T), np.ascontiguousarray(zeros), order
    )


def unpack_awq(qweight: Words, qzeros: Words, scales: NDArray[np.float32]) -> PackedLinear:
    """AWQ, GEMM layout, 4 bits: qweight [K, N/8], qzeros [groups, N/8], scales [groups, N]; zeros are as
    stored."""
    values = _awq_columns(unpack_words(qweight, 4, 1)).T
    zeros = _awq_columns(unpack_words(qzeros, 4, 1)).T
    return PackedLinear(
        np.ascontiguousarray(values), np.ascontiguousarray(scales.T), np.ascontiguousarray(zeros)
    )


def unpack_rows(
    packed: Words,
    zeros: Words | None,
    scales: NDArray[np.float32],
    g_idx: NDArray[np.int32] | None,
    *,
    columns: int,
    bits: int,
) -> PackedLinear:
    """compressed-tensors pack-quantized: packed [N, ⌈K·bits/32⌉] along K, zeros [⌈N·bits/32⌉, groups] along
    N, scales [N, groups]; without zeros values are offset by half their range."""
    values = unpack_words(packed, bits, 1)[:, :columns]
    rows, groups = scales.shape
    middle = np.full((rows, groups), 2 ** (bits - 1), np.uint8)
    offsets = middle if zeros is None else unpack_words(zeros, bits, 0)[:rows]
    order = None
    if g_idx is not None and not (g_idx < 0).all():  # all -1: no activation order
        _check_groups(g_idx, groups, columns)
        if not np.array_equal(g_idx, np.arange(columns) // (columns // groups)):
            order = np.argsort(g_idx, kind="stable").astype(np.int32)
            values = values[:, order]
    return PackedLinear(np.ascontiguousarray(values), scales, np.ascontiguousarray(offsets), order)


def pack_nibbles(values: Values) -> bytes:
    """Values 0..15 as ONNX's UINT4: two a byte, the first in the low bits."""
    flat = values.reshape(-1)
    assert flat.size % 2 == 0
    return (flat[0::2] | (flat[1::2] << 4)).tobytes()


def check_scales(scales: NDArray[np.float32], name: str) -> None:
    """CheckpointError naming the first scale that is 0, negative or not finite."""
    wrong = ~(np.isfinite(scales) & (scales > 0))
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise CheckpointError(
            f"'{name}' has scale {scales[place]:g} at {list(place)}; scales are positive numbers: the "
            "checkpoint is damaged"
        )


def _awq_columns(naive: Values) -> Values:
    rows, columns = naive.shape
    return naive.reshape(rows, columns // 8, 8)[:, :, AWQ_ORDER].reshape(rows, columns)


def _check_groups(g_idx: NDArray[np.int32], groups: int, inputs: int) -> None:
    counts = np.bincount(g_idx, minlength=groups) if (g_idx >= 0).all() else np.zeros(0, np.int64)
    if len(g_idx) != inputs or len(counts) != groups or (counts != inputs // groups).any():
        raise CheckpointError(
            f"g_idx gives {len(g_idx)} inputs to groups of {sorted(set(counts.tolist()))}; "
            f"{groups} groups of {inputs} inputs must hold {inputs // max(1, groups)} each"
        )
