from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from ml_dtypes import bfloat16, float8_e4m3fn

from enginebay.builder.quant.formats import QuantizationError, WeightFormat
from enginebay.builder.quant.rtn import dequantize_rows, eleven_bits, quantize_rows

I4 = WeightFormat("i4", 32, symmetric=False)
I4_SYMMETRIC = WeightFormat("i4", 32)
I8 = WeightFormat("i8", 32)
I8_ROWS = WeightFormat("i8")
INTEGER = (I4, I4_SYMMETRIC, I8, I8_ROWS, WeightFormat("i4", 64), WeightFormat("i4", 16, symmetric=False))

weights = arrays(
    np.float32,
    st.tuples(st.integers(1, 5), st.sampled_from([64, 128])),
    elements=st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, -0.0, 2.0**-100, -(2.0**-100), 1.0]),
)


def step_sizes(rows):
    """Each weight's grid step."""
    return np.repeat(rows.scales, rows.values.shape[1] // rows.scales.shape[1], axis=1)


@settings(max_examples=150, deadline=None)
@given(weights, st.sampled_from(INTEGER))
def test_every_weight_lands_on_the_nearest_grid_point(w, fmt):
    rows = quantize_rows(w, fmt, "w")
    steps = step_sizes(rows)
    # Half a step, and what rounding the scale or the minimum to 11 bits can leave out of the grid's reach.
    extent = np.abs(w).reshape(len(w), -1, fmt.scale_block(w.shape[1])).max(axis=2)
    slack = np.repeat(extent, fmt.scale_block(w.shape[1]), axis=1) * 2.0**-10
    slack += 127 * 2.0 ** (12 - 149)  # a subnormal scale has fewer bits to keep
    assert np.all(np.abs(dequantize_rows(rows) - w) <= steps / 2 + slack)
    assert np.all(rows.scales > 0)
    assert np.all(np.isfinite(rows.scales))
    low, high = (-127, 127) if fmt.kind == "i8" else (0, 15)
    assert rows.values.min() >= low
    assert rows.values.max() <= high


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([16, 32, 64]))
def test_weights_on_a_four_bit_grid_come_back_exactly(seed, block):
    """A checkpoint made from 4-bit blocks with half-precision scale and minimum, held in float32."""
    rng = np.random.default_rng(seed)
    d = eleven_bits(rng.uniform(1e-4, 1e-2, (3, 128 // block)).astype(np.float32))
    m = eleven_bits(rng.uniform(-0.1, 0.0, (3, 128 // block)).astype(np.float32))
    q = rng.integers(0, 16, (3, 128 // block, block))
    q[:, :, 0], q[:, :, 1] = 0, 15
    w = (q * d[:, :, None] + m[:, :, None]).reshape(3, 128).astype(np.float32)
    rows = quantize_rows(w, WeightFormat("i4", block, symmetric=False), "w")
    np.testing.assert_array_equal(rows.values, q.reshape(3, 128))
    np.testing.assert_array_equal(rows.scales, d)
    np.testing.assert_array_equal(rows.minimums, m)
    np.testing.assert_array_equal(dequantize_rows(rows), w)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_weights_on_an_eight_bit_grid_come_back_exactly(seed):
    rng = np.random.default_rng(seed)
    d = eleven_bits(rng.uniform(1e-5, 1e-2, (3, 4)).astype(np.float32))
    q = rng.integers(-127, 128, (3, 4, 32))
    q[:, :, 5] = 127
    w = (q * d[:, :, None]).reshape(3, 128).astype(np.float32)
    rows = quantize_rows(w, I8, "w")
    np.testing.assert_array_equal(rows.values, q.reshape(3, 128))
    np.testing.assert_array_equal(dequantize_rows(rows), w)


@pytest.mark.parametrize("fmt", INTEGER, ids=lambda f: f.key)
@pytest.mark.parametrize("value", [0.0, -0.0])
def test_zeros_come_back_as_zeros_with_a_finite_scale(fmt, value):
    rows = quantize_rows(np.full((2, 64), value, np.float32), fmt, "w")
    np.testing.assert_array_equal(rows.scales, 1.0)
    result = dequantize_rows(rows)
    np.testing.assert_array_equal(result, 0.0)
    assert not np.signbit(result).any()


def test_a_constant_block_is_its_minimum():
    rows = quantize_rows(np.full((1, 32), -0.75, np.float32), I4, "w")
    np.testing.assert_array_equal(rows.minimums, -0.75)
    np.testing.assert_array_equal(dequantize_rows(rows), -0.75)


def test_symmetric_grid_ends_at_minus_eight_and_seven():
    w = np.zeros((2, 32), np.float32)
    w[0, 0], w[1, 0] = -8.0, 7.0
    rows = quantize_rows(w, I4_SYMMETRIC, "w")
    np.testing.assert_array_equal(rows.scales, 1.0)
    assert rows.values[0, 0] == 0
    assert rows.values[1, 0] == 15
    np.testing.assert_array_equal(dequantize_rows(rows), w)


def test_tiny_weights_keep_their_relative_error():
    """Scales have float32's exponents: a row of 1e-12 is as good as a row of 1."""
    w = np.random.default_rng(3).standard_normal((4, 128)).astype(np.float32)
    for fmt in INTEGER:
        errors = []
        for factor in (1.0, 1e-12, 1e12):
            scaled = (w * np.float32(factor)).astype(np.float32)
            change = dequantize_rows(quantize_rows(scaled, fmt, "w")) - scaled
            errors.append(np.linalg.norm(change / factor) / np.linalg.norm(w))
        assert errors[1] == pytest.approx(errors[0], rel=0.05)
        assert errors[2] == pytest.approx(errors[0], rel=0.05)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, np.float32(2.0**127)])
@pytest.mark.parametrize("fmt", [*INTEGER, WeightFormat("f32"), WeightFormat("f16"), WeightFormat("bf16")])
def test_weights_that_are_no_numbers_are_named(fmt, bad):
    w = np.ones((3, 64), np.float32)
    w[2, 7] = bad
    with pytest.raises(
        QuantizationError, match=rf"tensor model\.w: weight \[102, 7\] is {re.escape(format(bad, 'g'))};"
    ):
        quantize_rows(w, fmt, "model.w", first_row=100)


def test_float_formats():
    w = np.array([[1.0, 65504.0, -3.1415927, 1e-9]], np.float32)
    np.testing.assert_array_equal(quantize_rows(w, WeightFormat("f16"), "w").values, w.astype(np.float16))
    np.testing.assert_array_equal(quantize_rows(w, WeightFormat("bf16"), "w").values, w.astype(bfloat16))
    np.testing.assert_array_equal(quantize_rows(w, WeightFormat("f32"), "w").values, w)
    with pytest.raises(
        QuantizationError, match=r"tensor w: weight \[0, 1\] is 70000, beyond float16's 65504"
    ):
        quantize_rows(np.array([[1, 70000]], np.float32), WeightFormat("f16"), "w")


F8 = WeightFormat("f8", 32)


def test_e4m3_is_clamped_before_the_cast():
    """464 would round to 448, 465 to NaN: the scale brings the largest to 448, and nothing passes it."""
    assert np.isnan(np.float32(465).astype(float8_e4m3fn))
    for largest in (448.0, 464.0, 465.0, 1000.0, 3e38 / 4):
        w = np.zeros((2, 32), np.float32)
        w[0, :4], w[1, :4] = [largest, -largest, largest / 3, 1.0], [-largest, 0, 0, 0]
        rows = quantize_rows(w, F8, "w")
        bits = rows.values.view(np.uint8)
        assert not np.isin(bits, [0x7F, 0xFF]).any()
        assert 224 <= rows.values[0, 0] <= 448
        assert -448 <= rows.values[1, 0] <= -224
        np.testing.assert_allclose(dequantize_rows(rows)[0, :3], w[0, :3], rtol=2.0**-4)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_e4m3_cannot_mean_is_named(bad):
    with pytest.raises(QuantizationError, match=r"tensor w: weight \[0, 5\]"):
        quantize_rows(np.where(np.arange(32) == 5, bad, 1).astype(np.float32)[None], F8, "w")


def test_a_row_of_zeros_in_e4m3():
    rows = quantize_rows(np.zeros((1, 32), np.float32), F8, "w")
    assert rows.scales[0, 0] == 1
    np.testing.assert_array_equal(dequantize_rows(rows), 0)


@settings(max_examples=80, deadline=None)
@given(weights)
def test_e4m3_keeps_three_bits_of_mantissa(w):
    rows = quantize_rows(w, F8, "w")
    steps = np.repeat(rows.scales, 32, axis=1)
    error = np.abs(dequantize_rows(rows) - w)
    assert np.all(error <= np.maximum(np.abs(w) * 2.0**-4 * 1.001, steps * 2.0**-9))
    plain = np.maximum(np.abs(w).reshape(len(w), -1, 32).max(axis=2) / 448, 1e-30).repeat(32, axis=1)
    rounded = (w / plain).astype(float8_e4m3fn).astype(np.float32) * plain
    assert np.linalg.norm(error) <= np.linalg.norm(rounded - w) * 1.001, "never worse than the largest at 448"


@settings(max_examples=200, deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100))
def test_eleven_bits_is_half_precision_rounding(value):
    value = np.float32(value)
    mantissa, exponent = np.frexp(value)
    expected = np.ldexp(
        np.float32(np.float16(mantissa)), exponent
    )  # |mantissa| in [0.5, 1): float16 has 11 bits
    if abs(value) > 1e-37:
        assert eleven_bits(np.array([value]))[0] == expected


def test_formats_say_what_is_wrong():
    with pytest.raises(QuantizationError, match="'i5' is unknown; there are f32, f16, bf16, f8, i8, i4"):
        WeightFormat("i5")  # type: ignore[arg-type]
    with pytest.raises(QuantizationError, match="needs a positive block size, not 0"):
        WeightFormat("i4")
    with pytest.raises(QuantizationError, match="i8 has no minimum"):
        WeightFormat("i8", 32, symmetric=False)
    with pytest.raises(QuantizationError, match="f16 takes neither"):
        WeightFormat("f16", 32)
    with pytest.raises(
        QuantizationError, match=r"block size 128 does not divide the layer's 576 .*16, 32, 64"
    ):
        WeightFormat("i4", 128).scale_block(576)


@pytest.mark.parametrize(
    ("fmt", "key", "bits"),
    [
        (WeightFormat("f16"), "f16", 16),
        (I8_ROWS, "i8", 8 + 16 / 256),
        (I4, "i4.b32.asym", 5),
        (WeightFormat("f8", 128), "f8.b128", 8.25),
        (WeightFormat("i4", 64), "i4.b64.sym", 4.25),
    ],
)
def test_keys_and_effective_bits(fmt, key, bits):
    assert fmt.key == key
    assert fmt.bits_per_weight(256) == bits
    assert WeightFormat.from_dict(fmt.to_dict()) == fmt
