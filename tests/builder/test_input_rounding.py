"""Which inputs are multiplied twice, and their columns."""

from __future__ import annotations

import numpy as np
import pytest

from enginebay.builder.quant.formats import QuantizationError, WeightFormat
from enginebay.builder.quant.input_rounding import (
    Float8Inputs,
    InputRounding,
    repeat_columns,
    repeated_inputs,
)
from enginebay.builder.quant.rtn import dequantize_rows, quantize_rows
from enginebay.plugins import reference

FORMATS = (WeightFormat("f8", 32), WeightFormat("f8"), WeightFormat("i4", 32, symmetric=False))


def problem(columns=256):
    rng = np.random.default_rng()
    x = rng.standard_normal((50, columns)) * np.exp(rng.standard_normal(columns) * 2)
    return x.astype(np.float32), rng.standard_normal((48, columns)).astype(np.float32)


def test_the_inputs_with_the_most_energy_are_repeated():
    x, weights = problem()
    energy = np.square(x.astype(np.float64)[:, None, :] * weights).sum(axis=(0, 1))
    expected = np.sort(np.argsort(-energy)[:64])
    np.testing.assert_array_equal(repeated_inputs(WeightFormat("f8", 32), 0.25, x, weights), expected)


@pytest.mark.parametrize(
    ("block", "share", "count"), [(32, 0.25, 64), (128, 0.25, 128), (0, 0.25, 64), (32, 0.01, 32), (32, 0, 0)]
)
def test_repeated_inputs_are_whole_blocks(block, share, count):
    assert len(repeated_inputs(WeightFormat("f8", block), share, *problem())) == count


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.key)
def test_repeated_inputs_take_most_of_the_error_away(fmt):
    """The product as kernels form it, beside that of exact inputs with the same weights."""
    x, weights = problem()
    rows = quantize_rows(weights, fmt, "w")
    twice = repeated_inputs(fmt, 0.25, x, weights)
    exact = x.astype(np.float64) @ dequantize_rows(rows).T
    once = reference.f8_inputs(x.astype(np.float64)) @ dequantize_rows(rows).T
    both = (
        reference.f8_inputs(x.astype(np.float64), repeated=twice)
        @ dequantize_rows(repeat_columns(rows, twice)).T
    )
    assert np.square(both - exact).mean() < 0.25 * np.square(once - exact).mean()


def test_columns_stay_where_they_were():
    _, weights = problem()
    for fmt in FORMATS:
        rows = quantize_rows(weights, fmt, "w")
        more = dequantize_rows(repeat_columns(rows, np.arange(3, 35, dtype=np.int32)))
        np.testing.assert_array_equal(more[:, :256], dequantize_rows(rows))
        step = 2.0**-4 if fmt.kind == "f8" else 0.2
        np.testing.assert_allclose(more[:, 256:], dequantize_rows(rows)[:, 3:35], rtol=step, atol=0.2)


def test_inputs_that_are_not_finite_name_the_layer():
    x, weights = problem()
    x[3, 7] = np.inf
    with pytest.raises(QuantizationError, match=r"layer layers\.0\.mlp\.down: its inputs"):
        InputRounding().calibrate("layers.0.mlp.down", FORMATS[0], Float8Inputs(), x, weights)
