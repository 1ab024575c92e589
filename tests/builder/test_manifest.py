from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from enginebay.builder import file_record
from enginebay.builder.manifest import (
    MANIFEST,
    SCALES,
    SCHEMA_VERSION,
    CacheGroupRecord,
    EngineManifest,
    FileRecord,
    LayerRecord,
    LimitsRecord,
    ManifestError,
    PluginRecord,
    QuantizationRecord,
    RuntimeFacts,
    SourceModel,
    TargetRecord,
    enginebay_version,
)

FACTS = RuntimeFacts(
    target="ort-cpu",
    library="onnxruntime",
    library_version="1.32.0",
    ops={"QuantLinear": 1, "PagedAttention": 1, "MoE": 3},
    layouts={"i4.b32.asym": "panel16-i4@1", "i8": "panel16-i8@1"},
    plugin_sha256="a" * 64,
)


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """An engine folder with files that a manifest can describe, but that nothing could run."""
    (tmp_path / "engine.onnx").write_bytes(b"graph" * 100)
    (tmp_path / "weights.bin").write_bytes(bytes(range(256)) * 4096)
    (tmp_path / "tokenizer.json").write_text("{}")
    EngineManifest(
        schema_version=SCHEMA_VERSION,
        enginebay_version=enginebay_version(),
        source=SourceModel("tiny", "f" * 64),
        config={"quant": "int4"},
        model={
            "architecture": "LlamaForCausalLM",
            "layers": [{"hidden": 64}],
            "vocab_size": 128,
            "max_positions": 512,
            "cache_groups": [{"kind": "paged", "layers": [0, 1], "kv_heads": 2, "head_dim": 16}],
            "ropes": [{"kind": "default", "original_positions": 512}],
        },
        target=TargetRecord("ort-cpu", "onnxruntime", "1.32.0"),
        plugins=PluginRecord(
            {"QuantLinear": 1, "PagedAttention": 1}, {"i4.b32.asym": "panel16-i4@1"}, "a" * 64
        ),
        opset=24,
        quantization=QuantizationRecord(
            "int4", {"lm_head": LayerRecord("i4.b32.asym", "rtn", (128, 64), 5120)}
        ),
        cache_groups=(CacheGroupRecord("paged", (0, 1), "float16", 16, (2, 16, 2, 16), ()),),
        limits=LimitsRecord(64, 2048, 256, 128),
        files=(
            FileRecord.of(tmp_path / "engine.onnx"),
            FileRecord.of(tmp_path / "weights.bin"),
            FileRecord.of(tmp_path / "tokenizer.json"),
        ),
        weight_bytes=1 << 20,
        built_at="2026-11-30T10:00:00+00:00",
        build_seconds=1.5,
    ).save(tmp_path)
    return tmp_path


def edit(engine: Path, key: str, value: object) -> None:
    """Sets the manifest's dotted `key`; deletes it where value is ... ."""
    document = json.loads((engine / MANIFEST).read_text())
    *path, last = key.split(".")
    place = document
    for step in path:
        place = place[int(step)] if isinstance(place, list) else place[step]
    at = int(last) if isinstance(place, list) else last
    if value is ...:
        del place[at]
    else:
        place[at] = value
    (engine / MANIFEST).write_text(json.dumps(document))


def test_round_trip_and_a_machine_that_fits(engine):
    manifest = EngineManifest.load(engine)
    manifest.save(engine)
    assert EngineManifest.load(engine) == manifest
    assert manifest.quantization.layers["lm_head"].shape == (128, 64)
    assert manifest.cache_groups[0].block_bytes == 2 * 2 * 16 * 2 * 16 * 2
    assert manifest.check(engine, FACTS) == []


@pytest.mark.parametrize(
    ("change", "key", "values"),
    [
        ({"target": "ort-cuda"}, "target.name", ("'ort-cpu'", "'ort-cuda'")),
        ({"library": "tensorrt"}, "target.library", ("'onnxruntime'", "'tensorrt'")),
        ({"library_version": "1.31.1"}, "target.library_version", ("'1.32.0'", "'1.31.1'")),
        ({"ops": {"QuantLinear": 2, "PagedAttention": 1}}, "plugins.ops.QuantLinear", ("1", "2")),
        ({"ops": {"QuantLinear": 1}}, "plugins.ops.PagedAttention", ("1", "'none'")),
        ({"layouts": {"i4.b32.asym": "x@2"}}, "plugins.layouts.i4.b32.asym", ("'panel16-i4@1'", "'x@2'")),
        ({"layouts": {}}, "plugins.layouts.i4.b32.asym", ("'panel16-i4@1'", "'none'")),
    ],
)
def test_another_machine_is_refused_with_both_values_and_the_fix(engine, change, key, values):
    with pytest.raises(ManifestError) as caught:
        EngineManifest.load(engine).check(engine, dataclasses.replace(FACTS, **change))
    (problem,) = caught.value.problems
    assert problem.startswith(f"{engine / MANIFEST}: {key}: ")
    assert f"the engine has {values[0]}, this machine has {values[1]}" in problem
    assert problem.endswith(f"rebuild with: enginebay build EXPORTED {engine} --target ort-cpu --quant int4")


def test_every_mismatch_is_a_line(engine):
    facts = dataclasses.replace(FACTS, library_version="1.31.1", ops={"PagedAttention": 1}, layouts={})
    with pytest.raises(ManifestError) as caught:
        EngineManifest.load(engine).check(engine, facts)
    assert len(caught.value.problems) == 3
    assert str(caught.value).count("\n") == 2


def test_a_library_rebuilt_from_the_same_sources_is_accepted_and_reported(engine):
    notes = EngineManifest.load(engine).check(engine, dataclasses.replace(FACTS, plugin_sha256="b" * 64))
    assert len(notes) == 1
    assert "built with aaaaaaaaaaaa, running bbbbbbbbbbbb; accepted" in notes[0]


def test_another_version_of_enginebay(engine):
    major, minor, patch = enginebay_version().split(".")
    edit(engine, "enginebay_version", f"{major}.{minor}.{patch}9")
    notes = EngineManifest.load(engine).check(engine, FACTS)
    (note,) = notes
    assert note.endswith(f"built by {major}.{minor}.{patch}9, running {enginebay_version()}")
    edit(engine, "enginebay_version", f"{major}.{minor}9.0")
    with pytest.raises(ManifestError, match=f"enginebay_version: the engine has '{major}.{minor}9.0'"):
        EngineManifest.load(engine).check(engine, FACTS)


@pytest.mark.parametrize("name", ["engine.onnx", "weights.bin", "tokenizer.json"])
def test_a_missing_file_is_named(engine, name):
    (engine / name).rename(engine / "moved")
    with pytest.raises(ManifestError) as caught:
        EngineManifest.load(engine).check(engine, FACTS)
    assert caught.value.problems[0].startswith(f"{engine / name}: not found, but manifest.json lists it")


@pytest.mark.parametrize(("delta", "words"), [(-1, "cut short"), (1, "too long")])
def test_a_sidecar_of_another_length_is_named_with_both_sizes(engine, delta, words):
    size = (engine / "weights.bin").stat().st_size
    with (engine / "weights.bin").open("r+b") as file:
        file.truncate(size + delta)
    with pytest.raises(ManifestError) as caught:
        EngineManifest.load(engine).check(engine, FACTS)
    assert (
        f"{engine / 'weights.bin'}: {words}: manifest.json has {size} bytes, the file {size + delta}"
        in str(caught.value)
    )


@pytest.mark.parametrize("name", ["engine.onnx", "weights.bin"])
def test_a_file_of_the_same_length_but_other_content_is_named(engine, name):
    data = bytearray((engine / name).read_bytes())
    data[:] = bytes(len(data))
    (engine / name).write_bytes(data)
    with pytest.raises(ManifestError, match="not the file that was built"):
        EngineManifest.load(engine).check(engine, FACTS)


def test_a_folder_without_a_manifest(tmp_path):
    with pytest.raises(ManifestError, match=r"manifest.json: not found; .* is not an engine folder"):
        EngineManifest.load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("schema_version", 1, "schema_version: the engine has 1, this EngineBay reads 2; rebuild with"),
        ("schema_version", ..., "schema_version: the engine has None"),
        ("opset", "24", "opset: '24' instead of a value of type int"),
        ("opset", True, "opset: True instead of a value of type int"),
        ("opset", ..., "the document: without opset"),
        ("surprise", 1, "the document: unknown key 'surprise'"),
        ("target.library", None, "target.library: None instead of a value of type str"),
        ("limits", [1], "limits: list instead of an object"),
        ("quantization.layers", [], "quantization.layers: list instead of an object"),
        ("quantization.layers.lm_head", {}, "quantization.layers.lm_head: without format, method, shape"),
        ("files.0.size", 1.5, r"files\[0\].size: 1.5 instead"),
        ("files.0.name", "../../etc/passwd", r"files\[0\].name: '../../etc/passwd' is not a plain file name"),
        *(
            (
                f"limits.{name}",
                value,
                f"limits.{name}: {value} is out of range; it must be between 1 and 2147483647",
            )
            for name in ("max_batch", "max_step_tokens", "max_sequence", "vocab_size")
            for value in (0, -1, 2**31, 10**400)
        ),
        ("files", [], "files: empty"),
        ("cache_groups", [], "cache_groups: empty"),
        ("cache_groups.0.layers", [], r"cache_groups\[0\].layers: empty"),
        ("cache_groups.0.layers", [0, -1], r"cache_groups\[0\].layers: -1 is no layer"),
        ("cache_groups.0.layers", [0, 0], "cache_groups: a layer is in them twice"),
        ("cache_groups.0.kind", "ring", r"cache_groups\[0\].kind: 'ring' is none of paged, latent"),
        (
            "cache_groups.0.kind",
            "latent",
            r"latent layers \[0, 1\], but the model has 'paged' layers \[0, 1\]",
        ),
        ("cache_groups.0.layers", [0, 1, 2], r"paged layers \[0, 1, 2\], but the model has 'paged' layers"),
        ("cache_groups.0.block_size", 0, r"cache_groups\[0\].block_size: 0 is out of range"),
        ("cache_groups.0.block_size", 32, r"block_shape: \[2, 16, 2, 16\], but a paged float16 block of 32"),
        ("cache_groups.0.block_shape", [], r"block_shape: \[\], but"),
        ("cache_groups.0.block_shape", [2, 16, 0, 16], r"block_shape: \[2, 16, 0, 16\], but"),
        ("cache_groups.0.block_shape", [2, 16, 2, 2**40], r"is \[2, 16, 2, 16\]"),
        ("cache_groups.0.constant_shape", [2, 2, 16], r"constant_shape: \[2, 2, 16\], but .* takes \[\]"),
        ("cache_groups.0.dtype", "int8", r"constant_shape: \[\], but .* takes \[2, 2\] or \[2, 2, 16\]"),
        ("cache_groups.0.dtype", "int4", r"block_shape: head_dim 16 is no positive multiple of 32"),
        ("model.cache_groups.0.kv_heads", 3, r"block_shape: .* 3 heads of 16, is \[2, 16, 3, 16\]"),
        ("model.cache_groups.0.head_dim", -16, r"model\.cache_groups\[0\]\.head_dim: -16 is out of range"),
        ("model.cache_groups.0.head_dim", 1.5, r"head_dim: 1\.5 is out of range"),
        ("model.cache_groups.0", 7, "the model has None layers None"),
        ("model.cache_groups", [], "cache_groups: 1, but the model has 0"),
        ("model.cache_groups", ..., "cache_groups: 1, but the model has none"),
        ("model.ropes.0", {}, r"model\.ropes\[0\]: without kind"),
        ("model.ropes.0.original_positions", 1e9, r"original_positions: 1000000000\.0 is out of range"),
        ("model.vocab_size", 127, "limits.vocab_size: 128, but the model has vocab_size 127"),
        ("model.vocab_size", 129, "limits.vocab_size: 128, but the model has vocab_size 129"),
        ("model.vocab_size", "128", "model.vocab_size: '128' is out of range"),
        ("model.max_positions", 255, "limits.max_sequence: 256, but the model has max_positions 255"),
        ("limits.max_batch", 4096, "limits.max_step_tokens: 2048 is less than max_batch 4096"),
        ("weight_bytes", 7, "weight_bytes: 7, but files has weights.bin of 1048576 bytes"),
        ("files.1.name", "engine.onnx", "files: a name is in them twice"),
        ("files.1.name", "other.bin", "files: without weights.bin"),
        ("files.1.name", "..", "is not a plain file name"),
        ("files.1.name", "", "is not a plain file name"),
        ("files.1.size", -1, r"files\[1\].size: -1 is no size"),
        ("quantization.layers.lm_head.shape", [64], r"lm_head.shape: \[64\] is not \[N, K\]"),
        ("quantization.layers.lm_head.shape", [64, 0], r"lm_head.shape\[1\]: 0 is out of range"),
        (
            "quantization.layers.lm_head.packed_bytes",
            2**50,
            "1125899906842624 packed bytes, but weight_bytes",
        ),
        ("quantization.layers.lm_head.format", "i4.b0", "lm_head.format: 'i4.b0' is none"),
        (
            "cache_groups.0.dtype",
            "int3",
            r"cache_groups\[0\].dtype: 'int3' is none of float32, float16, bfloat16",
        ),
    ],
)
def test_a_malformed_document_names_the_key(engine, key, value, words):
    edit(engine, key, value)
    with pytest.raises(ManifestError, match=words) as caught:
        EngineManifest.load(engine)
    assert str(engine / MANIFEST) in str(caught.value)


def tiered(dtype: str = "float16") -> dict[str, object]:
    """A group with tiers of the fixture's layers, heads of 32."""
    tiers = [
        {"dtype": "int8", "age": 64, "block_shape": [2, 16, 2, 32]},
        {"dtype": "int4", "age": 128, "block_shape": [2, 16, 2, 20]},
    ]
    shapes = {"block_shape": [2, 16, 2, 32], "constant_shape": [2, 2, 32]}
    return {"kind": "paged", "layers": [0, 1], "dtype": dtype, "block_size": 16, **shapes, "tiers": tiers}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("dtype", "float16", None),
        ("constant_shape", [2, 2], None),
        ("constant_shape", [], r"constant_shape: \[\], but"),
        ("constant_shape", [2, 2, 16], r"constant_shape: \[2, 2, 16\], but"),
        (
            "tiers.0.block_shape",
            [2, 16, 4, 32],
            r"tiers\[0\].block_shape: \[2, 16, 4, 32\], but a paged int8 block",
        ),
        (
            "tiers.1.block_shape",
            [2, 16, 2, 32],
            r"tiers\[1\].block_shape: .* int4 block .* is \[2, 16, 2, 20\]",
        ),
        ("tiers.1.dtype", "int8", r"tiers\[1\].block_shape|there are none, or int8 and int4"),
        ("tiers.1", ..., "tiers: int8; there are none, or int8 and int4"),
        ("tiers.0.age", 0, r"tiers\[0\].age: 0 is out of range"),
        ("tiers.1.age", 64, r"tiers\[1\].age: 64 is less than 65; ages ascend"),
        ("tiers.1.age", 2**31, r"tiers\[1\].age: 2147483648 is out of range"),
        ("dtype", "int8", "behind a paged int8 cache"),
    ],
)
def test_tiers_agree_with_the_heads(engine, key, value, words):
    (engine / SCALES).write_bytes(b"scales")
    document = json.loads((engine / MANIFEST).read_text())
    document["cache_groups"] = [tiered()]
    document["model"]["cache_groups"][0]["head_dim"] = 32
    document["files"].append(dataclasses.asdict(FileRecord.of(engine / SCALES)))
    (engine / MANIFEST).write_text(json.dumps(document))
    edit(engine, f"cache_groups.0.{key}", value)
    if words is None:
        assert EngineManifest.load(engine).rebuild_command.endswith("--cache-ages 64,128")
        return
    with pytest.raises(ManifestError, match=words):
        EngineManifest.load(engine)


@pytest.mark.parametrize("name", ["engine.onnx", "weights.bin", "tokenizer.json"])
def test_a_flipped_bit_anywhere_in_a_small_file_is_found(engine, name):
    data = (engine / name).read_bytes()
    rng = np.random.default_rng()
    for at in (0, len(data) - 1, *rng.integers(0, len(data), 8)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << int(rng.integers(8))
        (engine / name).write_bytes(flipped)
        with pytest.raises(ManifestError, match=rf"{name}: not the file that was built"):
            EngineManifest.load(engine).check(engine, FACTS)


def test_a_large_file_is_sampled_and_a_hole_in_it_found(tmp_path, monkeypatch):
    monkeypatch.setattr(file_record, "WHOLE_BYTES_MAX", 1 << 20)
    path = tmp_path / "weights.bin"
    data = np.random.default_rng(3).bytes(2 << 20)
    path.write_bytes(data)
    record = FileRecord.of(path)
    assert record.sampled
    assert record.difference(path) is None
    for at in (0, 1 << 20, len(data) - (64 << 10)):  # 64 KiB that were never copied
        path.write_bytes(data[:at] + bytes(64 << 10) + data[at + (64 << 10) :])
        assert "not the file that was built" in str(record.difference(path))


@pytest.mark.parametrize("text", ["", "{", "[]", "nul", '"x"', "[" * 100_000, "9" * 5000, "\ufeff{}"])
def test_what_is_no_manifest_at_all(engine, text):
    (engine / MANIFEST).write_text(text)
    with pytest.raises(ManifestError, match=r"manifest\.json"):
        EngineManifest.load(engine)


def test_bytes_that_are_no_text(engine):
    (engine / MANIFEST).write_bytes(b"\xff\xfe{}")
    with pytest.raises(ManifestError, match=r"manifest\.json: cannot be read"):
        EngineManifest.load(engine)


def test_serving_pays_for_nothing_else():
    code = (
        "import sys, enginebay.builder.manifest as m\n"
        "heavy = {'onnx', 'onnx_ir', 'onnxruntime', 'torch', 'transformers', 'ml_dtypes', 'safetensors'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
