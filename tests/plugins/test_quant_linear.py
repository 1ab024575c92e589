"""QuantLinear on the CPU: packing, arithmetic against numpy, and that a row depends on itself alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from quant_linear_cases import (
    ALL,
    DTYPES,
    F8,
    FLOATS,
    INTEGERS,
    SMALLEST,
    Format,
    emulate,
    make_layer,
    quantised_rows,
)

from enginebay.plugins.load import KernelLibrary, PluginError


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


@pytest.mark.parametrize("fmt", INTEGERS, ids=str)
def test_integer_kernels_agree_bit_for_bit(
    library: KernelLibrary,
    library_at: Callable[[str], KernelLibrary],
    fmt: Format,
    rng: np.random.Generator,
) -> None:
    """What lets a measurement choose among them. AMX's logic runs over a tile unit in plain C++."""
    layer = make_layer(library, fmt, 83, 768, rng)
    bias = rng.standard_normal(83).astype(np.float32)
    for rows in (1, 7, 16, 17, 40):
        x = rng.standard_normal((rows, 768)).astype(np.float32)
        x[:, ::97] *= 30  # outliers
        x[rows // 2, 3] = np.nan
        expected = layer.run(library, x, bias).tobytes()
        for level in ("avx2", "avx512vnni", "amx", "amx-emulated"):
            try:
                held_back = library_at(level)
            except PluginError:  # not this processor's
                continue
            assert layer.run(held_back, x, bias).tobytes() == expected, (level, rows)


def test_kernels_are_chosen_once_and_named(
    library: KernelLibrary, library_at: Callable[[str], KernelLibrary]
) -> None:
    words = library.linear_kernels(format="i4", block_size=32, symmetric=False)
    assert words == library.linear_kernels(format="i4", block_size=32, symmetric=False)
    assert "not used" not in words  # every kernel of this processor gave the right answers
    for level in ("baseline", "avx2", "amx-emulated"):
        try:
            forced = library_at(level)
        except PluginError as error:
            pytest.skip(f"not run here: {error}")
        assert forced.linear_kernels(format="i8", block_size=128, symmetric=True) == level
    with pytest.raises(PluginError, match="bfloat16 weights are not chosen"):
        library.linear_kernels(format="bf16", block_size=0, symmetric=True)


@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512vnni", "amx-emulated"])
def test_suite_under_each_isa(level: str) -> None:
    """Every test above with the kernels of a lower ISA; one that this processor lacks is refused by name."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        [*command, "-k", "not each_isa and not bit_for_bit and not chosen_once"],
        env=os.environ | {"ENGINEBAY_ISA": level},
        capture_output=True,
        text=True,
        check=False,
    )
    refused = "but this processor goes up to" in done.stdout
    assert refused or (done.returncode == 0 and "passed" in done.stdout), done.stdout[-3000:]
