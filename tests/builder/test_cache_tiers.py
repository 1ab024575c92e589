"""Engines whose cache blocks move by age: against float64 over pools that took the same conversions."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from builder_support import MODEL, VOCAB, PagedAttention
from onnx.reference import ReferenceEvaluator

from enginebay.builder.build import BuildConfig, BuildError, build_engine
from enginebay.builder.exported import read_exported
from enginebay.builder.lower.cache import set_cache_layout
from enginebay.builder.manifest import EngineManifest, ManifestError
from enginebay.builder.quant.cache import CACHES
from enginebay.builder.quant.formats import QuantizationError
from enginebay.builder.quant.text import CalibrationConfig
from enginebay.cli.commands.inspect import engine_lines
from enginebay.plugins.reference_cache import cache_convert
from enginebay.triton_repo.runtime.ort_engine import EngineLoadError, EngineOptions, OrtEngine
from enginebay.triton_repo.runtime.pack import Packer
from enginebay.triton_repo.runtime.request import Request, SamplingParams
from enginebay.triton_repo.runtime.scheduler import Scheduler, SchedulerConfig
from enginebay.triton_repo.runtime.tiers import move_batches

BLOCK = 4
WIDE = replace(MODEL, heads=2, kv_heads=1, head_dim=32)
AGES = (6, 18)


def built(source, out, cache="tiers", **options):
    tokens = source.parent / "tokens.json"
    rng = np.random.default_rng(3)
    tokens.write_text(json.dumps([rng.integers(0, VOCAB, n).tolist() for n in (40, 64, 64)]))
    config = {"quant": "fp32", "kv_cache": cache, "block_size": BLOCK, "cache_ages": AGES, "max_sequence": 64}
    return build_engine(
        source, out, BuildConfig(**{**config, "calibration": CalibrationConfig(tokens), **options})
    )


class Reference:
    """The exported graph in float64 over pools of its own."""

    def __init__(self, source, constants, sizes):
        model = read_exported(source).model
        set_cache_layout(model.graph, CACHES["tiers"], BLOCK, constants)
        proto = ir.to_proto(ir.external_data.load_to_model(model))
        self.evaluator = ReferenceEvaluator(proto, new_ops=[PagedAttention])
        self.sizes, self.constants = sizes, constants
        values = (2, BLOCK, WIDE.kv_heads, WIDE.head_dim)
        rows = (*values[:-1], WIDE.head_dim // 2 + WIDE.head_dim // 8)
        shapes = (("cache", np.float16, values), ("cache_int8", np.int8, values))
        self.pools = [
            {n: np.zeros((size, *shape), dtype) for n in range(WIDE.layers)}
            for size, (_, dtype, shape) in zip(sizes, (*shapes, ("cache_int4", np.uint8, rows)), strict=True)
        ]

    def move(self, moves):
        for source, into, pairs in move_batches(moves, self.sizes):
            for layer in range(WIDE.layers):
                self.pools[into][layer] = cache_convert(
                    *(self.pools[source][layer], self.pools[into][layer], pairs),
                    self.constants[f"cache.{layer}"],
                )

    def run(self, inputs):
        feeds = {
            f"{name}.0" if name in ("block_table", "slot_mapping") else name: array
            for name, array in vars(inputs).items()
        }
        for name, pools in zip(("cache", "cache_int8", "cache_int4"), self.pools, strict=True):
            feeds |= {f"{name}.{layer}": pool for layer, pool in pools.items()}
        outputs = [f"cache_out.{layer}" for layer in range(WIDE.layers)]
        logits, *pools = self.evaluator.run(["logits", *outputs], feeds)
        self.pools[0] = dict(enumerate(pools))
        return logits


@pytest.mark.parametrize("seed", range(3))
def test_an_engine_equals_float64_over_blocks_that_moved(exported, tmp_path, seed):
    """Several sequences, preempted for want of blocks and with prefixes found in every pool."""
    source = exported(tied=False, model=WIDE, seed=seed)
    report = built(source, tmp_path / "engine")
    engine = OrtEngine(tmp_path / "engine", EngineOptions(threads=2, num_blocks=9))
    reference = Reference(source, report.cache_constants, [9, 9, 9])
    scheduler = Scheduler(engine.limits, SchedulerConfig(max_step_tokens=8 + seed))
    packer, rng = Packer(engine.limits), np.random.default_rng(seed)
    stem = rng.integers(0, VOCAB, 30).tolist()
    for index, count in enumerate((30, 13, 21, 26)):
        prompt = (*stem[:count], *rng.integers(0, VOCAB, 2).tolist())
        sampling = SamplingParams(max_tokens=20, ignore_eos=True)
        scheduler.add(Request(str(index), prompt, sampling))
    errors, kinds = [], set()
    while scheduler.live:
        plan = scheduler.schedule()
        engine.move(plan.moves)
        reference.move(plan.moves)
        kinds |= {(source // 9, into // 9) for source, into in plan.moves}
        inputs = packer.pack(plan)
        logits = engine.run(inputs).copy()
        errors.append(np.abs(logits - reference.run(inputs)).ravel())
        chosen = iter(logits.argmax(axis=1).tolist())
        scheduler.commit(plan, [[next(chosen) for _ in range(chunk.samples)] for chunk in plan.chunks])
        scheduler.check()
    assert kinds == {(0, 1), (1, 2)} or kinds == {(0, 1), (0, 2), (1, 2)}
    assert scheduler.counters.preemptions > 0
    assert scheduler.counters.prefix_hit_tokens > 0
    error = np.concatenate(errors)
    assert np.median(error) < 1e-4  # float16 keys and values next to a tie may round either way
    assert error.max() < 0.02


def test_the_error_of_tiers_lies_between_those_of_their_formats(exported, tmp_path):
    source = exported(tied=False, model=WIDE)
    tokens = np.random.default_rng(8).integers(0, VOCAB, 60)
    logits = {}
    for cache in ("fp32", "int8", "tiers", "int4"):
        built(source, tmp_path / cache, cache)
        engine = OrtEngine(tmp_path / cache, EngineOptions(threads=2, num_blocks=32))
        scheduler = Scheduler(engine.limits, SchedulerConfig(max_step_tokens=4))
        scheduler.add(Request("r", tuple(tokens.tolist()), SamplingParams(max_tokens=1)))
        while scheduler.live:
            plan = scheduler.schedule()
            if plan.moves:
                engine.move(plan.moves)
            logits[cache] = engine.run(Packer(engine.limits).pack(plan)).copy()
            scheduler.commit(plan, [[0] if chunk.samples else [] for chunk in plan.chunks])
    errors = [np.abs(logits[name] - logits["fp32"]).mean() for name in ("int8", "tiers", "int4")]
    assert 0 < errors[0] < errors[1] < errors[2]


def test_the_manifest_says_what_the_pools_hold(exported, tmp_path):
    report = built(exported(model=WIDE), tmp_path / "engine")
    manifest = EngineManifest.load(tmp_path / "engine")
    (group,) = manifest.cache_groups
    values = 2 * BLOCK * WIDE.kv_heads * WIDE.layers
    assert group.pool_bytes == (values * 64, values * 32, values * 20)
    assert (group.dtype, group.block_bytes) == ("float16", values * 64)
    assert [(tier.dtype, tier.age) for tier in group.tiers] == [("int8", 6), ("int4", 18)]
    assert group.constant_shape == (2, WIDE.kv_heads, WIDE.head_dim)
    with np.load(tmp_path / "engine" / "cache_scales.npz") as file:
        for name, scales in report.cache_constants.items():
            np.testing.assert_array_equal(file[name], scales)
    assert "cache_scales.npz" in [record.name for record in manifest.files]
    assert "from an age of 18 on int4" in engine_lines(manifest)["cache"]
    assert "--kv-cache tiers --cache-ages 6,18" in manifest.rebuild_command
    path = tmp_path / "engine" / "manifest.json"
    document = json.loads(path.read_text())
    document["cache_groups"][0]["tiers"][1]["age"] = 6
    path.write_text(json.dumps(document))
    with pytest.raises(ManifestError, match=r"tiers\[1\]\.age: 6 is less than 7; ages ascend"):
        EngineManifest.load(tmp_path / "engine")


def test_engines_from_before_tiers_load(exported, tmp_path):
    built(exported(), tmp_path / "engine", "fp16")
    path = tmp_path / "engine" / "manifest.json"
    document = json.loads(path.read_text())
    assert document["cache_groups"][0].pop("tiers") == []
    path.write_text(json.dumps(document))
    assert OrtEngine(tmp_path / "engine", EngineOptions(num_blocks=4)).limits.tiers == ()


def test_pools_take_their_shares_of_the_budget(exported, tmp_path):
    built(exported(model=WIDE), tmp_path / "engine", max_batch=64)
    values = 2 * BLOCK * WIDE.kv_heads * WIDE.layers
    limits = OrtEngine(tmp_path / "engine", EngineOptions(cache_bytes=values * 64 * 80)).limits
    assert limits.num_blocks == 20
    assert [tier.num_blocks for tier in limits.tiers] == [40, 128]
    with pytest.raises(
        EngineLoadError, match=r"float16 cache pool has 3 blocks of 4 tokens, a sequence needs 4"
    ):
        OrtEngine(tmp_path / "engine", EngineOptions(num_blocks=3))


def test_what_tiers_cannot_be_is_refused(exported, tmp_path):
    with pytest.raises(QuantizationError, match="kv cache int4: head_dim 16 is no positive multiple of 32"):
        built(exported(), tmp_path / "engine")
    with pytest.raises(QuantizationError, match="kv cache int8: this model caches latents"):
        CACHES["tiers"].block_shape((16, 96))
    for ages in ((0, 4), (8, 8)):
        with pytest.raises(BuildError, match="cache_ages are"):
            BuildConfig(kv_cache="tiers", cache_ages=ages)
