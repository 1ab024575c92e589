"""QuantLinear on the CPU: packing, arithmetic against numpy, and that a row depends on itself alone."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from enginebay.plugins.load import KernelLibrary, PluginError

Floats = NDArray[np.float32]
OUTLIER = 5.0  # times the root mean square of its row: such a block of x is visited twice
SMALLEST = np.float32(2.0**-100)


@dataclass(frozen=True)
class Format:
    kind: str
    block: int = 0
    symmetric: bool = True

    @property
    def arguments(self) -> dict[str, Any]:
        return {"format": self.kind, "block_size": self.block, "symmetric": self.symmetric}

    @property
    def integer(self) -> bool:
        return self.kind in ("i8", "i4")

    def __str__(self) -> str:
        return f"{self.kind}-{self.block}{'' if self.symmetric else '-min'}"


FLOATS = (Format("f32"), Format("f16"), Format("bf16"))
F8 = tuple(Format("f8", block) for block in (32, 128, 384))
INTEGERS = (
    *(Format("i4", block, symmetric) for block in (32, 64, 128) for symmetric in (True, False)),
    *(Format("i8", block) for block in (32, 64, 128, 384)),
)
ALL = [*FLOATS, *F8, *INTEGERS]
DTYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Layer:
    """Packed weights and what they stand for."""

    fmt: Format
    n: int
    k: int
    packed: NDArray[np.uint8]
    weights: Floats  # [N, K], from the definition, not from the library
    q: NDArray[np.int64] | None = None  # signed values
    scales: Floats | None = None  # [N, K/block]
    minimums: Floats | None = None

    def run(self, library: KernelLibrary, x: Floats, bias: Floats | None = None) -> Floats:
        return library.run_linear(x, self.packed, bias, out_features=self.n, **self.fmt.arguments)


def make_layer(library: KernelLibrary, fmt: Format, n: int, k: int, rng: np.random.Generator) -> Layer:
    """Random weights whose scales and minimums are halves, so that packing must keep them exactly."""
    if fmt.kind == "f8":
        return make_f8_layer(library, fmt, n, k, rng)
    if not fmt.integer:
        values = rng.standard_normal((n, k)).astype(DTYPES[fmt.kind])
        packed = library.pack_linear(values, **fmt.arguments)
        return Layer(fmt, n, k, packed, values.astype(np.float32))
    scales = rng.uniform(0.001, 0.02, (n, k // fmt.block)).astype(np.float16).astype(np.float32)
    minimums = None
    if fmt.kind == "i8":
        values = rng.integers(-128, 128, (n, k)).astype(np.int8)
        q = values.astype(np.int64)
    else:
        values = rng.integers(0, 16, (n, k)).astype(np.uint8)
        q = values.astype(np.int64) - (8 if fmt.symmetric else 0)
        if not fmt.symmetric:
            minimums = rng.uniform(-0.2, 0.05, scales.shape).astype(np.float16).astype(np.float32)
    packed = library.pack_linear(values, scales, minimums, **fmt.arguments)
    spread = np.repeat(scales, fmt.block, 1)
    weights = spread * q.astype(np.float32)
    if minimums is not None:
        weights = weights + np.repeat(minimums, fmt.block, 1)
    return Layer(fmt, n, k, packed, weights, q, scales, minimums)


def make_f8_layer(library: KernelLibrary, fmt: Format, n: int, k: int, rng: np.random.Generator) -> Layer:
    """Every E4M3 number, zeros and subnormals among them, but NaN."""
    bits = rng.integers(0, 256, (n, k)).astype(np.uint8)
    bits[(bits & 0x7F) == 0x7F] = 0x01
    scales = rng.uniform(0.5, 2, (n, k // fmt.block)).astype(np.float32)
    packed = library.pack_linear(bits, scales, **fmt.arguments)
    values = bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return Layer(fmt, n, k, packed, np.repeat(scales, fmt.block, 1) * values)


def quantised_rows(x: Floats, block: int) -> tuple[NDArray[np.int64], Floats]:
    """(q [T, K], scale [T, K/block]) as the kernels' header defines them."""
    blocks = x.reshape(len(x), -1, block)
    largest = np.abs(blocks).max(2)
    scale = (largest / np.float32(127)).astype(np.float32)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(largest < SMALLEST, np.float32(0), np.float32(127) / largest).astype(np.float32)
    q = np.rint(blocks * inverse[..., None]).astype(np.int64)
    return q.reshape(x.shape), np.where(largest < SMALLEST, np.float32(0), scale)


def visits(x: Floats, block: int) -> list[tuple[NDArray[np.int64], Floats]]:
    """(q [T, K], scale [T, K/block]) of each visit: the codes, then those of what outliers left over."""
    q, scale = quantised_rows(x, block)
    rest = (x - np.repeat(scale, block, 1).astype(np.float64) * q).astype(np.float32)
    largest = np.abs(x.reshape(len(x), -1, block)).max(2)
    mean = np.square(x, dtype=np.float64).mean(1, keepdims=True)
    rms = np.where(mean < SMALLEST, np.inf, np.sqrt(mean))  # squares vanish in fp32
    return [(q, scale), quantised_rows(rest * np.repeat(largest > OUTLIER * rms, block, 1), block)]


def emulate(layer: Layer, x: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(y, bound): the integer formats' arithmetic in float64, and the size of what was added up."""
    assert layer.q is not None
    assert layer.scales is not None
    block = next(b for b in (128, 64, 32) if layer.fmt.block % b == 0)
    blocks = layer.k // block
    weight_scales = np.repeat(layer.scales, layer.fmt.block // block, 1).astype(np.float64)
    y, size = np.zeros((2, len(x), layer.n))
    for codes, scale in visits(x, block):
        q = codes.reshape(len(x), blocks, block)
        dot = np.einsum("tbk,nbk->tnb", q, layer.q.reshape(layer.n, blocks, block)).astype(np.float64)
        terms = [dot * weight_scales * scale[:, None, :].astype(np.float64)]
        if layer.minimums is not None:
            minimums = np.repeat(layer.minimums, layer.fmt.block // block, 1).astype(np.float64)
            terms.append(minimums * (q.sum(2) * scale.astype(np.float64))[:, None, :])
        y += sum(term.sum(2) for term in terms)
        size += sum(np.abs(term).sum(2) for term in terms)
    return y, size


@pytest.fixture(scope="module")
def library() -> KernelLibrary:
    return KernelLibrary()


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_unpack_gives_back_what_was_packed(
    library: KernelLibrary, fmt: Format, rng: np.random.Generator
) -> None:
    for n in (1, 15, 16, 17, 50):
        layer = make_layer(library, fmt, n, 384, rng)
        unpacked = library.unpack_linear(layer.packed, rows=n, columns=384, **fmt.arguments)
        np.testing.assert_array_equal(unpacked, layer.weights)


@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_embedding_is_rows_of_unpack(library: KernelLibrary, fmt: Format, rng: np.random.Generator) -> None:
    layer = make_layer(library, fmt, 37, 384, rng)
    ids = np.array([36, 0, 5, 5, 16, *rng.integers(0, 37, 40)], np.int32)
    y = library.run_embedding(ids, layer.packed, rows=37, columns=384, **fmt.arguments)
    np.testing.assert_array_equal(y, layer.weights[ids])
    for bad in (-1, 37):
        with pytest.raises(PluginError, match=rf"id {bad} of row 1 .*\[0, 37\)"):
            library.run_embedding(
                np.array([3, bad], np.int32), layer.packed, rows=37, columns=384, **fmt.arguments
            )


@pytest.mark.parametrize("fmt", FLOATS, ids=str)
@pytest.mark.parametrize("k", [1, 31, 511, 512, 513, 1100])
def test_float_formats_multiply(
    library: KernelLibrary, fmt: Format, k: int, rng: np.random.Generator
) -> None:
    for n, rows in ((1, 1), (70, 1), (33, 3), (131, 9), (48, 17), (40, 8), (20, 16)):
        layer = make_layer(library, fmt, n, k, rng)
        x = rng.standard_normal((rows, k)).astype(np.float32)
        bias = rng.standard_normal(n).astype(np.float32)
        exact = x.astype(np.float64) @ layer.weights.T.astype(np.float64)
        size = np.abs(x.astype(np.float64)) @ np.abs(layer.weights.T.astype(np.float64))
        # A chain of at most 512 roundings, then one for each chunk and the bias.
        bound = 2.0**-24 * (min(k, 512) + k // 512 + 2) * (size + 4)
        assert (np.abs(layer.run(library, x) - exact) <= bound).all()
        assert (np.abs(layer.run(library, x, bias) - (exact + bias)) <= bound).all()


@pytest.mark.parametrize("fmt", [*F8, Format("f8", 1152)], ids=str)
def test_f8_multiplies(library: KernelLibrary, fmt: Format, rng: np.random.Generator) -> None:
    for n, rows in ((1, 1), (70, 1), (33, 3), (131, 9), (48, 17), (50, 70)):
        layer = make_layer(library, fmt, n, 1152, rng)
        x = rng.standard_normal((rows, 1152)).astype(np.float32)
        bias = rng.standard_normal(n).astype(np.float32)
        exact = x.astype(np.float64) @ layer.weights.T.astype(np.float64)
        size = np.abs(x.astype(np.float64)) @ np.abs(layer.weights.T.astype(np.float64))
        bound = 2.0**-24 * (512 + 1152 // 32 + 3) * (size + 4)
        assert (np.abs(layer.run(library, x) - exact) <= bound).all()
        assert (np.abs(layer.run(library, x, bias) - (exact + bias)) <= bound).all()


@pytest.mark.parametrize("fmt", INTEGERS, ids=str)
def test_integer_formats_multiply(library: KernelLibrary, fmt: Format, rng: np.random.Generator) -> None:
    for n, rows in ((1, 1), (70, 1), (33, 2), (50, 3), (131, 9), (48, 17)):
        layer = make_layer(library, fmt, n, 1152, rng)
        x = rng.standard_normal((rows, 1152)).astype(np.float32)
        x[:, 32:64] = 0
        x[:, 64:96] *= 1000
        bias = rng.standard_normal(n).astype(np.float32)
        emulated, size = emulate(layer, x)
        bound = 2.0**-24 * (2 * (1152 // 32) + 4) * (size + 4)
        assert (np.abs(layer.run(library, x) - emulated) <= bound).all()
        assert (np.abs(layer.run(library, x, bias) - (emulated + bias)) <= bound).all()
        # Against the weights and x themselves: what 8 bits of x cost, half a step of each block's scale.
        exact = x.astype(np.float64) @ layer.weights.T.astype(np.float64)
        step = np.repeat(quantised_rows(x, 32)[1], 32, 1) if fmt.block == 32 else np.abs(x).max() / 127
        worst = (0.5001 * step * np.ones_like(x)).astype(np.float64) @ np.abs(
            layer.weights.T.astype(np.float64)
        )
        assert (np.abs(layer.run(library, x) - exact) <= worst + bound).all()


@pytest.mark.parametrize("fmt", INTEGERS, ids=str)
def test_outliers_of_a_row_do_not_drown_their_neighbours(
    library: KernelLibrary, fmt: Format, rng: np.random.Generator
) -> None:
    """One value 100 times the others: its block is as exact as with 15 bits, its batch-mates as they were."""
    layer = make_layer(library, fmt, 70, 1152, rng)
    plain = rng.standard_normal((5, 1152)).astype(np.float32)
    x = plain.copy()
    x[2, 200] = 100
    exact = x.astype(np.float64) @ layer.weights.T.astype(np.float64)
    error = np.abs(layer.run(library, x) - exact)
    plain_error = np.abs(layer.run(library, plain) - plain.astype(np.float64) @ layer.weights.T)
    assert error[2].mean() < 1.5 * plain_error.mean()  # one visit alone: over 5 times
    others = [0, 1, 3, 4]
    np.testing.assert_array_equal(layer.run(library, x)[others], layer.run(library, plain)[others])


@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_a_row_depends_on_itself_alone(library: KernelLibrary, fmt: Format, rng: np.random.Generator) -> None:
    """Bit for bit: whatever the number of rows, their order and the threads."""
    n, k = 163, 1152
    layer = make_layer(library, fmt, n, k, rng)
    x = rng.standard_normal((129, k)).astype(np.float32)
    bias = rng.standard_normal(n).astype(np.float32)
    alone = np.concatenate([layer.run(library, x[i : i + 1], bias) for i in range(len(x))])
    threaded = KernelLibrary(threads=3)
    for rows in (*range(1, 21), 63, 64, 65, 127, 128, 129):
        order = rng.permutation(129)[:rows]
        for some in (library, threaded):
            np.testing.assert_array_equal(layer.run(some, x[order], bias), alone[order])


@pytest.mark.parametrize("fmt", ALL, ids=str)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(
    library: KernelLibrary, fmt: Format, poison: float, rng: np.random.Generator
) -> None:
    layer = make_layer(library, fmt, 40, 384, rng)
    for rows in (1, 2, 7, 20):
        x = rng.standard_normal((rows, 384)).astype(np.float32)
        clean = layer.run(library, x)
        x[rows // 2, rng.integers(384)] = poison
        y = layer.run(library, x)
        others = np.arange(rows) != rows // 2
        np.testing.assert_array_equal(y[others], clean[others])
        assert not np.isfinite(y[rows // 2]).any()
        if fmt.integer:
            assert np.isnan(y[rows // 2]).all()


@pytest.mark.parametrize(
    "fmt", [Format("f32"), Format("f16"), Format("i4", 32, False), Format("i8", 128)], ids=str
)
def test_the_longest_layers(library: KernelLibrary, fmt: Format, rng: np.random.Generator) -> None:
    layer = make_layer(library, fmt, 20, 28672, rng)
    x = rng.standard_normal((5, 28672)).astype(np.float32)
    y = layer.run(library, x)
    if fmt.integer:
        expected, size = emulate(layer, x)
        steps = 2 * 28672 // 32
    else:
        expected = x.astype(np.float64) @ layer.weights.T.astype(np.float64)
        size = np.abs(x.astype(np.float64)) @ np.abs(layer.weights.T.astype(np.float64))
        steps = 512 + 28672 // 512
    assert (np.abs(y - expected) <= 2.0**-24 * (steps + 4) * size).all()
    np.testing.assert_array_equal(layer.run(library, x[3:4]), y[3:4])


@pytest.mark.parametrize("fmt", [Format("i4", 32), Format("i4", 64, False), Format("i8", 32)], ids=str)
@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-40, 1e-30, 1e-8, 1.0, 1e8, 1e30])
def test_extreme_scales(library: KernelLibrary, fmt: Format, size: float, rng: np.random.Generator) -> None:
    """Weights keep a half's 11 bits at any magnitude; below fp32's normal range they lose what it loses."""
    n, k = 18, 128
    shape = (n, k // fmt.block)
    scales = (rng.uniform(0.5, 1, shape) * size).astype(np.float32)
    scales[3] = 0
    minimums = None if fmt.symmetric else (rng.uniform(-1, 1, shape) * size).astype(np.float32)
    low, high = (-127, 128) if fmt.kind == "i8" else (0, 16)
    values = rng.integers(low, high, (n, k)).astype(np.int8 if fmt.kind == "i8" else np.uint8)
    packed = library.pack_linear(values, scales, minimums, **fmt.arguments)
    unpacked = library.unpack_linear(packed, rows=n, columns=k, **fmt.arguments)
    q = values.astype(np.float64) - (8 if fmt.kind == "i4" and fmt.symmetric else 0)
    exact = q * np.repeat(scales, fmt.block, 1)
    spread = np.abs(exact)
    if minimums is not None:
        exact = exact + np.repeat(minimums, fmt.block, 1)
        spread = spread + np.abs(np.repeat(minimums, fmt.block, 1))
    denormal = 128 * 2.0**-149 + 2.0**-126 * 2.0**-24 * 128
    assert (np.abs(unpacked - exact) <= spread * 2.0**-11 * 1.001 + denormal).all()
    x = rng.standard_normal((3, k)).astype(np.float32)
    y = library.run_linear(x, packed, out_features=n, **fmt.arguments)
    assert np.isfinite(y).all()
    worst = np.abs(x).max() / 127 * np.abs(unpacked).astype(np.float64).sum(1)
    assert (np.abs(y - x.astype(np.float64) @ unpacked.T.astype(np.float64)) <= worst + k * denormal).all()


@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1e-31, 1e-25, 1e25, 1e30])
def test_extreme_rows(library: KernelLibrary, magnitude: float, rng: np.random.Generator) -> None:
    """x from subnormal to 1e30, where sums of normalised scales end; below 2^-100 a block counts as zero."""
    layer = make_layer(library, Format("i4", 32, False), 21, 256, rng)
    x = (rng.uniform(-1, 1, (4, 256)) * magnitude).astype(np.float32)
    emulated, size = emulate(layer, x)
    assert (np.abs(layer.run(library, x) - emulated) <= 2.0**-20 * size).all()
    if magnitude < float(SMALLEST) / 2:
        assert not layer.run(library, x).any()


def test_padding_is_not_read_nor_written(library: KernelLibrary, rng: np.random.Generator) -> None:
    """Columns past N: y has a fence behind its last row, and poisoned padding changes nothing."""
    for fmt in (Format("f32"), Format("f16"), Format("i4", 32, False), Format("i8", 32)):
        layer = make_layer(library, fmt, 19, 64, rng)
        x = rng.standard_normal((4, 64)).astype(np.float32)
        clean = layer.run(library, x)
        assert np.isfinite(clean).all()
        assert clean.shape == (4, 19)
        if not fmt.integer:
            panel = layer.packed[layer.packed.size // 2 :].view(DTYPES[fmt.kind])[: 64 * 16].reshape(64, 16)
            assert not panel[:, 3:].any()
            panel[:, 3:] = np.nan
            np.testing.assert_array_equal(layer.run(library, x), clean)


def test_no_rows(library: KernelLibrary, rng: np.random.Generator) -> None:
    layer = make_layer(library, Format("i4", 32), 20, 64, rng)
    assert layer.run(library, np.zeros((0, 64), np.float32)).shape == (0, 20)


@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_layout_names(library: KernelLibrary, fmt: Format) -> None:
    name = library.linear_layout(rows=16, columns=384, **fmt.arguments)
    assert name.startswith(f"cpu-panel16-{fmt.kind}")
    assert name.endswith("-v1")
    if fmt.block:
        block = next(b for b in (128, 64, 32) if fmt.block % b == 0)
        assert name == f"cpu-panel16-{fmt.kind}b{block}{'' if fmt.symmetric else 'm'}-v1"


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


@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512vnni"])
def test_suite_under_each_isa(level: str) -> None:
    """Every test above with the kernels of a lower ISA; one that this processor lacks is refused by name."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        [*command, "-k", "not suite_under_each_isa"],
        env=os.environ | {"ENGINEBAY_ISA": level},
        capture_output=True,
        text=True,
        check=False,
    )
    refused = "but this processor goes up to" in done.stdout
    assert refused or (done.returncode == 0 and "passed" in done.stdout), done.stdout[-3000:]
