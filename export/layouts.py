"""How weights that are not plain rows in the checkpoint become rows [out, in] of the sidecar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from enginebay.export.checkpoint import ITEM_BYTES, TensorInfo
from enginebay.export.errors import CheckpointError
from enginebay.export.pieces import CHUNK_BYTES, Computed, Piece, read_range, rows, whole
from enginebay.export.roles import Role


@dataclass(frozen=True)
class Laid:
    """The pieces of an initializer, and its dtype where it is not the checkpoint's."""

    pieces: tuple[Piece, ...]
    dtype: str | None = None


def to_float32(data: bytes, dtype: str) -> NDArray[np.float32]:
    """F32, F16 or BF16 bytes as float32 [elements]."""
    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, {"F32": np.float32, "F16": np.float16}[dtype]).astype(np.float32)


def _plain(_role: Role, sources: Sequence[TensorInfo]) -> Laid:
    return Laid(tuple(whole(source) for source in sources))


def _plus_one(_role: Role, sources: Sequence[TensorInfo]) -> Laid:
    def chunks() -> Iterator[bytes]:
        for source in sources:
            for data in read_range(source, 0, source.nbytes):
                yield (to_float32(data, source.dtype) + np.float32(1.0)).tobytes()

    return Laid((Computed(chunks),), "F32")


def _transposed(_role: Role, sources: Sequence[TensorInfo]) -> Laid:
    return Laid(tuple(Computed(partial(_transpose, source)) for source in sources))


def _transpose(source: TensorInfo) -> Iterator[bytes]:
    """Blocks of rows of the transpose of [K, N], read through a map of the file."""
    item = {1: np.uint8, 2: np.uint16, 4: np.uint32}[ITEM_BYTES[source.dtype]]
    if source.offset + source.nbytes > source.path.stat().st_size:
        raise CheckpointError(f"{source.path} ends inside '{source.name}'")
    step = max(1, CHUNK_BYTES * source.shape[1] // max(1, source.nbytes))
    for start in range(0, source.shape[1], step):
        # A map per block: pages read for one block do not stay counted against the process.
        matrix = np.memmap(source.path, item, "r", source.offset, source.shape)
        yield np.ascontiguousarray(matrix[:, start : start + step].T).tobytes()
        del matrix


def _head_qkv(role: Role, sources: Sequence[TensorInfo]) -> Laid:
    """Rows [head, (q, k, v), head_dim] to q, k, v; every head has its own key and value."""
    (source,) = sources
    dim = role.head_dim
    return Laid(
        tuple(
            rows(source, (head * 3 + part) * dim, (head * 3 + part + 1) * dim)
            for part in range(3)
            for head in range(role.parts[0][0] // dim)
        )
    )


LAYOUTS: dict[str, Callable[[Role, Sequence[TensorInfo]], Laid]] = {
    "rows": _plain,
    "plus_one": _plus_one,
    "transposed": _transposed,
    "head_qkv": _head_qkv,
}
