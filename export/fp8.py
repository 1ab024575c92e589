"""FP8 (E4M3) weights of a checkpoint: bits as they are with a scale for each group, or their numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from enginebay.export.checkpoint import TensorInfo
from enginebay.export.errors import CheckpointError
from enginebay.export.packed import check_scales
from enginebay.export.pieces import read_range

_DTYPES: dict[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I32": np.int32,
    "I64": np.int64,
    "I8": np.int8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}


def expand_fp8(
    tensors: Mapping[str, TensorInfo], shape: tuple[int, ...], block: tuple[int, int] | None
) -> Iterator[bytes]:
    """E4M3 times its scale, to bfloat16."""
    columns = shape[1]
    scales = fp8_scales(tensors, shape, block)
    if block is not None:
        scales = np.repeat(scales, block[1], axis=1)[:, :columns]
    values = read_array(tensors["weight"])
    step = max(1, (4 << 20) // columns)
    for start in range(0, len(values), step):
        chunk = values[start : start + step].astype(np.float32) * scales[start : start + step]
        _refuse_nan(np.isnan(chunk), tensors["weight"], start)
        yield chunk.astype(ml_dtypes.bfloat16).tobytes()


def checked_fp8(tensor: TensorInfo) -> Iterator[bytes]:
    """The tensor's bytes; CheckpointError where one is E4M3's NaN."""
    done = 0
    for data in read_range(tensor, 0, tensor.nbytes):
        bits = np.frombuffer(data, np.uint8)
        _refuse_nan((bits & 0x7F) == 0x7F, tensor, done // tensor.shape[1])
        done += len(data)
        yield data


def fp8_scales(
    tensors: Mapping[str, TensorInfo], shape: tuple[int, ...], block: tuple[int, int] | None
) -> NDArray[np.float32]:
    """Scales [N, 1], or [N, blocks of columns], of weights [N, K] with one for the tensor, a row, or a
    block."""
    source, rows, columns = tensors["weight"], *shape
    if source.shape != shape:
        raise CheckpointError(
            f"'{source.name}' has shape {list(source.shape)}, the config calls for {list(shape)}"
        )
    info = tensors.get("weight_scale_inv") or tensors["weight_scale"]
    scales = to_floats(read_array(info))
    check_scales(scales.reshape(-1), info.name)
    if block is None:
        if scales.size not in (1, rows):
            raise CheckpointError(f"'{info.name}' has {scales.size} scales; {rows} rows take 1 or {rows}")
        return np.ascontiguousarray(np.broadcast_to(scales.reshape(-1, 1), (rows, 1)))
    if scales.shape != (math.ceil(rows / block[0]), math.ceil(columns / block[1])):
        raise CheckpointError(
            f"'{info.name}' has shape {list(scales.shape)}; blocks of {list(block)} of {list(shape)} "
            "need another"
        )
    return np.repeat(scales, block[0], axis=0)[:rows]


def _refuse_nan(found: NDArray[np.bool_], tensor: TensorInfo, first_row: int) -> None:
    if found.any():
        raise CheckpointError(f"'{tensor.name}' holds NaN at row {first_row} or after it")


def read_array(tensor: TensorInfo) -> NDArray[Any]:
    if tensor.dtype not in _DTYPES:
        raise CheckpointError(
            f"'{tensor.name}' is {tensor.dtype}; a quantised layer holds {', '.join(_DTYPES)}"
        )
    data = b"".join(read_range(tensor, 0, tensor.nbytes))
    return np.frombuffer(data, _DTYPES[tensor.dtype]).reshape(tensor.shape)


def to_floats(array: NDArray[Any]) -> NDArray[np.float32]:
    return array.astype(np.float32)
