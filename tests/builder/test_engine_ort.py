"""Engines of every recipe in ONNX Runtime with the compiled kernels, against float64 references."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builder_support import KV_HEADS, LAYERS, OPS, VOCAB, PagedAttention, PlainLibrary, ragged_step
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import ShapeInferencePass

from enginebay.builder.build import BuildConfig, build_engine
from enginebay.builder.exported import read_exported
from enginebay.builder.packing import WeightPacker
from enginebay.builder.packing_library import CpuPackingLibrary
from enginebay.builder.quant.cache import CACHES
from enginebay.builder.quant.calibrate import calibrate
from enginebay.builder.quant.formats import WeightFormat
from enginebay.builder.quant.interpreter import Batch
from enginebay.builder.quant.plan import RoundToNearest
from enginebay.builder.quant.recipes import recipe
from enginebay.builder.quant.rtn import QuantizedRows, quantize_rows
from enginebay.builder.quant.text import CalibrationConfig
from enginebay.builder.targets.base import CacheLayout
from enginebay.builder.targets.ort_cpu import OrtCpu
from enginebay.builder.weights import ROW_GROUP
from enginebay.export.stepping import Stepper, Stream
from enginebay.triton_repo.runtime.ort_engine import EngineOptions, OrtEngine

TOKENS = np.random.default_rng(8).integers(0, VOCAB, (4, 32))


def reference_logits(source, quant, feeds, scratch=None):
    """Float64 logits of the canonical graph, its weights replaced by what the recipe makes of them."""
    model = read_exported(source).model
    ops = [PagedAttention]
    if quant is not None:
        quantizer, inputs = RoundToNearest(), None
        if recipe(quant).calibrated:
            ShapeInferencePass()(model)
            scratch.mkdir()
            quantizer = calibrate(model, recipe(quant), Batch(tuple(map(tuple, TOKENS.tolist()))), scratch)
            inputs = quantizer.inputs
        packer = WeightPacker(recipe(quant), PlainLibrary(), quantizer, inputs)
        OrtCpu().lower(model, packer, CacheLayout(CACHES["fp32"], 4))
        ops = OPS
    caches = {f"cache.{n}": np.zeros((8, 2, 4, KV_HEADS, 16), np.float32) for n in range(LAYERS)}
    proto = ir.to_proto(ir.external_data.load_to_model(model))
    return ReferenceEvaluator(proto, new_ops=ops).run(["logits"], {**feeds, **caches})[0]


def engine_of(source, out, **options):
    tokens = out.with_suffix(".npy")
    np.save(tokens, TOKENS)
    calibration = CalibrationConfig(source=tokens)
    build_engine(source, out, BuildConfig(block_size=4, calibration=calibration, **options))
    return OrtEngine(out, EngineOptions(threads=2, num_blocks=64))


@pytest.fixture
def step():
    return ragged_step(np.random.default_rng(11), VOCAB, list(range(15)))


class Feeds:
    """A step's arrays under the names that the runtime reads."""

    def __init__(self, feeds):
        for name, array in feeds.items():
            setattr(self, name.removesuffix(".0"), array)


@pytest.mark.parametrize(("tied", "bias"), [(True, False), (False, True)])
def test_fp32_engine_equals_the_canonical_graph(exported, tmp_path, step, tied, bias):
    source = exported(tied=tied, bias=bias)
    engine = engine_of(source, tmp_path / "engine", quant="fp32")
    np.testing.assert_allclose(engine.run(Feeds(step)), reference_logits(source, None, step), atol=1e-4)


@pytest.mark.parametrize(
    ("quant", "tolerance"),
    [
        *(("fp32", 1e-4), ("fp16", 1e-4), ("bf16", 1e-4), ("fp8", 0.05)),
        *(("fp8-w8a8", 0.05), ("w4a8", 0.05), ("int8", 0.15), ("int4", 0.15)),
    ],
)
def test_an_engine_multiplies_by_what_its_recipe_made_of_the_weights(
    exported, tmp_path, step, quant, tolerance
):
    """Integer formats round the activations to 8 bits too: logits here are of size 1 to 4. E4M3 inputs are
    rounded by the reference as well, to the same numbers but where the two lie close to a tie."""
    source = exported()
    engine = engine_of(source, tmp_path / "engine", quant=quant, kv_cache="fp32")
    actual = engine.run(Feeds(step))
    expected = reference_logits(source, quant, step, tmp_path / "scratch")
    np.testing.assert_allclose(actual, expected, atol=tolerance)
    assert np.abs(actual - expected).mean() < tolerance / 4


@pytest.mark.parametrize("cache", ["fp16", "bf16"])
def test_a_narrow_cache_costs_its_rounding(exported, tmp_path, step, cache):
    source = exported()
    engine = engine_of(source, tmp_path / "engine", quant="fp32", kv_cache=cache)
    error = np.abs(engine.run(Feeds(step)) - reference_logits(source, None, step)).max()
    assert 0 < error < {"fp16": 5e-3, "bf16": 5e-2}[cache]


@pytest.mark.parametrize(
    "quant", ["fp32", "fp16", "fp8", "fp8-w8a8", "fp8-w8a8-static", "w4a8", "int8", "int4"]
)
def test_a_row_is_the_same_whatever_it_is_batched_with(exported, tmp_path, quant):
    engine = engine_of(exported(), tmp_path / "engine", quant=quant)
    rng = np.random.default_rng(5)
    sequences = [rng.integers(0, VOCAB, n).tolist() for n in (17, 3, 9, 26)]

    def alone(tokens):
        return Stepper(engine).step([(Stream(list(tokens)), len(tokens))])[0].copy()

    solo = [alone(tokens) for tokens in sequences]
    together = Stepper(engine).step([(Stream(list(tokens)), len(tokens)) for tokens in sequences])
    for mine, theirs in zip(together, solo, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    stepper, stream, chunks = Stepper(engine), Stream(list(sequences[3])), []
    for count in (5, 1, 12, 8):
        chunks.append(stepper.step([(stream, count)])[0].copy())
    np.testing.assert_array_equal(np.concatenate(chunks), solo[3])


def test_logits_of_no_rows(exported, tmp_path, step):
    engine = engine_of(exported(), tmp_path / "engine", quant="int4")
    step["logits_index"] = np.zeros(0, np.int32)
    assert engine.run(Feeds(step)).shape == (0, VOCAB)


@pytest.mark.parametrize(
    "fmt",
    [
        WeightFormat("f32"),
        WeightFormat("f16"),
        WeightFormat("bf16"),
        WeightFormat("i8"),
        WeightFormat("i8", 32),
        WeightFormat("f8", 64),
        WeightFormat("f8", 128),
    ]
    + [WeightFormat("i4", b, symmetric=s) for b in (32, 64, 128) for s in (True, False)],
    ids=lambda f: f.key,
)
@pytest.mark.parametrize("rows", [1, 64, 100, 333])
def test_packing_by_groups_of_rows_is_packing_at_once(fmt, rows):
    """What streaming relies on, for a row count that is no multiple of anything."""
    library = CpuPackingLibrary()
    w = np.random.default_rng(rows).standard_normal((rows, 128)).astype(np.float32)
    whole = library.pack(quantize_rows(w, fmt, "w"))
    assert whole.nbytes == library.packed_bytes(fmt, w.shape)
    parts = [library.pack(quantize_rows(w[i : i + ROW_GROUP], fmt, "w")) for i in range(0, rows, ROW_GROUP)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_the_library_stores_what_was_fitted():
    """Scales of 11 bits survive packing, so that the report's error is the engine's error."""
    from enginebay.plugins.load import KernelLibrary

    w = np.random.default_rng(0).standard_normal((40, 128)).astype(np.float32) * 1e-3
    for fmt in (WeightFormat("i4", 32, symmetric=False), WeightFormat("i4", 64), WeightFormat("i8")):
        rows: QuantizedRows = quantize_rows(w, fmt, "w")
        block = fmt.scale_block(128)
        stored = KernelLibrary().unpack_linear(
            CpuPackingLibrary().pack(rows),
            rows=40,
            columns=128,
            format=fmt.kind,
            block_size=block,
            symmetric=fmt.symmetric,
        )
        steps = np.repeat(rows.scales, block, axis=1)
        values = rows.values.astype(np.float64)
        if rows.minimums is not None:
            expected = values * steps + np.repeat(rows.minimums, block, axis=1)
        else:
            expected = (values - (8 if fmt.kind == "i4" else 0)) * steps
        np.testing.assert_allclose(stored, expected, rtol=1e-6, atol=1e-10)


def test_a_layer_the_kernels_cannot_pack_is_named(exported, tmp_path):
    from enginebay.builder.quant.formats import QuantizationError
    from enginebay.builder.quant.recipes import Override

    config = BuildConfig(overrides=(Override("layers.0.mlp.down", WeightFormat("i4", 16)),))
    with pytest.raises(QuantizationError, match=r"i4.b16.sym: QuantLinear: block_size 16 .* multiple of 32"):
        build_engine(exported(), tmp_path / "engine", config)


def test_engine_is_valid_onnx_apart_from_our_ops(exported, tmp_path):
    out = tmp_path / "engine"
    build_engine(exported(), out, BuildConfig(quant="int4"))
    onnx.checker.check_model(out / "engine.onnx", full_check=True)
