"""What QuantLinear refuses: descriptors, weights, and calls only a C caller can get wrong."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import pytest
from quant_linear_cases import Format

from enginebay.plugins.load import KernelLibrary, PluginError


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("fmt", "columns", "words"),
    [
        (Format("i4", 32), 48, "in_features 48 is not a multiple of block_size 32"),
        (Format("i4", 16), 64, "block_size 16 of int4 weights is not a positive multiple of 32"),
        (Format("i8", 0), 64, "block_size 0 of int8 weights"),
        (Format("i8", -32), 64, "block_size -32 of int8 weights"),
        (Format("i8", 32, False), 64, "int8 weights have no minimum"),
        (Format("f8", 0), 64, "block_size 0 of float8e4m3 weights"),
        (Format("f8", 32, False), 64, "float8e4m3 weights have no minimum"),
        (Format("f32"), 0, "in_features 0 and out_features 16 must both be positive"),
    ],
)
def test_descriptors_are_refused(library: KernelLibrary, fmt: Format, columns: int, words: str) -> None:
    with pytest.raises(PluginError, match=words):
        library.linear_bytes(rows=16, columns=columns, **fmt.arguments)


def test_packing_names_the_bad_value(library: KernelLibrary, rng: np.random.Generator) -> None:
    values = rng.integers(0, 16, (20, 64)).astype(np.uint8)
    scales = np.ones((20, 2), np.float32)
    minimums = np.zeros((20, 2), np.float32)
    arguments = Format("i4", 32, False).arguments
    for array, name, bad in (
        (scales, "scale", np.nan),
        (scales, "scale", np.inf),
        (minimums, "minimum", -np.inf),
    ):
        broken = array.copy()
        broken[17, 1] = bad
        both = (broken, minimums) if array is scales else (scales, broken)
        with pytest.raises(PluginError, match=f"{name} of output feature 17, block 1 is"):
            library.pack_linear(values, *both, **arguments)
    bits = np.zeros((20, 64), np.uint8)
    bits[19, 5] = 0xFF
    with pytest.raises(
        PluginError, match="float8e4m3 value 255 of output feature 19, input feature 5 is not a"
    ):
        library.pack_linear(bits, scales, **Format("f8", 32).arguments)
    values[18, 33] = 16
    with pytest.raises(PluginError, match="int4 value 16 of output feature 18, input feature 33"):
        library.pack_linear(values, scales, minimums, **arguments)


class TestRawCalls:
    """What only a C caller can get wrong: every mistake is a status and a message, never a crash."""

    @pytest.fixture
    def call(self, library: KernelLibrary) -> Any:
        raw = ctypes.CDLL(str(library.path))
        message = ctypes.create_string_buffer(512)

        class Context(ctypes.Structure):
            _fields_ = (
                ("abi_version", ctypes.c_uint32),
                ("threads", ctypes.c_uint32),
                *((name, ctypes.c_void_p) for name in ("stream", "parallel_for", "pool", "message")),
                ("message_bytes", ctypes.c_size_t),
            )

        context = Context(1, 1, None, None, None, ctypes.addressof(message), 512)

        def call(name: str, *arguments: Any, null_context: bool = False) -> tuple[int, str]:
            message.value = b""
            function = getattr(raw, name)
            function.restype = ctypes.c_int
            status = function(None if null_context else ctypes.byref(context), *arguments)
            return status, message.value.decode()

        return call

    @staticmethod
    def desc(k: int = 64, n: int = 16, kind: int = 6, block: int = 32, io: int = 1) -> Any:
        return (ctypes.c_int32 * 6)(k, n, kind, block, 1, io)

    def test_descriptor_and_context(self, call: Any) -> None:
        size = ctypes.c_size_t()
        name = "eb_quant_linear_packed_bytes"
        assert call(name, None, ctypes.byref(size)) == (1, "QuantLinear: the descriptor is NULL")
        assert call(name, self.desc(), None)[0] == 1
        assert call(name, self.desc(), ctypes.byref(size), null_context=True)[0] == 1
        for kind in (0, 7, 99):
            status, words = call(name, self.desc(kind=kind), ctypes.byref(size))
            assert status == 2
            assert f"({kind})" in words
        widest = self.desc(k=2**31 - 1, n=2**31 - 1, kind=1)
        assert call(name, widest, ctypes.byref(size))[0] == 1  # 2^64 bytes
        status, words = call(name, self.desc(io=2), ctypes.byref(size))
        assert status == 2
        assert "float16" in words

    def test_run(self, call: Any) -> None:
        size, space = ctypes.c_size_t(), ctypes.c_size_t()
        desc = self.desc()
        assert call("eb_quant_linear_packed_bytes", desc, ctypes.byref(size))[0] == 0
        rows = ctypes.c_int64(3)
        assert call("eb_quant_linear_workspace_size", desc, rows, ctypes.byref(space))[0] == 0
        assert call("eb_quant_linear_workspace_size", desc, ctypes.c_int64(-1), ctypes.byref(space))[0] == 1
        for many in (2**62, 2**63 - 1):
            status, words = call(
                "eb_quant_linear_workspace_size", desc, ctypes.c_int64(many), ctypes.byref(space)
            )
            assert status == 1
            assert f"{many} rows of x; weights of 16 x 64 take 0 to" in words
        assert call("eb_quant_linear_workspace_size", desc, rows, ctypes.byref(space))[0] == 0
        memory = np.zeros(1 << 16, np.uint8)
        base = (memory.ctypes.data + 63) // 64 * 64
        x, packed, y, work = (ctypes.c_void_p(base + i * 8192) for i in range(4))

        def run(**changes: Any) -> tuple[int, str]:
            a = {"x": x, "packed": packed, "bytes": size, "bias": None, "y": y, "work": work, "space": space}
            a |= {"rows": rows} | changes
            return call(
                *("eb_quant_linear_run", desc, a["rows"], a["x"], a["packed"], a["bytes"]),
                *(a["bias"], a["y"], a["work"], a["space"]),
            )

        def moved(pointer: ctypes.c_void_p, by: int) -> ctypes.c_void_p:
            assert pointer.value is not None
            return ctypes.c_void_p(pointer.value + by)

        assert run() == (0, "")
        for name in ("x", "packed", "y", "work"):
            status, words = run(**{name: None})
            assert status == 1
            assert "NULL" in words
        for name, pointer in (("x", moved(x, 2)), ("y", moved(y, 1)), ("bias", moved(x, 3))):
            status, words = run(**{name: pointer})
            assert status == 1
            assert name in words
            assert "aligned to 4" in words
        for name, pointer in (("packed", moved(packed, 4)), ("work", moved(work, 8))):
            status, words = run(**{name: pointer})
            assert status == 1
            assert "aligned to 16" in words
        status, words = run(bytes=ctypes.c_size_t(size.value - 1))
        assert status == 1
        assert str(size.value) in words
        assert str(size.value - 1) in words
        status, words = run(space=ctypes.c_size_t(space.value - 1))
        assert status == 1
        assert str(space.value) in words
        assert run(rows=ctypes.c_int64(-5))[0] == 1
        assert run(rows=ctypes.c_int64(0), x=None, y=None, work=None) == (0, "")
