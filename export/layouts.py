"""How weights lie in checkpoints and how they become rows [out, in] of the sidecar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from enginebay.export.checkpoint import ITEM_BYTES, TensorInfo
from enginebay.export.errors import CheckpointError
from enginebay.export.pieces import CHUNK_BYTES, Computed, Piece, read_range, rows, whole
from enginebay.export.roles import Role, Shape

FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Laid:
    """The pieces of an initializer, and its dtype."""

    pieces: tuple[Piece, ...]
    dtype: str


@dataclass(frozen=True)
class Layout:
    """`shapes(role, count)`: what each of `count` tensors must be; `lay(role, tensors)`: the bytes as the
    graph wants them.

    `dtypes`: what each tensor may be, the last for all that follow.
    """

    shapes: Callable[[Role, int], list[Shape]]
    lay: Callable[[Role, Sequence[TensorInfo]], Laid]
    dtypes: tuple[tuple[str, ...], ...] = (FLOATS,)


def to_float32(data: bytes, dtype: str) -> NDArray[np.float32]:
    """F32, F16 or BF16 bytes as float32 [elements]."""
    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, {"F32": np.float32, "F16": np.float16}[dtype]).astype(np.float32)


def _row_shapes(role: Role, count: int) -> list[Shape]:
    """One tensor for all, one for each part, or one for each part of each expert."""
    if count == 1:
        return [role.shape]
    return list(role.parts) * (role.experts or 1) if len(role.parts) > 1 else [role.fused] * role.experts


def _transposed_shapes(role: Role, count: int) -> list[Shape]:
    return [(*shape[:-2], shape[-1], shape[-2]) for shape in _row_shapes(role, count)]


def _rows(_role: Role, sources: Sequence[TensorInfo]) -> Laid:
    return Laid(tuple(whole(source) for source in sources), sources[0].dtype)


def _plus_one(_role: Role, sources: Sequence[TensorInfo]) -> Laid:
    def chunks() -> Iterator[bytes]:
        for source in sources:
            for data in read_range(source, 0, source.nbytes):
                yield (to_float32(data, source.dtype) + np.float32(1.0)).tobytes()

    return Laid((Computed(chunks),), "F32")


def _head_qkv(role: Role, sources: Sequence[TensorInfo]) -> Laid:
    """Rows [head, (q, k, v), head_dim] to q, k, v; every head has its own key and value."""
    (source,) = sources
    dim = role.head_dim
    pieces = tuple(
        rows(source, (head * 3 + part) * dim, (head * 3 + part + 1) * dim)
        for part in range(3)
        for head in range(role.parts[0][0] // dim)
    )
    return Laid(pieces, source.dtype)


def _transposed(_role: Role, sources: Sequence[TensorInfo], ways: int = 1) -> Laid:
    """[..., in, out] to rows; with `ways` 2, rows that alternate between two parts are sorted by part."""
    return Laid(tuple(Computed(partial(_transpose, source, ways)) for source in sources), sources[0].dtype)


def _transpose(source: TensorInfo, ways: int) -> Iterator[bytes]:
    """Blocks of rows of the transpose, read through maps of the file."""
    item = {1: np.uint8, 2: np.uint16, 4: np.uint32}[ITEM_BYTES[source.dtype]]
    if source.offset + source.nbytes > source.path.stat().st_size:
        raise CheckpointError(f"{source.path} ends inside '{source.name}'")
    columns, row_count = source.shape[-2:]
    shape = (source.nbytes // (ITEM_BYTES[source.dtype] * columns * row_count), columns, row_count)
    step = max(1, CHUNK_BYTES // (columns * ITEM_BYTES[source.dtype])) * ways
    for stack in range(shape[0]):
        for way in range(ways):
            for start in range(way, row_count, step):
                # A map for each block: pages read for one do not stay counted against the process.
                tensor = np.memmap(source.path, item, "r", source.offset, shape)
                yield np.ascontiguousarray(tensor[stack, :, start : start + step : ways].T).tobytes()
                del tensor


def _alternating(role: Role, sources: Sequence[TensorInfo]) -> Laid:
    """Rows [expert, 2I, ...] that alternate between gate and up, sorted into gate, then up."""
    (source,) = sources
    count = role.fused[0]
    return Laid((Computed(partial(_sort_rows, source, role.experts, count)),), source.dtype)


def _sort_rows(source: TensorInfo, experts: int, count: int) -> Iterator[bytes]:
    for expert in range(experts):
        size = source.nbytes // experts
        data = b"".join(read_range(source, expert * size, (expert + 1) * size))
        table = np.frombuffer(data, np.uint8).reshape(count, -1)
        yield np.concatenate([table[0::2], table[1::2]]).tobytes()


# FP4 (E2M1) values by code, as their bfloat16 bit patterns' upper halves of float32.
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_MX_BLOCK = 32


def _mxfp4_shapes(role: Role, _count: int) -> list[Shape]:
    experts, count, columns = role.shape
    if columns % _MX_BLOCK:
        raise CheckpointError(
            f"{role.name}: MXFP4 needs rows of a multiple of {_MX_BLOCK}, they have {columns}"
        )
    blocks = columns // _MX_BLOCK
    return [(experts, count, blocks, _MX_BLOCK // 2), (experts, count, blocks)]


def _mxfp4(role: Role, sources: Sequence[TensorInfo], ways: int = 1) -> Laid:
    """Blocks of 32 FP4 values with a shared power of two to bfloat16, which holds them exactly."""
    values, scales = sources
    return Laid((Computed(partial(_expand_mxfp4, values, scales, role.experts, ways)),), "BF16")


def _expand_mxfp4(values: TensorInfo, scales: TensorInfo, experts: int, ways: int) -> Iterator[bytes]:
    count, blocks = values.shape[1], values.shape[2]
    for expert in range(experts):
        exponents = _read(scales, experts, expert).reshape(count, blocks).astype(np.int32) - 127
        codes = _read(values, experts, expert).reshape(count, blocks, _MX_BLOCK // 2)
        for way in range(ways):
            step = max(1, CHUNK_BYTES // (blocks * _MX_BLOCK * 4)) * ways
            for start in range(way, count, step):
                chosen = slice(start, start + step, ways)
                pairs = np.stack([codes[chosen] & 15, codes[chosen] >> 4], axis=-1)
                numbers = _FP4[pairs.reshape(*pairs.shape[:2], _MX_BLOCK)]
                exact = np.ldexp(numbers, exponents[chosen][..., None]).astype(np.float32)
                yield (exact.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def _read(tensor: TensorInfo, parts: int, index: int) -> NDArray[np.uint8]:
    size = tensor.nbytes // parts
    return np.frombuffer(b"".join(read_range(tensor, index * size, (index + 1) * size)), np.uint8)


LAYOUTS: dict[str, Layout] = {
    "rows": Layout(_row_shapes, _rows),
    "plus_one": Layout(_row_shapes, _plus_one),
    "head_qkv": Layout(_row_shapes, _head_qkv),
    "transposed": Layout(_transposed_shapes, _transposed),
    "alternating": Layout(_row_shapes, _alternating),
    "transposed_alternating": Layout(_transposed_shapes, partial(_transposed, ways=2)),
    "mxfp4": Layout(_mxfp4_shapes, _mxfp4, (("U8",),)),
    "mxfp4_alternating": Layout(_mxfp4_shapes, partial(_mxfp4, ways=2), (("U8",),)),
}
