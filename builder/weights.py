"""Weights on their way from the exported sidecar into the engine's, a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginebay.builder.quant.formats import QuantizationError

ALIGNMENT = 4096  # of every tensor in a sidecar, so that each can be mapped by itself
CHUNK_BYTES = 16 << 20  # of float32 rows in memory at once
ROW_GROUP = 64  # chunks of a matrix begin at multiples of it


class SidecarError(ValueError):
    """A sidecar that does not hold what the graph says. The message names file, tensor and sizes."""


def read_values(tensor: ir.TensorProtocol, start: int, stop: int) -> NDArray[Any]:
    """Rows start..stop of a matrix [N, K] in its own dtype, from its file where it has one; 4-bit values as
    uint8."""
    columns = int(tensor.shape.numpy()[1])
    nibbles = tensor.dtype == ir.DataType.UINT4
    if not isinstance(tensor, ir.ExternalTensor):
        held = tensor.numpy()[start:stop]
        return held.astype(np.uint8) if nibbles else held
    dtype = np.dtype(np.uint8) if nibbles else tensor.dtype.numpy()
    if nibbles and columns % 2:
        raise SidecarError(f"{tensor.path}: rows of {tensor.name} have {columns} 4-bit values, an odd number")
    items = columns // 2 if nibbles else columns
    offset = (tensor.offset or 0) + start * items * dtype.itemsize
    count = (stop - start) * items
    values = np.fromfile(tensor.path, dtype=dtype, count=count, offset=offset)
    if values.size != count:
        raise SidecarError(
            f"{tensor.path}: ends inside tensor {tensor.name}: {count} values expected at byte "
            f"{offset}, {values.size} found; export the model again"
        )
    if nibbles:
        values = np.stack([values & 15, values >> 4], axis=-1)
    return values.reshape(stop - start, columns)


def check_finite_tensor(tensor: ir.ExternalTensor) -> None:
    """QuantizationError naming the first NaN or infinity of a float tensor, read CHUNK_BYTES at a time."""
    if not tensor.dtype.is_floating_point() or tensor.dtype.bitwidth < 8:
        return
    dtype = tensor.dtype.numpy()
    size, step = math.prod(int(dim) for dim in tensor.shape.numpy()), CHUNK_BYTES // dtype.itemsize
    for start in range(0, size, step):
        offset = (tensor.offset or 0) + start * dtype.itemsize
        values = np.fromfile(tensor.path, dtype=dtype, count=min(step, size - start), offset=offset)
        finite = np.isfinite(values)
        if not finite.all():
            first = int(np.argmin(finite))
            index = np.unravel_index(start + first, tensor.shape.numpy())
            raise QuantizationError(
                f"tensor {tensor.name}: weight [{', '.join(map(str, index))}] is {float(values[first]):g}; "
                "a checkpoint with such weights cannot be built"
            )


@dataclass(frozen=True)
class WeightMatrix:
    """A two-dimensional initializer [N, K], read by rows and never as a whole."""

    name: str
    tensor: ir.TensorProtocol

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = (int(dim) for dim in self.tensor.shape.numpy())
        return rows, columns

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """float32 [stop - start, K]."""
        return read_values(self.tensor, start, stop).astype(np.float32)

    def chunks(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """(first row, float32 rows) over the whole matrix, about CHUNK_BYTES and whole ROW_GROUPs at a
        time."""
        rows, columns = self.shape
        step = max(1, CHUNK_BYTES // (4 * columns * ROW_GROUP)) * ROW_GROUP
        for start in range(0, rows, step):
            yield start, self.rows(start, min(start + step, rows))


def expert_matrices(name: str, tensor: ir.TensorProtocol) -> list[WeightMatrix]:
    """The matrices [N, K] of a weight [experts, N, K], by view: nothing is read."""
    experts, rows, columns = (int(dim) for dim in tensor.shape.numpy())
    names = [f"{name}[{expert}]" for expert in range(experts)]
    if not isinstance(tensor, ir.ExternalTensor):
        values = tensor.numpy()
        return [WeightMatrix(label, ir.tensor(values[index])) for index, label in enumerate(names)]
    if rows * columns * tensor.dtype.bitwidth % 8:
        raise SidecarError(
            f"{tensor.path}: experts of {name} have {rows} x {columns} 4-bit values, an odd number"
        )
    size = rows * columns * tensor.dtype.bitwidth // 8
    return [
        WeightMatrix(
            label,
            ir.ExternalTensor(
                tensor.location,
                (tensor.offset or 0) + index * size,
                size,
                tensor.dtype,
                shape=ir.Shape([rows, columns]),
                name=label,
                base_dir=tensor.base_dir,
            ),
        )
        for index, label in enumerate(names)
    ]


class SidecarWriter:
    """Writes tensors one after another into a file, each at an aligned offset."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = path.open("wb")
        self._end = 0

    def __enter__(self) -> SidecarWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def nbytes(self) -> int:
        return self._end

    def write(
        self, name: str, dtype: ir.DataType, shape: tuple[int, ...], chunks: Iterable[bytes | memoryview]
    ) -> ir.ExternalTensor:
        """Append one tensor, given piece by piece; where it now lies, as an initializer's value."""
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        self._file.seek(offset)
        length = 0
        for chunk in chunks:
            length += self._file.write(chunk)
        expected = math.ceil(math.prod(shape) * dtype.itemsize)
        assert length == expected, f"{name}: {length} bytes written, {shape} of {dtype} takes {expected}"
        self._end = offset + length
        return ir.ExternalTensor(
            self._path.name,
            offset,
            length,
            dtype,
            shape=ir.Shape(shape),
            name=name,
            base_dir=self._path.parent,
        )
