from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginebay.builder.quant import gptq
from enginebay.builder.quant.formats import QuantizationError, WeightFormat
from enginebay.builder.quant.gptq import GptqConfig, best_grid, damped, gptq_rows, loss, rounded_rows
from enginebay.builder.quant.rtn import dequantize_rows, quantize_rows
from enginebay.plugins.reference import to_f8

F8 = WeightFormat("f8", 16)
FORMATS = (WeightFormat("i4", 16), WeightFormat("i4", 16, symmetric=False), WeightFormat("i8", 16), F8)


def problem(seed, rows=6, columns=32, tokens=200):
    """Weights and the H of correlated inputs."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, columns)) @ (
        np.eye(columns) + rng.standard_normal((columns, columns)) / 2
    )
    return rng.standard_normal((rows, columns)).astype(np.float32), x.T @ x


def solve_exactly(weights, hessian, fmt, config):
    """The same problem from its definition, in float64: fix one column, then move those left to the
    least-squares optimum, by inverting what is left of H anew at every step."""
    h = damped(hessian, config.damping)
    order = np.argsort(-np.diag(hessian), kind="stable") if config.act_order else np.arange(len(h))
    scales, minimums = best_grid(weights, hessian, fmt, config.shrinks)
    block = fmt.scale_block(weights.shape[1])
    low, high = {"i8": (-127, 127), "f8": (-448, 448)}.get(fmt.kind, (0, 15))
    w = weights.astype(np.float64)
    values = np.zeros(w.shape)
    for place, k in enumerate(order):
        scale = scales[:, k // block].astype(np.float64)
        offset = minimums[:, k // block] if minimums is not None else -(8 if fmt.kind == "i4" else 0) * scale
        steps = np.clip((w[:, k] - offset) / scale, low, high)
        values[:, k] = to_f8(steps) if fmt.kind == "f8" else np.rint(steps)
        change = values[:, k] * scale + offset - w[:, k]
        w[:, k] += change
        rest = order[place + 1 :]
        if len(rest):
            w[:, rest] += -np.outer(change, np.linalg.solve(h[np.ix_(rest, rest)], h[rest, k]))
    return values


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(FORMATS), st.booleans(), st.sampled_from([1, 5, 64]))
def test_gptq_is_the_exact_solution_of_its_definition(seed, fmt, act_order, column_block):
    weights, hessian = problem(seed)
    config = GptqConfig(act_order=act_order, column_block=column_block)
    rows = gptq_rows(weights, hessian, fmt, "w", config)
    expected = solve_exactly(weights, hessian, fmt, config)
    # A weight half a step from two grid points may round either way in float32, and its row then goes on
    # otherwise.
    same = (rows.values.astype(float) == expected).all(axis=1)
    assert same.mean() >= 5 / 6
    exact = dequantize_rows(type(rows)(fmt, expected.astype(rows.values.dtype), rows.scales, rows.minimums))
    ours, theirs = (loss(d - weights, hessian) for d in (dequantize_rows(rows), exact))
    assert ours == pytest.approx(theirs, rel=0.2)


def test_gptq_is_between_rounding_and_the_best_of_all_grids_points():
    """Four columns: every one of 16^4 choices can be tried."""
    fmt = WeightFormat("i4", 4, symmetric=False)
    config = GptqConfig(damping=1e-6, shrinks=(1.0,))
    totals = np.zeros(3)
    for seed in range(24):
        weights, hessian = problem(seed, rows=1, columns=4, tokens=20)
        rows = gptq_rows(weights, hessian, fmt, "w", config)
        grid = np.array(list(itertools.product(range(16), repeat=4)))
        points = grid * rows.scales[0, 0] + rows.minimums[0, 0]
        difference = points - weights
        best = np.einsum("nk,kl,nl->n", difference, hessian, difference).min()
        ours = loss(dequantize_rows(rows) - weights, hessian)
        rounded = loss(dequantize_rows(quantize_rows(weights, fmt, "w")) - weights, hessian)
        assert ours >= best * (1 - 1e-3)
        totals += best, ours, rounded
    assert totals[0] < totals[1] < totals[2]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.key)
def test_gptq_loses_less_than_rounding(fmt):
    weights, hessian = problem(7, rows=64, columns=64)
    ours = loss(dequantize_rows(gptq_rows(weights, hessian, fmt, "w")) - weights, hessian)
    rounded = loss(dequantize_rows(quantize_rows(weights, fmt, "w")) - weights, hessian)
    assert ours < 0.75 * rounded


def test_rows_are_solved_alike_whatever_they_are_solved_with(monkeypatch):
    weights, hessian = problem(9, rows=50)
    for fmt in FORMATS:
        whole = gptq_rows(weights, hessian, fmt, "w")
        rounded = rounded_rows(weights, hessian, fmt, (1.0, 0.8))
        monkeypatch.setattr(gptq, "ROWS", 16)
        for one, other in (
            (whole, gptq_rows(weights, hessian, fmt, "w")),
            (rounded, rounded_rows(weights, hessian, fmt, (1.0, 0.8))),
        ):
            # Matrix products of other heights may add in another order: all but a near tie is the same.
            assert (one.values.astype(float) == other.values.astype(float)).mean() > 0.99
            np.testing.assert_allclose(one.scales, other.scales, rtol=0.3)
        monkeypatch.undo()


def test_without_correlations_gptq_rounds_to_nearest():
    weights, _ = problem(1)
    fmt = WeightFormat("i4", 16, symmetric=False)
    rows = gptq_rows(weights, np.eye(32), fmt, "w", GptqConfig(shrinks=(1.0,)))
    np.testing.assert_array_equal(rows.values, quantize_rows(weights, fmt, "w").values)


def test_weights_on_the_grid_stay():
    weights, hessian = problem(2)
    fmt = WeightFormat("i4", 16, symmetric=False)
    on_grid = dequantize_rows(quantize_rows(weights, fmt, "w"))
    np.testing.assert_allclose(dequantize_rows(gptq_rows(on_grid, hessian, fmt, "w")), on_grid, atol=1e-6)


def test_an_input_that_was_always_zero_is_rounded_to_nearest():
    weights, hessian = problem(3)
    hessian[5], hessian[:, 5] = 0, 0
    fmt = WeightFormat("i4", 16, symmetric=False)
    rows = gptq_rows(weights, hessian, fmt, "w", GptqConfig(shrinks=(1.0,)))
    np.testing.assert_array_equal(rows.values[:, 5], quantize_rows(weights, fmt, "w").values[:, 5])


def test_no_input_at_all_is_rounding():
    weights, _ = problem(4)
    fmt = WeightFormat("i4", 16)
    rows = gptq_rows(weights, np.zeros((32, 32)), fmt, "w", GptqConfig(shrinks=(1.0,)))
    np.testing.assert_array_equal(rows.values, quantize_rows(weights, fmt, "w").values)


def test_what_is_not_finite_is_named():
    weights, hessian = problem(5)
    weights[3, 1] = np.nan
    with pytest.raises(QuantizationError, match=r"tensor layers.0.w: weight \[3, 1\] is nan"):
        gptq_rows(weights, hessian, FORMATS[0], "layers.0.w")
    weights[3, 1] = 0
    hessian[0, 0] = np.inf
    with pytest.raises(
        QuantizationError, match=r"tensor layers.0.w: calibration gave inputs that are not finite"
    ):
        gptq_rows(weights, hessian, FORMATS[0], "layers.0.w")
