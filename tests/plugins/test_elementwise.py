"""AddRMSNorm and GatedActivation against float64, row by row."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from enginebay.plugins import ops, reference
from enginebay.plugins.load import KernelLibrary, PluginError

WIDTHS = [1, 7, 16, 65, 576, 1536]


@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm(isa_library: KernelLibrary, width: int) -> None:
    rng = np.random.default_rng()
    x, residual = rng.normal(size=(2, 5, width)).astype(np.float32)
    weight = rng.uniform(0.5, 2, width).astype(np.float32)
    y, total = isa_library.run_add_rms_norm(x, residual, weight, 1e-5)
    wanted, wanted_total = reference.add_rms_norm(
        x.astype(np.float64), residual.astype(np.float64), weight.astype(np.float64), 1e-5
    )
    np.testing.assert_array_equal(total, x + residual)
    np.testing.assert_allclose(total, wanted_total, rtol=1e-6, atol=1e-6)
    # The sum's own rounding, relative to its addends, comes through.
    np.testing.assert_allclose(y, wanted, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 30, 576])
def test_gated_activation(isa_library: KernelLibrary, activation: str, width: int) -> None:
    rng = np.random.default_rng()
    gate_up = rng.normal(scale=4, size=(6, 2 * width)).astype(np.float32)
    gate_up[0, :width] = np.linspace(-100, 100, width)
    got = isa_library.run_gated_activation(gate_up, activation)
    wanted = reference.gated_activation(gate_up.astype(np.float64), activation)
    np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=2e-6)


def test_zeros_extremes_and_nan(isa_library: KernelLibrary) -> None:
    gate = np.array([0, -0.0, 1e-30, -1e4, 1e4, np.nan], np.float32)
    gate_up = np.stack([np.concatenate([gate, np.ones(6, np.float32)])])
    for activation in ops.ACTIVATIONS:
        got = isa_library.run_gated_activation(gate_up, activation)[0]
        assert got[0] == 0
        assert got[1] == 0
        assert abs(got[3]) < 1e-30
        assert got[4] == (1e8 if activation == "relu2" else 1e4)
        assert np.isnan(got[5]), f"{activation} hides NaN"


def test_a_row_is_its_own() -> None:
    """Alone, in a batch, and on two threads: the same bits."""
    rng = np.random.default_rng()
    x, residual = rng.normal(size=(2, 200, 576)).astype(np.float32)
    weight = rng.normal(size=576).astype(np.float32)
    one, two = KernelLibrary(), KernelLibrary(threads=2)
    norms, sums = one.run_add_rms_norm(x, residual, weight, 1e-6)
    for got, wanted in zip(two.run_add_rms_norm(x, residual, weight, 1e-6), (norms, sums), strict=True):
        np.testing.assert_array_equal(got, wanted)
    gated = one.run_gated_activation(x, "silu")
    np.testing.assert_array_equal(two.run_gated_activation(x, "silu"), gated)
    for row in (0, 77, 199):
        alone = one.run_add_rms_norm(x[row : row + 1], residual[row : row + 1], weight, 1e-6)
        np.testing.assert_array_equal(alone[0][0], norms[row])
        np.testing.assert_array_equal(one.run_gated_activation(x[row : row + 1], "silu")[0], gated[row])


def test_plain_norm_and_in_place(library: KernelLibrary) -> None:
    """A null residual means none; y may be x, and sum the residual."""
    rng = np.random.default_rng()
    x, residual = rng.normal(size=(2, 3, 40)).astype(np.float32)
    weight = rng.normal(size=40).astype(np.float32)
    desc = (ctypes.c_int32 * 3).from_buffer_copy(
        np.array([40], np.int32).tobytes() + np.float32(1e-6).tobytes() + np.int32(1).tobytes()
    )
    y = np.full_like(x, np.nan)
    library.call("eb_add_rms_norm_run", desc, 3, x.ctypes.data, None, weight.ctypes.data, y.ctypes.data, None)
    wanted, _ = library.run_add_rms_norm(x, np.zeros_like(x), weight, 1e-6)
    np.testing.assert_array_equal(y, wanted)

    wanted, total = library.run_add_rms_norm(x, residual, weight, 1e-6)
    pointers = (x.ctypes.data, residual.ctypes.data, weight.ctypes.data, x.ctypes.data, residual.ctypes.data)
    library.call("eb_add_rms_norm_run", desc, 3, *pointers)
    np.testing.assert_array_equal(x, wanted)
    np.testing.assert_array_equal(residual, total)


def test_refusals(library: KernelLibrary) -> None:
    half = np.ones((1, 4), np.float16)
    weight = np.ones(4, np.float32)
    with pytest.raises(
        PluginError, match="AddRMSNorm: rows are float16; the CPU library computes in float32"
    ):
        library.run_add_rms_norm(half, half, weight, 1e-6)
    with pytest.raises(PluginError, match="GatedActivation: rows are float16"):
        library.run_gated_activation(half, "silu")
    with pytest.raises(PluginError, match="1 rows of 0 elements"):
        library.run_gated_activation(np.ones((1, 0), np.float32), "silu")


def test_levels_are_different_code(library_at) -> None:
    """ENGINEBAY_ISA really changes what runs: other widths round otherwise."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(50, 1000)).astype(np.float32)
    weight = np.ones(1000, np.float32)
    baseline = library_at("baseline").run_add_rms_norm(x, x, weight, 0.0)[0]
    try:
        avx2 = library_at("avx2").run_add_rms_norm(x, x, weight, 0.0)[0]
    except PluginError as error:
        pytest.skip(f"not run here: {error}")
    assert (baseline != avx2).any()


def test_unknown_isa_is_refused(library_at) -> None:
    with pytest.raises(PluginError, match="ENGINEBAY_ISA=avx1024 is not one of baseline, avx2"):
        library_at("avx1024")
