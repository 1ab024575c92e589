"""Where each tensor of a checkpoint lies on disk: safetensors headers, read with bounds, never the data.

Format: https://huggingface.co/docs/safetensors (8-byte little-endian header length, JSON header, data).
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginebay.export.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
MAX_INDEX_BYTES = 500_000_000

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
}
ITEM_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "U16": 2, "U32": 4, "U64": 8}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's place.

    `nbytes` bytes of `path` from `offset`, row-major, little-endian. dtype as safetensors says.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of a model folder by name, and `identity`: SHA-256 over every file's name, size and header.

    The identity does not read the data: it changes with names, shapes, dtypes, layout and sharding.
    """

    tensors: dict[str, TensorInfo]
    files: tuple[Path, ...]
    identity: str

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def open_checkpoint(folder: Path) -> Checkpoint:
    """Reads the headers of `folder`'s safetensors.

    Raises CheckpointError naming the file and what is wrong.
    """
    index = folder / INDEX
    files = [folder / name for name in shard_names(index)] if index.exists() else [folder / SINGLE]
    digest = hashlib.sha256()
    tensors: dict[str, TensorInfo] = {}
    for path in files:
        if not path.is_file():
            reason = f"{INDEX} names it" if index.exists() else f"{folder} has neither {SINGLE} nor {INDEX}"
            raise CheckpointError(f"{path} is missing: {reason}. Download the checkpoint again")
        header, start = _read_header(path)
        digest.update(f"{path.name}:{path.stat().st_size}:".encode() + header)
        for tensor in _parse(path, header, start):
            if tensor.name in tensors:
                raise CheckpointError(
                    f"tensor '{tensor.name}' is in {tensors[tensor.name].path} and in {path}"
                )
            tensors[tensor.name] = tensor
    if index.exists():
        _check_index(index, tensors)
    return Checkpoint(tensors, tuple(files), digest.hexdigest())


def _weight_map(index: Path, suffix: str = ".safetensors") -> dict[str, str]:
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise CheckpointError(f"{index} has {index.stat().st_size} bytes, more than {MAX_INDEX_BYTES}")
    try:
        document = json.loads(index.read_bytes())
        weight_map = document["weight_map"]
        pairs = [(str(name), str(file)) for name, file in weight_map.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index with a 'weight_map': {error}") from error
    for name, file in pairs:
        if Path(file).name != file or not file.endswith(suffix):
            raise CheckpointError(
                f"{index}: '{name}' lies in '{file}', which is not a {suffix} file beside it"
            )
    return dict(pairs)


def shard_names(index: Path, suffix: str = ".safetensors") -> list[str]:
    """The files that an index names, sorted.

    Raises CheckpointError unless each lies beside it and ends in `suffix`.
    """
    return sorted(set(_weight_map(index, suffix).values()))


def _check_index(index: Path, tensors: dict[str, TensorInfo]) -> None:
    for name, file in _weight_map(index).items():
        if name not in tensors:
            raise CheckpointError(f"{index} places '{name}' in {file}, which does not hold it")
        if tensors[name].path.name != file:
            raise CheckpointError(
                f"{index} places '{name}' in {file}, but it is in {tensors[name].path.name}"
            )


def _read_header(path: Path) -> tuple[bytes, int]:
    """The header's JSON and the offset at which the data begins."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(
                f"{path} is truncated or no safetensors file: {size} bytes, its header claims {length}"
            )
        return file.read(length), 8 + length


def _parse(path: Path, header: bytes, start: int) -> list[TensorInfo]:
    try:
        document = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: its header is not an object")
    available = path.stat().st_size - start
    tensors = [
        _entry(path, name, entry, start, available)
        for name, entry in document.items()
        if name != "__metadata__"
    ]
    end = start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != end:
            raise CheckpointError(
                f"{path}: '{tensor.name}' begins at byte {tensor.offset}, the tensor before it ends at {end}"
            )
        end += tensor.nbytes
    if end - start != available:
        raise CheckpointError(f"{path} holds {available} bytes of data, its header describes {end - start}")
    return tensors


def _entry(path: Path, name: str, entry: Any, start: int, available: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the header's entry of '{name}' is malformed: {error!r}") from error
    if any(type(number) is not int or number < 0 for number in numbers):
        raise CheckpointError(
            f"{path}: '{name}' has a shape or offsets that are not counts: {shape}, {begin}, {end}"
        )
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{path}: '{name}' has dtype {dtype!r}; known are {', '.join(ITEM_BYTES)}")
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != expected:
        raise CheckpointError(
            f"{path}: '{name}' {dtype}{shape} needs {expected} bytes, its offsets give {end - begin}"
        )
    if end > available:
        raise CheckpointError(
            f"{path} is truncated: '{name}' ends at byte {start + end}, the file has {start + available}. "
            "Download it again"
        )
    return TensorInfo(name, dtype, tuple(shape), path, start + begin, end - begin)
