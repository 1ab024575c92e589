"""GGUF blocks of 32 weights as the sidecar holds them: integers, a scale for each block, and Q4_1's minimum.

Layouts from the GGUF specification (github.com/ggml-org/ggml/blob/master/docs/gguf.md) and ggml's block
structures: d and m are float16; a byte of Q4 holds elements i and i+16 of its block.

    Q4_0  d, 16 bytes     w = d·(q − 8)
    Q4_1  d, m, 16 bytes  w = d·q + m
    Q8_0  d, 32 int8      w = d·q
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from enginebay.export.checkpoint import TensorInfo
from enginebay.export.errors import CheckpointError
from enginebay.export.packed import pack_nibbles
from enginebay.export.pieces import Computed, read_range

BLOCK = 32
ROW_BYTES = {"q4_0": 18, "q4_1": 20, "q8_0": 34}  # of a block
_CHUNK_BYTES = 4 << 20

Bytes = NDArray[np.uint8]
Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class Blocks:
    """values [n, K] uint8 (Q4) or int8; scales and, for Q4_1, minimums float32 [n, K/32]."""

    values: NDArray[np.generic]
    scales: Float32
    minimums: Float32 | None


@dataclass(frozen=True)
class StoredBlocks:
    """Layers joined along their rows. dtype of the values as safetensors would say, shape [N, K]; scales and
    minimums float32 [N, K/32]; `zero`: the value that stands for 0."""

    dtype: str
    shape: tuple[int, int]
    values: tuple[Computed, ...]
    scales: Float32
    minimums: Float32 | None
    zero: int


def unpack_blocks(kind: str, raw: Bytes) -> Blocks:
    """Rows `raw` [n, K/32·ROW_BYTES[kind]]."""
    blocks = raw.reshape(len(raw), -1, ROW_BYTES[kind])

    def halves(at: int) -> Float32:
        return np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[:, :, 0].astype(np.float32)

    start = 4 if kind == "q4_1" else 2
    held = np.ascontiguousarray(blocks[:, :, start:])
    if kind == "q8_0":
        return Blocks(held.view(np.int8).reshape(len(raw), -1), halves(0), None)
    values = np.concatenate([held & 15, held >> 4], axis=2).reshape(len(raw), -1)
    return Blocks(values, halves(0), halves(2) if kind == "q4_1" else None)


def lay_blocks(parts: Sequence[dict[str, TensorInfo]], shapes: Sequence[tuple[int, ...]]) -> StoredBlocks:
    """Layers `parts`, {kind: raw blocks} each, of `shapes` [N, K]. CheckpointError for sizes that do not fit
    and for scales or minimums that are not finite; a scale of 0 is a block without extent, and ggml's Q4_0
    writes negative ones."""
    kinds = {kind for part in parts for kind in part}
    assert len(kinds) == 1, f"the converter keeps {kinds} apart"
    kind = kinds.pop()
    infos = [part[kind] for part in parts]
    scales, minimums = [], []
    for info, (rows, columns) in zip(infos, shapes, strict=True):
        expected = (rows, columns // BLOCK * ROW_BYTES[kind])
        if info.shape != expected or columns % BLOCK:
            raise CheckpointError(
                f"'{info.name}' has rows of {list(info.shape)} bytes, the config calls for {[rows, columns]} "
                f"weights, {list(expected)} bytes"
            )
        read = [unpack_blocks(kind, chunk) for chunk in _chunks(info)]
        scales.append(np.concatenate([blocks.scales for blocks in read]))
        minimums += [blocks.minimums for blocks in read if blocks.minimums is not None]
        _check_finite(scales[-1], info.name, "scale")
    lows = np.concatenate(minimums) if minimums else None
    if lows is not None:
        _check_finite(lows, " and ".join(info.name for info in infos), "minimum")
    return StoredBlocks(
        dtype="I8" if kind == "q8_0" else "U4",
        shape=(sum(rows for rows, _ in shapes), shapes[0][1]),
        values=tuple(Computed(_values_of(kind, info)) for info in infos),
        scales=np.concatenate(scales),
        minimums=lows,
        zero=8 if kind == "q4_0" else 0,
    )


def _values_of(kind: str, info: TensorInfo) -> Callable[[], Iterator[bytes]]:
    def chunks() -> Iterator[bytes]:
        for raw in _chunks(info):
            values = unpack_blocks(kind, raw).values
            yield values.tobytes() if kind == "q8_0" else pack_nibbles(values.astype(np.uint8))

    return chunks


def _chunks(info: TensorInfo) -> Iterator[Bytes]:
    """Whole rows of raw blocks."""
    row = info.shape[1]
    for data in read_range(info, 0, info.nbytes, max(1, _CHUNK_BYTES // row) * row):
        yield np.frombuffer(data, np.uint8).reshape(-1, row)


def _check_finite(numbers: Float32, name: str, what: str) -> None:
    wrong = np.argwhere(~np.isfinite(numbers))
    if len(wrong):
        row, block = (int(i) for i in wrong[0])
        raise CheckpointError(
            f"'{name}': the {what} of row {row}, block {block} is {numbers[row, block]:g}; the file is bad"
        )
