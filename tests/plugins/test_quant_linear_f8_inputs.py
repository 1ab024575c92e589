"""QuantLinearF8Inputs: what rows become, the product against float64, and what is refused."""

from __future__ import annotations

import os
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from quant_linear_cases import ALL, Format, Layer, make_layer
from test_ort_adapter import session_of

from enginebay.plugins import reference
from enginebay.plugins.load import KernelLibrary, PluginError
from enginebay.plugins.load_f8_inputs import run_f8_inputs

Floats = NDArray[np.float32]
IDENTITY = Format("f32")


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def run(
    library: KernelLibrary, layer: Layer, x: Floats, bias: Floats | None = None, scale: float = 0
) -> Floats:
    return run_f8_inputs(
        library, x, layer.packed, bias, out_features=layer.n, input_scale=scale, **layer.fmt.arguments
    )


def rounded(library: KernelLibrary, x: Floats, scale: float = 0) -> Floats:
    """What rows become: a product with the identity, which adds zeros only."""
    packed = library.pack_linear(np.eye(x.shape[1], dtype=np.float32), format="f32")
    return run_f8_inputs(library, x, packed, out_features=x.shape[1], format="f32", input_scale=scale)


def test_reference_agrees_with_ml_dtypes() -> None:
    x = np.concatenate([np.linspace(-448, 448, 9999), np.geomspace(2.0**-13, 448, 9999)]).astype(np.float32)
    wanted = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(reference.to_f8(x.astype(np.float64)), wanted)


def test_static_scale_saturates(library: KernelLibrary) -> None:
    """The values of a peer's report: a cast of 465 gives NaN there."""
    x = np.array(
        [[448, 464, 465, 1000, -1000, 3e38, 2.0**-9, 2.0**-10, 3 * 2.0**-11, 0.0, -0.0, 17]], np.float32
    )
    wanted = [[448, 448, 448, 448, -448, 448, 2.0**-9, 0, 2.0**-9, 0, 0, 16]]
    np.testing.assert_array_equal(rounded(library, x, 1.0), np.float32(wanted))
    np.testing.assert_array_equal(rounded(library, x * np.float32(0.25), 0.25), np.float32(wanted) / 4)


@pytest.mark.parametrize("scale", [0.0, 0.03], ids=["dynamic", "static"])
def test_rows_are_e4m3_numbers(library: KernelLibrary, rng: np.random.Generator, scale: float) -> None:
    x = (rng.standard_normal((9, 256)) * np.exp2(rng.integers(-9, 9, (9, 1)))).astype(np.float32)
    x[4] = 0
    got = rounded(library, x, scale)
    wanted = reference.f8_inputs(x.astype(np.float64), np.float64(np.float32(scale)))
    # Where x/scale lies within float32's roundings of the middle of two E4M3 numbers, the other is as good.
    step = np.maximum(np.abs(wanted) / 8, 2.0**-9 * (scale or np.abs(x).max(1, keepdims=True) / 448))
    differ = np.abs(got - wanted) > 2.0**-22 * np.abs(wanted)
    assert differ.mean() < 1e-3
    assert (np.abs(got - wanted) <= step * 1.01).all()
    np.testing.assert_array_equal(got[4], 0)


def test_dynamic_scale_reaches_the_largest(library: KernelLibrary) -> None:
    """Each row's largest is 448 steps, however large or small the row."""
    for top in (1e-29, 1e-3, 1.0, 3.0e38):
        got = rounded(library, np.array([[top, -top / 2, 0]], np.float32))
        np.testing.assert_allclose(got, np.float32([[top, -top / 2, 0]]), rtol=2**-22)
    np.testing.assert_array_equal(rounded(library, np.full((1, 3), 2.0**-101, np.float32)), 0)


@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_product(isa_library: KernelLibrary, fmt: Format, rng: np.random.Generator) -> None:
    for n, rows, threads in ((1, 1, 1), (131, 9, 2), (300, 17, 2), (50, 70, 1)):
        isa_library.threads = threads
        layer = make_layer(isa_library, fmt, n, 768, rng)
        x = rng.standard_normal((rows, 768)).astype(np.float32)
        bias = rng.standard_normal(n).astype(np.float32)
        inputs = rounded(isa_library, x).astype(np.float64)
        exact = inputs @ layer.weights.T.astype(np.float64)
        size = np.abs(inputs) @ np.abs(layer.weights.T.astype(np.float64))
        bound = 2.0**-24 * 520 * (size + 4)
        assert (np.abs(run(isa_library, layer, x) - exact) <= bound).all()
        assert (np.abs(run(isa_library, layer, x, bias) - (exact + bias)) <= bound).all()
    isa_library.threads = 1


@pytest.mark.parametrize("fmt", [Format("i4", 32, False), Format("i8", 128), Format("f8", 32)], ids=str)
def test_a_row_alone_is_the_row_among_others(
    library: KernelLibrary, fmt: Format, rng: np.random.Generator
) -> None:
    layer = make_layer(library, fmt, 290, 384, rng)
    x = (rng.standard_normal((67, 384)) * np.exp2(rng.integers(-5, 5, (67, 1)))).astype(np.float32)
    together = run(library, layer, x)
    for row in (0, 8, 31, 66):
        np.testing.assert_array_equal(run(library, layer, x[row : row + 1])[0], together[row])
    library.threads = 2
    np.testing.assert_array_equal(run(library, layer, x), together)
    library.threads = 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scale", [0.0, 0.5])
def test_a_row_that_is_not_finite_is_nan_alone(
    library: KernelLibrary, bad: float, scale: float, rng: np.random.Generator
) -> None:
    layer = make_layer(library, Format("i4", 64), 40, 128, rng)
    x = rng.standard_normal((5, 128)).astype(np.float32)
    clean = run(library, layer, x, scale=scale)
    x[2, 77] = bad
    got = run(library, layer, x, scale=scale)
    assert np.isnan(got[2]).all()
    np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(clean, 2, 0))


@pytest.mark.parametrize("scale", [-1.0, np.nan, np.inf, 1e-40])
def test_bad_scales_are_refused(library: KernelLibrary, scale: float) -> None:
    with pytest.raises(PluginError, match=r"input_scale .* is neither 0"):
        rounded(library, np.ones((1, 4), np.float32), scale)
    attributes = {"in_features": 4, "out_features": 4, "format": "f32", "input_scale": scale}
    x = np.ones((1, 4), np.float32)
    with pytest.raises(Exception, match=r"the_node.*input_scale"):
        session_of("QuantLinearF8Inputs", {"x": x, "weight": np.zeros(256, np.uint8)}, attributes)


@pytest.mark.parametrize("scale", [0.0, 0.03], ids=["dynamic", "static"])
def test_repeated_inputs_bring_what_rounding_left(
    library: KernelLibrary, rng: np.random.Generator, scale: float
) -> None:
    x = (rng.standard_normal((9, 200)) * np.exp2(rng.integers(-3, 3, (9, 1)))).astype(np.float32)
    x[4], x[5, 0] = 0, 1e4  # saturates where the scale is static
    twice = rng.permutation(200)[:56]
    packed = library.pack_linear(np.eye(256, dtype=np.float32), format="f32")

    def rows(x: Floats) -> Floats:
        return run_f8_inputs(
            library, x, packed, out_features=256, format="f32", input_scale=scale, repeated=twice.tolist()
        )

    got, wanted = rows(x), reference.f8_inputs(x.astype(np.float64), np.float64(np.float32(scale)), twice)
    differ = np.abs(got - wanted) > 2.0**-20 * np.abs(wanted)  # ties, and the residual of a float32 product
    assert differ[:, :200].mean() < 1e-3
    assert differ[:, 200:].mean() < 0.05
    total, largest = got[:, twice] + got[:, 200:], scale * 448 or np.inf
    step = (scale or np.abs(x).max(axis=1, keepdims=True) / 448) * 2.0**-9 / 16
    inside = np.abs(x[:, twice]) <= largest
    error = np.abs(total - x[:, twice])
    assert (error <= np.maximum(np.abs(x[:, twice]) * 2.0**-8, step * 1.01))[inside].all()
    x[2, 5] = np.inf
    assert np.isnan(rows(x)[2]).all()


@pytest.mark.parametrize(("repeated", "words"), [([96], "repeated.1. is 96, x has 96"), ([-1], "is -1")])
def test_repeated_inputs_lie_within_x(
    library: KernelLibrary, rng: np.random.Generator, repeated: list[int], words: str
) -> None:
    layer = make_layer(library, Format("f32"), 40, 98, rng)
    x = np.ones((1, 96), np.float32)
    with pytest.raises(PluginError, match=words):
        run_f8_inputs(library, x, layer.packed, out_features=40, format="f32", repeated=[3, *repeated])


def test_no_rows(library: KernelLibrary, rng: np.random.Generator) -> None:
    layer = make_layer(library, Format("i4", 32), 40, 64, rng)
    assert run(library, layer, np.zeros((0, 64), np.float32)).shape == (0, 40)


@pytest.mark.parametrize("scale", [0.0, 0.125])
def test_in_onnx_runtime(library: KernelLibrary, scale: float, rng: np.random.Generator) -> None:
    layer = make_layer(library, Format("i4", 32, False), 40, 64, rng)
    x, bias = rng.standard_normal((7, 64)).astype(np.float32), rng.standard_normal(40).astype(np.float32)
    arguments: dict[str, Any] = layer.fmt.arguments
    attributes = {**arguments, "symmetric": 0, "in_features": 64, "out_features": 40, "input_scale": scale}
    inputs = {"x": x, "weight": layer.packed, "bias": bias}
    session: ort.InferenceSession = session_of("QuantLinearF8Inputs", inputs, attributes)
    np.testing.assert_array_equal(session.run(None, inputs)[0], run(library, layer, x, bias, scale))
    twice = np.array([5, 17, 30, 31] * 8, np.int32)
    inputs = {"x": x[:, :32].copy(), "weight": layer.packed, "bias": bias, "repeated": twice}
    session = session_of("QuantLinearF8Inputs", inputs, attributes)
    wanted = run_f8_inputs(
        *(library, x[:, :32].copy(), layer.packed, bias),
        out_features=40,
        input_scale=scale,
        repeated=twice.tolist(),
        **arguments,
    )
    np.testing.assert_array_equal(session.run(None, inputs)[0], wanted)
    inputs["repeated"][0] = 32
    with pytest.raises(Exception, match=r"the_node.*repeated.0. is 32"):
        session.run(None, inputs)
