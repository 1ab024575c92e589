"""The header of a GGUF file: its metadata, and where each tensor lies. Nothing in the file is believed.

Every length is held against what is left of the file before anything of that length is read, so a damaged
or hostile file costs no more time and memory than its own size. Names are quoted with control characters
escaped.

Source: the GGUF specification, versions 2 and 3 (github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginebay.export.errors import CheckpointError, ExportError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_ENTRIES = 1 << 16  # keys, and tensors
_MOST_ITEMS = 1 << 22  # of all arrays together; vocabularies have some 2^18 tokens and 2^19 merges
_MOST_STRING = 1 << 24  # bytes
_MOST_DEPTH = 4
_MOST_ALIGNMENT = 1 << 20
# Type numbers of the specification: struct's letters, and bytes.
_SCALARS = {
    0: ("B", 1),
    1: ("b", 1),
    2: ("H", 2),
    3: ("h", 2),
    4: ("I", 4),
    5: ("i", 4),
    6: ("f", 4),
    7: ("?", 1),
    10: ("Q", 8),
    11: ("q", 8),
    12: ("d", 8),
}
_STRING, _ARRAY = 8, 9
_LEAST_STRING, _LEAST_ARRAY = 8, 12  # bytes of an empty one


@dataclass(frozen=True)
class TensorRecord:
    """`shape` as numpy has it, rows first. The tensor's `nbytes` begin at byte `offset` of the file; a row
    has `row_bytes`. `quantization` is the gguf package's number of `kind`."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    row_bytes: int
    quantization: Any


@dataclass(frozen=True)
class GgufHeader:
    meta: dict[str, Any]
    tensors: tuple[TensorRecord, ...]


def shown(name: object) -> str:
    """A name or value out of a file as a message may quote it: one line, no control characters."""
    text = repr(name)
    return text if len(text) <= 80 else f"{text[:76]}…{text[-1]}"


def read_header(path: Path) -> GgufHeader:
    """CheckpointError naming the key or tensor where the file is none, is cut short, or contradicts itself.

    ExportError where the gguf package, which knows the sizes of blocks, is absent.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is no regular file: give the path of a .gguf file")
    size = path.stat().st_size
    if size < 24:
        raise CheckpointError(f"{path} has {size} bytes, a GGUF header at least 24: download it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Reader(path, data).header()


class _Reader:
    """A position in the file that moves on as things are read."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data = path, data
        self._at = 0
        self._items = 0

    def header(self) -> GgufHeader:
        magic = self._take(4, "the magic number")
        if magic != MAGIC:
            raise self._wrong(f"it begins with {shown(magic)}, a GGUF file with {MAGIC!r}")
        version = self._number("I", 4, "the version")
        if version not in _VERSIONS:
            swapped = version and version & 0xFFFF == 0
            why = "it is big-endian" if swapped else f"its version is {version}"
            raise self._wrong(f"{why}; versions 2 and 3, little-endian, are read: convert it again")
        count = self._entries("tensors", 24)
        keys = self._entries("keys", 13)
        meta: dict[str, Any] = {}
        for index in range(keys):
            key = self._string(f"the name of key {index}")
            if key in meta:
                raise self._wrong(f"key {shown(key)} stands there twice")
            meta[key] = self._value(self._number("I", 4, f"the type of {shown(key)}"), f"key {shown(key)}", 0)
        infos = [self._tensor(index) for index in range(count)]
        return GgufHeader(meta, self._placed(infos, self._alignment(meta)))

    def _entries(self, what: str, least: int) -> int:
        count: int = self._number("Q", 8, f"the number of {what}")
        if count > min(_MOST_ENTRIES, len(self._data) // least):
            raise self._wrong(
                f"it claims {count} {what}; its {len(self._data)} bytes hold fewer, and {_MOST_ENTRIES} are "
                "the most that is read"
            )
        return count

    def _value(self, kind: int, what: str, depth: int) -> Any:
        if kind in _SCALARS:
            return self._number(*_SCALARS[kind], what)
        if kind == _STRING:
            return self._string(what)
        if kind != _ARRAY:
            raise self._wrong(f"{what} has type {kind}, which the specification does not know")
        if depth == _MOST_DEPTH:
            raise self._wrong(f"{what} nests arrays deeper than {_MOST_DEPTH}")
        inner = self._number("I", 4, f"the item type of {what}")
        count = self._number("Q", 8, f"the length of {what}")
        least = (
            _SCALARS[inner][1] if inner in _SCALARS else _LEAST_STRING if inner == _STRING else _LEAST_ARRAY
        )
        left = len(self._data) - self._at
        self._items += count
        if count * least > left:
            raise self._wrong(f"{what} claims {count} items, {left} bytes are left: is it cut short?")
        if self._items > _MOST_ITEMS:
            raise self._wrong(f"{what} claims {count} items; arrays may have {_MOST_ITEMS} in all")
        if inner in _SCALARS:
            letter, size = _SCALARS[inner]
            raw = self._take(count * size, what)
            return list(struct.unpack(f"<{count}{letter}", raw))
        return [self._value(inner, f"item {index} of {what}", depth + 1) for index in range(count)]

    def _tensor(self, index: int) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, number of its kind, and offset in the data."""
        name = self._string(f"the name of tensor {index}")
        what = f"tensor {shown(name)}"
        axes = self._number("I", 4, f"the number of axes of {what}")
        if not 1 <= axes <= 4:
            raise self._wrong(f"{what} has {axes} axes; 1 to 4 are possible")
        sizes = [self._number("Q", 8, f"the shape of {what}") for _ in range(axes)]
        kind = self._number("I", 4, f"the kind of {what}")
        return name, tuple(reversed(sizes)), kind, self._number("Q", 8, f"the offset of {what}")

    def _alignment(self, meta: dict[str, Any]) -> int:
        value = meta.get("general.alignment", 32)
        power = type(value) is int and 0 < value <= _MOST_ALIGNMENT and value & (value - 1) == 0
        if not power:
            raise self._wrong(
                f"general.alignment is {shown(value)}, not a power of two up to {_MOST_ALIGNMENT}"
            )
        return int(value)

    def _placed(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], alignment: int
    ) -> tuple[TensorRecord, ...]:
        begin = -(-self._at // alignment) * alignment
        records: dict[str, TensorRecord] = {}
        for name, shape, kind, offset in infos:
            what = f"tensor {shown(name)}"
            if name in records:
                raise self._wrong(f"{what} stands there twice")
            records[name] = self._record(name, shape, kind, begin + offset)
            if offset % alignment:
                raise self._wrong(f"{what} begins at {offset}, no multiple of the alignment {alignment}")
        end, before = begin, ""
        for record in sorted(records.values(), key=lambda record: record.offset):
            if record.offset < end:
                raise self._wrong(f"tensors {shown(before)} and {shown(record.name)} overlap")
            end, before = record.offset + record.nbytes, record.name
        return tuple(records.values())

    def _record(self, name: str, shape: tuple[int, ...], number: int, begin: int) -> TensorRecord:
        kinds = _kinds()
        what = f"tensor {shown(name)}"
        if number not in kinds:
            raise self._wrong(f"{what} is of kind {number}, which the gguf package does not know: update it")
        kind, values, size = kinds[number]
        if min(shape) < 1 or shape[-1] % values:
            raise self._wrong(
                f"{what} has shape {list(shape)}; every size is at least 1, a row of {kind.name} a "
                f"multiple of {values}"
            )
        row = shape[-1] // values * size
        total = math.prod(shape[:-1]) * row
        if begin + total > len(self._data):
            raise self._wrong(
                f"{what} ends at byte {begin + total}, the file at {len(self._data)}: it is cut short; "
                "download it again"
            )
        return TensorRecord(name, kind.name, shape, begin, total, row, kind)

    def _number(self, letter: str, size: int, what: str) -> Any:
        return struct.unpack(f"<{letter}", self._take(size, what))[0]

    def _string(self, what: str) -> str:
        length = self._number("Q", 8, f"the length of {what}")
        if length > _MOST_STRING:
            raise self._wrong(f"{what} claims {length} bytes; strings may have {_MOST_STRING}")
        try:
            return self._take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._wrong(f"{what} is not UTF-8: {error.reason} at byte {error.start}") from error

    def _take(self, size: int, what: str) -> bytes:
        left = len(self._data) - self._at
        if size > left:
            raise self._wrong(
                f"{what} needs {size} bytes where {left} are left: it is cut short; download it again"
            )
        self._at += size
        return self._data[self._at - size : self._at]

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} cannot be read as GGUF: {what}")


def _kinds() -> dict[int, tuple[Any, int, int]]:
    """By its number: a kind of tensor, the values in a block, and the block's bytes."""
    try:
        from gguf import GGML_QUANT_SIZES
    except ImportError as error:
        raise ExportError(
            f"reading a GGUF file needs the gguf package ({error}): pip install 'enginebay[build]'"
        ) from error
    return {int(kind): (kind, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
