"""The file that `--calibrate` names, read with bounds: text, or token ids as .json or .npy."""

from __future__ import annotations

import io
import json
import math
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from enginebay.builder.quant.formats import QuantizationError

# Tokenizing text takes some 50 times its size in memory, JSON of short lists 30 times.
TEXT_BYTES_MAX = 32 << 20
JSON_BYTES_MAX = 32 << 20
NPY_BYTES_MAX = 256 << 20

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def read_text(path: Path) -> str:
    """A text file, UTF-8; what is none is replaced. QuantizationError beyond TEXT_BYTES_MAX."""
    return _read(path, TEXT_BYTES_MAX).decode("utf-8", errors="replace")


def read_tokens(path: Path, sequences: int, length: int) -> Sequence[Sequence[int]]:
    """The first `sequences` of a .json or .npy file, at most `length` tokens of each.

    QuantizationError naming the file for what holds no lists of integers, and beyond JSON_BYTES_MAX or
    NPY_BYTES_MAX.
    """
    if path.suffix == ".npy":
        return _npy(path, sequences, length)
    data = _read(path, JSON_BYTES_MAX)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise QuantizationError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, list):
        raise QuantizationError(f"{path}: {_named(document)}, not a list of lists of token ids")
    for index, sequence in enumerate(document):
        if not isinstance(sequence, list):
            raise QuantizationError(
                f"{path}: not a list of lists of token ids: sequence {index} is {_named(sequence)}"
            )
        if (at := next((i for i, token in enumerate(sequence) if type(token) is not int), None)) is not None:
            raise QuantizationError(
                f"{path}: not a list of lists of token ids: token {at} of sequence {index} is "
                f"{_named(sequence[at])}"
            )
    return [sequence[:length] for sequence in document[:sequences]]


def _npy(path: Path, sequences: int, length: int) -> list[list[int]]:
    data = _read(path, NPY_BYTES_MAX)
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)  # type: ignore[no-untyped-call]
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"format version {version}; plain arrays have 1.0 or 2.0")
        header = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, by_columns, dtype = header(file)  # type: ignore[no-untyped-call]
    except Exception as error:  # a header is a Python literal, and numpy raises many kinds for what is none
        raise QuantizationError(f"{path}: not an array of integers: {error}") from error
    shown = f"{dtype} {list(shape)}"
    if len(shape) != 2 or dtype.kind not in "iu":  # timedelta64 counts as an integer of numpy's, too
        raise QuantizationError(f"{path}: {shown}, not integers [sequences, length]")
    if min(shape) < 1:
        raise QuantizationError(f"{path}: {shown} holds no tokens; integers [sequences, length] are read")
    needed, held = math.prod(map(int, shape)) * dtype.itemsize, len(data) - file.tell()
    if needed != held:
        raise QuantizationError(
            f"{path}: {shown} takes {needed} bytes, the file has {held} behind its header; write it again"
        )
    array = np.frombuffer(data, dtype, offset=file.tell()).reshape(shape, order="F" if by_columns else "C")
    tokens: list[list[int]] = array[:sequences, :length].tolist()
    return tokens


def _read(path: Path, most: int) -> bytes:
    """A regular file's bytes. QuantizationError for anything else, and for more than `most`."""
    try:
        if reason := _obstacle(path.stat().st_mode):  # opening a device may already do something
            raise QuantizationError(f"calibration source {path} {reason}")
        # O_NONBLOCK: never waits for a FIFO's writer, should one have come in its place.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if reason := _obstacle(os.fstat(file.fileno()).st_mode):
                raise QuantizationError(f"calibration source {path} {reason}")
            data = file.read(most + 1)
    except OSError as error:
        raise QuantizationError(f"calibration source {path} cannot be read: {error.strerror}") from error
    if len(data) > most:
        raise QuantizationError(
            f"{path}: larger than {most >> 20} MiB, the most that is read; give an excerpt"
        )
    return data


def _obstacle(mode: int) -> str | None:
    """Why a file of `mode` is not read; None for a regular one."""
    if stat.S_ISREG(mode):
        return None
    what = next((words for test, words in _KINDS if test(mode)), "no regular file")
    return f"is {what}; name a file of text or of token ids"


def _named(value: Any) -> str:
    """A JSON value in a few characters."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
