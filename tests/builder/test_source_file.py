"""Files given to --calibrate that are none, too large or lie about themselves."""

from __future__ import annotations

import io
import json
import os
import socket
from pathlib import Path

import numpy as np
import pytest

from enginebay.builder.quant import source_file
from enginebay.builder.quant.formats import QuantizationError
from enginebay.builder.quant.source_file import read_text, read_tokens


def npy(tmp_path: Path, array: np.ndarray, edit: tuple[bytes, bytes] = (b"", b"")) -> Path:
    """`array` as a file, with a part of its header replaced by as many bytes."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    old, new = edit
    data = buffer.getvalue()
    assert old in data
    path = tmp_path / "t.npy"
    path.write_bytes(data.replace(old, new.ljust(len(old)), 1) if old else data)
    return path


@pytest.mark.parametrize("name", ["t.txt", "t.json", "t.npy"])
def test_what_is_no_file_is_refused_by_name_at_once(tmp_path, name):
    path = tmp_path / name

    def refused(what: str) -> None:
        with pytest.raises(QuantizationError, match=rf"{name} is {what}; name a file"):
            read_text(path) if name == "t.txt" else read_tokens(path, 1, 1)

    path.symlink_to("/dev/zero")
    refused("a device")
    path.unlink()
    os.mkfifo(path)
    refused("a FIFO")
    path.unlink()
    path.mkdir()
    refused("a folder")
    path.rmdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        refused("a socket")
    path.unlink()
    path.symlink_to(name)
    with pytest.raises(QuantizationError, match="cannot be read: Too many levels"):
        read_tokens(path, 1, 1)


def test_a_file_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(source_file, "TEXT_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(source_file, "JSON_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(source_file, "NPY_BYTES_MAX", 1 << 20)
    for name in ("t.txt", "t.json", "t.npy"):
        path = tmp_path / name
        path.touch()
        os.truncate(path, 1 << 40)  # a sparse file
        with pytest.raises(QuantizationError, match=rf"{name}: larger than 1 MiB, the most that is read"):
            read_text(path) if name == "t.txt" else read_tokens(path, 1, 1)
    os.truncate(tmp_path / "t.txt", 1 << 20)
    assert len(read_text(tmp_path / "t.txt")) == 1 << 20


@pytest.mark.parametrize("dtype", ["u1", "<i2", ">i4", "<i8", "<u8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_integers_are_cut(tmp_path, dtype, order):
    tokens = np.random.default_rng(1).integers(0, 100, (5, 9)).astype(dtype)
    assert read_tokens(npy(tmp_path, np.asarray(tokens, order=order)), 3, 4) == tokens[:3, :4].tolist()
    assert read_tokens(npy(tmp_path, tokens), 10**30, 10**30) == tokens.tolist()


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((2, 3), "m8[s]"), r"timedelta64\[s\] \[2, 3\], not integers"),
        (np.zeros((2, 3), "M8[s]"), r"datetime64\[s\] \[2, 3\], not integers"),
        (np.zeros((2, 3), "f4"), r"float32 \[2, 3\], not integers"),
        (np.zeros((2, 3), bool), r"bool \[2, 3\], not integers"),
        (np.zeros((2, 3), "S8"), r"\|S8 \[2, 3\], not integers"),
        (np.zeros((2, 3), [("a", "i4")]), "not integers"),
        (np.array([[{"a": 1}]], dtype=object), r"object \[1, 1\], not integers"),
        (np.zeros(6, "i4"), r"int32 \[6\], not integers"),
        (np.zeros((), "i4"), r"int32 \[\], not integers"),
        (np.zeros((0, 3), "i4"), r"int32 \[0, 3\] holds no tokens"),
        (np.zeros((3, 0), "i4"), r"int32 \[3, 0\] holds no tokens"),
    ],
)
def test_other_arrays_are_refused_with_their_type(tmp_path, array, words):
    with pytest.raises(QuantizationError, match=words):
        read_tokens(npy(tmp_path, array), 4, 4)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"(12345, 3), ", b"(-5, 3)", r"\[-5, 3\] holds no tokens"),
        (b"(12345, 3), ", b"(12346, 3), ", r"takes 148152 bytes, the file has 148140"),
        (b"(12345, 3), ", b"(9**9**9, 3)", "not an array of integers"),
        (b"(12345, 3), ", b"(9999999,9),", "takes 359999964 bytes"),
        (b"(12345, 3), ", b"((((((((((((", "not an array of integers"),
        (b"(12345, 3), ", b"None", "not an array of integers"),
        (b"'descr': '<i4'", b"'descr': '<zz'", "not an array of integers"),
        (b"\x93NUMPY\x01", b"\x93NUMPY\x03", "not an array of integers: format version"),
        (b"\x93NUMPY\x01", b"\x93NUMPY\x09", "not an array of integers"),
        (b"\x93NUMPY", b"PK\x03\x04", "not an array of integers"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path, old, new, words):
    with pytest.raises(QuantizationError, match=words):
        read_tokens(npy(tmp_path, np.zeros((12345, 3), "i4"), (old, new)), 4, 4)


def test_a_cut_array_is_refused_wherever_it_ends(tmp_path):
    whole = npy(tmp_path, np.zeros((4, 4), "i4")).read_bytes()
    for end in (*range(20), 127, 128, 129, len(whole) - 1):
        (tmp_path / "t.npy").write_bytes(whole[:end])
        with pytest.raises(QuantizationError, match=r"t\.npy: "):
            read_tokens(tmp_path / "t.npy", 4, 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", "sequence 0 is 1$"),
        ("[[1], [[2]]]", "token 0 of sequence 1 is a list"),
        ("[[1], {}]", "sequence 1 is an object"),
        ("7", "7, not a list of lists"),
        (json.dumps(["x" * 500]), r"sequence 0 is \"x{39}\.\.\.$"),
        ("[[1, NaN]]", "token 1 of sequence 0 is NaN"),
        ("[" * 100_000, "not JSON"),
        ("[[" + "9" * 5000 + "]]", "not JSON"),
        ("\x00", "not JSON"),
        ("", "not JSON"),
    ],
)
def test_json_of_another_form_says_where(tmp_path, text, words):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(QuantizationError, match=words):
        read_tokens(tmp_path / "t.json", 4, 4)


def test_json_is_cut(tmp_path):
    (tmp_path / "t.json").write_text(json.dumps([[1, 2, 3], [4], [5]]))
    assert read_tokens(tmp_path / "t.json", 2, 2) == [[1, 2], [4]]
