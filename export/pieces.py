"""Where bytes of a weight come from: a range of a file, or chunks computed on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from enginebay.export.checkpoint import TensorInfo
from enginebay.export.errors import CheckpointError

CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class FileRange:
    """`nbytes` bytes of `path` from `offset`, as they are."""

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Computed:
    """Bytes made in bounded chunks; each call of `chunks` starts anew."""

    chunks: Callable[[], Iterator[bytes]]


Piece = FileRange | Computed


def whole(tensor: TensorInfo) -> FileRange:
    return FileRange(tensor.path, tensor.offset, tensor.nbytes)


def rows(tensor: TensorInfo, start: int, stop: int) -> FileRange:
    """Rows [start, stop) along axis 0."""
    row = tensor.nbytes // tensor.shape[0]
    return FileRange(tensor.path, tensor.offset + start * row, (stop - start) * row)


def read_range(tensor: TensorInfo, start: int, stop: int, chunk: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Bytes [start, stop) of a tensor in chunks. Raises CheckpointError where the file ends early."""
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset + start)
        while start < stop:
            data = file.read(min(chunk, stop - start))
            if not data:
                raise CheckpointError(f"{tensor.path} ends inside '{tensor.name}'")
            start += len(data)
            yield data
