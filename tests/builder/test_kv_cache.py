"""8-bit and 4-bit caches: scales from calibration, engines against float64 over the same codes, refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from builder_support import MODEL, VOCAB, PagedAttention, ragged_step
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import ShapeInferencePass

from enginebay.builder.build import BuildConfig, build_engine
from enginebay.builder.exported import read_exported
from enginebay.builder.lower.cache import set_cache_layout
from enginebay.builder.manifest import EngineManifest
from enginebay.builder.quant.cache import CACHES, find_cache
from enginebay.builder.quant.cache_scales import StoredCaches, find_constants
from enginebay.builder.quant.evaluate import Logits, exact_weights
from enginebay.builder.quant.formats import QuantizationError
from enginebay.builder.quant.interpreter import Batch, FloatCaches
from enginebay.builder.quant.text import CalibrationConfig
from enginebay.plugins import ops
from enginebay.triton_repo.runtime.ort_engine import EngineOptions, OrtEngine

BLOCK = 4
WIDE = replace(MODEL, heads=2, kv_heads=1, head_dim=32)  # int4 takes 32 values at a time
ELEMENTS = {"int8": np.int8, "fp8": ml_dtypes.float8_e4m3fn, "int4": np.uint8}


def batch_of(rng, lengths=(40, 64, 64, 9)):
    return Batch(tuple(tuple(rng.integers(0, VOCAB, n).tolist()) for n in lengths))


def canonical(source):
    model = read_exported(source).model
    ShapeInferencePass()(model)
    return model


def built(source, out, cache, **options):
    tokens = source.parent / "tokens.json"
    tokens.write_text(json.dumps([list(s) for s in batch_of(np.random.default_rng(3)).sequences]))
    config = BuildConfig(
        quant="fp32", kv_cache=cache, block_size=BLOCK, calibration=CalibrationConfig(tokens), **options
    )
    return build_engine(source, out, config)


class Feeds:
    """A step's arrays under the names that the runtime reads."""

    def __init__(self, feeds):
        for name, array in feeds.items():
            setattr(self, name.removesuffix(".0"), array)


class Kept(FloatCaches):
    """The float32 pools of every layer, as calibration sees them."""

    def __init__(self):
        self.pools = {}

    def written(self, name, pool):
        self.pools[name] = pool.astype(np.float64)


@pytest.mark.parametrize(("cache", "size"), [("int8", MODEL), ("fp8", MODEL), ("int4", WIDE)])
def test_an_engine_equals_the_decoder_over_the_same_codes(exported, tmp_path, cache, size):
    """Float64, the scales of the engine. Where a key lies between two codes float32 may take the other one:
    most logits agree closely, and all within what a step of a code changes."""
    source = exported(tied=False, model=size)
    report = built(source, tmp_path / "engine", cache)
    step = ragged_step(np.random.default_rng(7), VOCAB, list(range(15)))
    model = read_exported(source).model
    set_cache_layout(model.graph, CACHES[cache], BLOCK, report.cache_constants)
    shape = (8, *CACHES[cache].block_shape((2, BLOCK, size.kv_heads, size.head_dim)))
    caches = {f"cache.{n}": np.zeros(shape, ELEMENTS[cache]) for n in range(MODEL.layers)}
    proto = ir.to_proto(ir.external_data.load_to_model(model))
    expected = ReferenceEvaluator(proto, new_ops=[PagedAttention]).run(["logits"], {**step, **caches})[0]
    engine = OrtEngine(tmp_path / "engine", EngineOptions(threads=2, num_blocks=8))
    error = np.abs(engine.run(Feeds(step)) - expected)
    assert np.median(error) < 1e-5
    assert error.max() < 0.02
    built(source, tmp_path / "wide", "fp32")
    exact = OrtEngine(tmp_path / "wide", EngineOptions(threads=2, num_blocks=8)).run(Feeds(step))
    assert 1e-5 < np.abs(expected - exact).max() < {"int8": 0.1, "fp8": 0.5, "int4": 1.0}[cache]


@pytest.mark.parametrize(("seed", "interleaved"), [(0, 0), (1, 0), (2, 1)])
def test_scales_reach_what_calibration_saw_at_whatever_position(exported, seed, interleaved):
    graph = canonical(exported(seed=seed)).graph
    for node in graph:
        if node.op_type == "PagedAttention":
            node.attributes["rope_interleaved"] = ir.AttrInt64("rope_interleaved", interleaved)
    batch = batch_of(np.random.default_rng(seed))
    kept = Kept()
    Logits(graph, batch, exact_weights, kept)
    cache = CACHES["int8"]
    scales = find_constants(graph, batch, exact_weights, cache)
    assert scales.keys() == kept.pools.keys() == {f"cache.{n}" for n in range(MODEL.layers)}
    half = MODEL.head_dim // 2
    for name, pool in kept.pools.items():
        reach = scales[name].astype(np.float64) * cache.largest / cache.headroom
        assert scales[name].shape == cache.constant_shape(pool.shape[1:])
        keys = pool[:, 0]
        parts = (keys[..., ::2], keys[..., 1::2]) if interleaved else (keys[..., :half], keys[..., half:])
        lengths = np.hypot(*parts).max(axis=(0, 1))
        lengths = np.repeat(lengths, 2, axis=-1) if interleaved else np.tile(lengths, 2)
        for got, held in zip(reach, (lengths, np.abs(pool[:, 1]).max(axis=(0, 1))), strict=True):
            assert (got >= held * (1 - 1e-5)).all()
            assert (got <= held * 2**cache.octaves * (1 + 1e-5)).all()


def test_int8_scales_spare_the_first_token(exported):
    """Sequences that all begin alike, 16 times as many others: what it becomes counts as much as theirs."""
    rng = np.random.default_rng(0)
    batch = Batch(tuple((7, *rng.integers(0, VOCAB, 15).tolist()) for _ in range(16)))
    graph = canonical(exported()).graph
    kept = Kept()
    Logits(graph, batch, exact_weights, kept)
    cache = CACHES["int8"]
    plain = replace(cache, choices=1)
    chosen, first = (find_constants(graph, batch, exact_weights, each) for each in (cache, plain))

    def change(pool, scales):
        row = pool[0, :, 0]
        return ((np.clip(np.rint(row / scales), -127, 127) * scales - row) ** 2).sum()

    errors = [sum(change(kept.pools[name], c[name]) for name in kept.pools) for c in (chosen, first)]
    assert errors[0] < 0.5 * errors[1]


def test_offsets_of_int4_are_means(exported):
    graph = canonical(exported(model=WIDE)).graph
    batch = batch_of(np.random.default_rng(4))
    kept = Kept()
    Logits(graph, batch, exact_weights, kept)
    for name, offsets in find_constants(graph, batch, exact_weights, CACHES["int4"]).items():
        pool = kept.pools[name]
        tokens = np.abs(pool).sum(axis=(1, 3, 4)) > 0
        assert tokens.sum() == batch.tokens
        for part in range(2):
            np.testing.assert_allclose(offsets[part], pool[:, part][tokens].mean(axis=0), atol=1e-5)


def test_fp8_scales_round_less_than_others_of_their_octave(exported):
    graph = canonical(exported()).graph
    batch = batch_of(np.random.default_rng(2))
    kept = Kept()
    Logits(graph, batch, exact_weights, kept)
    scales = find_constants(graph, batch, exact_weights, CACHES["fp8"])
    for name, pool in kept.pools.items():
        wide = scales[name].astype(np.float64)[:, None]

        def change(by, pool=pool, scale=wide):
            codes = (pool / (scale * by)).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
            return ((codes.astype(np.float64) * scale * by - pool) ** 2).sum(axis=(0, 2))

        assert (np.abs(pool).max(axis=(0, 2)) * 2 <= scales[name] * 448 * (1 + 1e-6)).all()
        others = np.minimum.reduce([change(2 ** (step / 16)) for step in range(-15, 16) if step])
        assert np.median(change(1) / others) <= 1 + 1e-3
        assert change(1).sum() < 0.95 * change(2**0.5).sum()


def test_a_head_that_is_always_zero_has_a_scale(exported):
    def silence(tensors):
        tensors["model.layers.0.self_attn.v_proj.weight"][: MODEL.head_dim] = 0
        tensors["model.layers.1.self_attn.v_proj.weight"][3] = 0

    graph = canonical(exported(edit=silence)).graph
    for name in ("int8", "fp8"):
        scales = find_constants(graph, batch_of(np.random.default_rng(0)), exact_weights, CACHES[name])
        for each in scales.values():
            assert np.isfinite(each).all()
            assert (each > 0).all()


def test_evaluation_reads_what_the_cache_holds(exported):
    """The interpreter over a pool of the format: as far from float32 as the codes are coarse."""
    graph = canonical(exported(model=WIDE)).graph
    batch = batch_of(np.random.default_rng(1))
    exact = Logits(graph, batch, exact_weights).rows(0, batch.tokens)
    errors = []
    for name in ("fp16", "int8", "fp8", "int4"):
        cache = CACHES[name]
        scales = find_constants(graph, batch, exact_weights, cache) if cache.constants else {}
        stored = Logits(graph, batch, exact_weights, StoredCaches(cache, scales))
        errors.append(np.sqrt(np.mean((stored.rows(0, batch.tokens) - exact) ** 2)))
    assert 0 < errors[0] < errors[1] / 4 < errors[2] / 8 < errors[3] / 12


def test_the_manifest_and_the_report_say_what_the_cache_holds(exported, tmp_path):
    source = exported()
    for name, dtype, shape in (
        ("fp16", "float16", ()),
        ("int8", "int8", (2, MODEL.kv_heads, MODEL.head_dim)),
        ("fp8", "float8e4m3fn", (2, MODEL.kv_heads, MODEL.head_dim)),
    ):
        report = built(source, tmp_path / name, name)
        (group,) = EngineManifest.load(tmp_path / name).cache_groups
        assert (group.dtype, group.constant_shape) == (dtype, shape)
        values = 2 * BLOCK * MODEL.kv_heads * MODEL.head_dim * MODEL.layers
        assert group.block_bytes == values * (2 if name == "fp16" else 1)
        document = json.loads((tmp_path / name / "report.json").read_text())["cache"]
        assert document["groups"][0]["bytes_per_token"] == group.block_bytes / BLOCK
        assert len(document["constants"]) == (0 if name == "fp16" else MODEL.layers)
        for key, scales in document["constants"].items():
            heads = report.cache_constants[key].reshape(2, MODEL.kv_heads, -1).max(axis=-1)
            np.testing.assert_allclose(scales, heads)


def test_a_narrower_cache_holds_more_tokens_in_the_same_memory(exported, tmp_path):
    source = exported()
    held = {}
    for name in ("fp32", "fp16", "int8"):
        built(source, tmp_path / name, name, max_sequence=256)
        held[name] = OrtEngine(tmp_path / name, EngineOptions(cache_bytes=100_000)).limits.num_blocks
    assert held["int8"] // 4 == held["fp16"] // 2 == held["fp32"] > 1


def test_scales_are_inputs_of_the_graph_as_the_op_table_names_them(exported, tmp_path):
    built(exported(), tmp_path / "engine", "int8")
    graph = ir.load(tmp_path / "engine" / "engine.onnx").graph
    index = ops.PAGED_ATTENTION.input_index("cache_scales")
    nodes = [node for node in graph if node.op_type == "PagedAttention"]
    assert len(nodes) == MODEL.layers
    for node in nodes:
        scales = node.inputs[index]
        assert scales.name == f"{node.name}.cache_scales"
        assert scales.const_value.numpy().shape == (2, MODEL.kv_heads, MODEL.head_dim)


def test_formats_are_found_by_name():
    assert find_cache("auto", "bf16") is CACHES["bf16"]
    assert find_cache("int8", "bf16") is CACHES["int8"]
    with pytest.raises(QuantizationError, match="kv cache 'q8_0' is unknown; there are auto, fp32, fp16"):
        find_cache("q8_0", "fp16")


def test_what_a_format_cannot_hold_is_refused_before_anything_is_built(exported, tmp_path):
    with pytest.raises(QuantizationError, match="kv cache int4: head_dim 16 is no positive multiple of 32"):
        built(exported(), tmp_path / "engine", "int4")
    assert not (tmp_path / "engine").exists()
    for name in ("int8", "fp8", "int4"):
        with pytest.raises(QuantizationError, match=f"kv cache {name}: this model caches latents"):
            CACHES[name].block_shape((16, 96))
    assert CACHES["fp16"].block_shape((16, 96)) == (16, 96)


def test_an_fp8_cache_takes_the_checkpoints_scales(exported, tmp_path):
    """k_scale and v_scale of layer 1, one a head for the keys; layer 0 is calibrated."""

    def edit(tensors):
        at = "model.layers.1.self_attn"
        tensors[f"{at}.k_scale"] = np.array([0.25, 0.5], np.float32)
        tensors[f"{at}.v_scale"] = np.array([0.125], np.float32)

    source = exported(edit=edit)
    ones = np.ones((MODEL.kv_heads, MODEL.head_dim), np.float32)
    expected = np.stack([ones * np.array([[0.25], [0.5]], np.float32), ones * 0.125])
    report = built(source, tmp_path / "fp8", "fp8")
    np.testing.assert_array_equal(report.cache_constants["cache.1"], expected)
    plain = built(exported(seed=0, bias=False, dtype=np.float32), tmp_path / "plain", "fp8")
    assert (report.cache_constants["cache.0"] > 0).all()
    assert (plain.cache_constants["cache.1"] != expected).any()
    assert (built(source, tmp_path / "int8", "int8").cache_constants["cache.1"] != expected).any()


def test_keys_that_are_not_finite_name_the_layer(exported):
    def blow_up(tensors):
        tensors["model.layers.1.self_attn.k_proj.weight"][:] = 3e38

    graph = canonical(exported(edit=blow_up, dtype=np.float32)).graph
    batch = batch_of(np.random.default_rng(0))
    with np.errstate(all="ignore"), pytest.raises(QuantizationError, match=r"layers\.1\.attention: its keys"):
        find_constants(graph, batch, exact_weights, CACHES["int8"])


def test_scales_need_text_or_tokens(exported, tmp_path):
    with pytest.raises(QuantizationError, match=r"has no tokenizer\.json"):
        build_engine(exported(), tmp_path / "engine", BuildConfig(kv_cache="int8"))
