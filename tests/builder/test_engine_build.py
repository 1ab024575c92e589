from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builder_support import LAYERS, VOCAB, PlainLibrary

from enginebay.builder import weights
from enginebay.builder.build import BuildConfig, BuildError, build_engine
from enginebay.builder.exported import ExportedError
from enginebay.builder.manifest import EngineManifest, RuntimeFacts
from enginebay.builder.quant.formats import QuantizationError, WeightFormat
from enginebay.builder.quant.recipes import Override
from enginebay.builder.targets import PLANNED, TargetError
from enginebay.builder.targets.ort_cpu import OrtCpu
from enginebay.plugins import ops


@pytest.fixture(autouse=True)
def plain_library(monkeypatch):
    """These tests look at folders, not at numbers: they need no compiled library."""
    monkeypatch.setattr(OrtCpu, "plugins", PlainLibrary())


def facts(manifest: EngineManifest) -> RuntimeFacts:
    record = OrtCpu().record
    return RuntimeFacts(
        record.name,
        record.library,
        record.library_version,
        {op.name: op.version for op in ops.OPS},
        {key: f"plain-{key.split('.')[0]}@1" for key in manifest.plugins.layouts},
        PlainLibrary.sha256,
    )


def test_an_engine_folder_is_complete_and_fits(exported, tmp_path):
    source, out = exported(), tmp_path / "engine"
    report = build_engine(source, out, BuildConfig(quant="int4", max_sequence=128, max_batch=4))
    assert sorted(p.name for p in out.iterdir()) == [
        "engine.onnx",
        "generation_config.json",
        "manifest.json",
        "report.html",
        "report.json",
        "weights.bin",
    ]
    manifest = EngineManifest.load(out)
    assert manifest == report.manifest
    assert manifest.check(out, facts(manifest)) == []
    assert manifest.limits.max_sequence == 128
    assert manifest.limits.vocab_size == VOCAB
    assert manifest.model["hidden_size"] == 64
    assert len(manifest.quantization.layers) == 4 * LAYERS + 1
    assert manifest.quantization.layers["lm_head"].format == "i8.b32"
    assert manifest.quantization.layers["layers.1.mlp.down"].format == "i4.b32.asym"
    assert manifest.cache_groups[0].block_shape == (2, 16, 2, 16)
    assert manifest.weight_bytes == (out / "weights.bin").stat().st_size


def test_weights_are_aligned_in_one_sidecar_beside_the_model(exported, tmp_path):
    out = tmp_path / "engine"
    build_engine(exported(), out, BuildConfig(quant="fp32"))
    moved = tmp_path / "elsewhere"
    shutil.move(out, moved)
    model = onnx.load(moved / "engine.onnx", load_external_data=False)
    held = 0
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entry = {item.key: item.value for item in tensor.external_data}
            assert entry["location"] == "weights.bin"
            assert int(entry["offset"]) % 4096 == 0
            held += 1
    assert held >= 4 * LAYERS + 1
    onnx.load(moved / "engine.onnx")
    EngineManifest.load(moved).check(moved, facts(EngineManifest.load(moved)))


def test_report_says_what_every_layer_became(exported, tmp_path):
    out = tmp_path / "engine"
    config = BuildConfig(quant="int4", overrides=(Override("layers.0.*", WeightFormat("i8", 32)),))
    report = build_engine(exported(), out, config)
    document = json.loads((out / "report.json").read_text())
    layers = {layer["layer"]: layer for layer in document["layers"]}
    assert layers["layers.0.mlp.gate_up"]["format"] == "i8.b32"
    assert layers["layers.1.mlp.gate_up"]["format"] == "i4.b32.asym"
    assert 0 < layers["layers.0.mlp.gate_up"]["relative_error"] < 0.01
    assert 0.02 < layers["layers.1.mlp.gate_up"]["relative_error"] < 0.15
    assert {r["rewrite"] for r in document["rewrites"]} >= {"quant_linear", "embedding", "add_rms_norm"}
    assert report.bits_per_weight == pytest.approx(document["bits_per_weight"], abs=1e-4)


def test_progress_counts_every_byte_once(exported, tmp_path):
    seen = []
    build_engine(
        exported(), tmp_path / "engine", progress=lambda done, total, what: seen.append((done, total, what))
    )
    assert [done for done, _, _ in seen] == sorted({done for done, _, _ in seen})
    assert seen[-1][0] == seen[-1][1]


def test_an_engine_is_replaced_but_another_folder_is_not(exported, tmp_path):
    source, out = exported(), tmp_path / "engine"
    build_engine(source, out, BuildConfig(quant="int8"))
    build_engine(source, out, BuildConfig(quant="int4"))
    assert EngineManifest.load(out).quantization.recipe == "int4"
    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "chapter1.txt").write_text("words")
    with pytest.raises(BuildError, match="thesis: exists and is not an engine folder"):
        build_engine(source, precious)
    assert (precious / "chapter1.txt").read_text() == "words"


def test_the_exported_model_is_never_replaced(exported, tmp_path):
    source = exported()
    build_engine(source, tmp_path / "engine")
    inside = tmp_path / "engine" / "exported"
    shutil.copytree(source, inside)
    for model, out in ((source, source), (source, tmp_path), (inside, tmp_path / "engine")):
        with pytest.raises(BuildError, match="which is read to make it: choose another folder"):
            build_engine(model, out)
    assert (source / "weights.bin").is_file()
    assert (inside / "weights.bin").is_file()


def spoil(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"][100, 3] = np.nan


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.layers.1.input_layernorm.weight", r"layers.1.input_layernorm.weight: weight \[7\] is"),
        ("model.norm.weight", r"model.norm.weight: weight \[7\] is"),
        ("model.layers.0.self_attn.q_proj.bias", r"q_proj.bias: weight \[7\] is"),
    ],
)
def test_a_vector_that_is_not_finite_is_named(exported, tmp_path, name, words, value):
    def spoil_vector(tensors):
        tensors[name][7] = value

    source = exported(edit=spoil_vector, bias=True)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(QuantizationError, match=words):
        build_engine(source, tmp_path / "engine")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_tensor_is_checked_a_chunk_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "CHUNK_BYTES", 64)
    values = np.ones((3, 50), np.float16)
    values[2, 31] = np.inf
    (tmp_path / "w").write_bytes(bytes(6) + values.tobytes())
    where = {"name": "w", "shape": ir.Shape([3, 50]), "base_dir": tmp_path}
    with pytest.raises(QuantizationError, match=r"tensor w: weight \[2, 31\] is inf"):
        weights.check_finite_tensor(ir.ExternalTensor("w", 6, 300, ir.DataType.FLOAT16, **where))
    weights.check_finite_tensor(ir.ExternalTensor("w", 6, 300, ir.DataType.INT16, **where))


@pytest.mark.parametrize("quant", ["int4", "int8", "fp32"])
def test_weights_that_are_huge_but_finite_give_errors_that_are_numbers(exported, tmp_path, quant):
    def enlarge(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][100, 3:5] = 8e37, -8e37
        tensors["model.layers.0.mlp.down_proj.weight"][5, 5] = 1e30

    out = tmp_path / "engine"
    report = build_engine(exported(edit=enlarge, dtype=np.float32), out, BuildConfig(quant=quant))
    for layer in report.layers:
        assert np.isfinite([layer.relative_error, layer.squared_error, layer.max_error]).all()
        assert layer.relative_error < 0.27  # half a step of 15 in each of 32 weights over two at its ends
    json.loads((out / "report.json").read_text())


def test_weights_whose_span_is_beyond_float32_are_named(exported, tmp_path):
    def enlarge(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][100, 3:5] = 1.7e38, -1.7e38

    with pytest.raises(QuantizationError, match=r"gate_proj.weight: weight \[228, 3\] is 1.7e\+38"):
        build_engine(exported(edit=enlarge, dtype=np.float32), tmp_path / "engine")


def test_nothing_is_left_of_a_build_that_fails(exported, tmp_path):
    source = exported(edit=spoil, seed=5)
    (tmp_path / "out").mkdir()
    with pytest.raises(QuantizationError, match=r"gate_proj.weight: weight \[228, 3\] is nan"):
        build_engine(source, tmp_path / "out" / "engine")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_failing_build_leaves_the_older_engine(exported, tmp_path):
    out = tmp_path / "engine"
    build_engine(exported(), out)
    before = EngineManifest.load(out)
    with pytest.raises(QuantizationError):
        build_engine(exported(edit=spoil, seed=5), out)
    assert EngineManifest.load(out) == before
    before.check(out, facts(before))


@pytest.mark.parametrize("name", ["model.onnx", "weights.bin", "spec.json"])
def test_an_incomplete_exported_folder_is_named(exported, tmp_path, name):
    source = exported()
    (source / name).unlink()
    with pytest.raises(
        ExportedError, match=rf"not an exported model, {name} is missing; make it with: enginebay export"
    ):
        build_engine(source, tmp_path / "engine")


def test_a_hugging_face_folder_is_told_apart(exported, tmp_path):
    exported()
    (source,) = tmp_path.glob("hf-*")
    with pytest.raises(ExportedError, match="a Hugging Face folder is exported first"):
        build_engine(source, tmp_path / "engine")


def test_a_missing_folder(tmp_path):
    with pytest.raises(ExportedError, match="nowhere: no such folder"):
        build_engine(tmp_path / "nowhere", tmp_path / "engine")


def test_a_short_sidecar_is_named_with_both_sizes(exported, tmp_path):
    source = exported()
    size = (source / "weights.bin").stat().st_size
    with (source / "weights.bin").open("r+b") as file:
        file.truncate(size - 1)
    with pytest.raises(
        ExportedError, match=rf"weights.bin: too short: .* ends at byte {size}, the file has {size - 1}"
    ):
        build_engine(source, tmp_path / "engine")


def test_a_spec_of_another_schema(exported, tmp_path):
    source = exported()
    document = json.loads((source / "spec.json").read_text())
    document["schema"] = 99
    (source / "spec.json").write_text(json.dumps(document))
    with pytest.raises(ExportedError, match=r"spec.json: spec has schema 99, this version reads \d+"):
        build_engine(source, tmp_path / "engine")


def test_a_model_that_is_no_onnx(exported, tmp_path):
    source = exported()
    (source / "model.onnx").write_bytes(b"\x00\x01garbage")
    with pytest.raises(ExportedError, match=r"model.onnx: not a readable ONNX model"):
        build_engine(source, tmp_path / "engine")


def test_an_onnx_model_that_is_not_canonical(exported, tmp_path):
    source = exported()
    text = '<ir_version: 10, opset_import: ["" : 24]> g (float[2] x) => (float[2] y) { y = Neg(x) }'
    onnx.save(onnx.parser.parse_model(text), source / "model.onnx")
    with pytest.raises(ExportedError, match="not a canonical graph, input input_ids is missing"):
        build_engine(source, tmp_path / "engine")


def test_weights_outside_the_folder_are_refused(exported, tmp_path):
    source = exported()
    model = onnx.load(source / "model.onnx", load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL)
    next(item for item in tensor.external_data if item.key == "location").value = "../../etc/passwd"
    onnx.save(model, source / "model.onnx")
    with pytest.raises(ExportedError, match=r"lies in '../../etc/passwd', not 'weights.bin'"):
        build_engine(source, tmp_path / "engine")


@pytest.mark.parametrize("name", sorted(PLANNED))
def test_a_planned_target_says_why_not_yet(exported, tmp_path, name):
    with pytest.raises(TargetError, match=f"target {name} is not available yet: .*; build for ort-cpu"):
        build_engine(exported(), tmp_path / "engine", BuildConfig(target=name))


def test_unknown_names_are_answered_with_the_known(exported, tmp_path):
    source = exported()
    with pytest.raises(TargetError, match="target 'abacus' is unknown; there are ort-cpu"):
        build_engine(source, tmp_path / "engine", BuildConfig(target="abacus"))
    with pytest.raises(QuantizationError, match="quantisation 'int3' is unknown; there are fp32"):
        build_engine(source, tmp_path / "engine", BuildConfig(quant="int3"))
    with pytest.raises(QuantizationError, match="kv cache 'int3' is unknown; there are auto, fp32"):
        build_engine(source, tmp_path / "engine", BuildConfig(kv_cache="int3"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_batch": 0}, "max_batch is 0"),
        ({"max_step_tokens": 2**31}, "max_step_tokens is 2147483648; it must be between 1 and 2147483647"),
        ({"block_size": -16}, "block_size is -16"),
        ({"max_step_tokens": 8}, "max_step_tokens 8 is less than max_batch 64"),
    ],
)
def test_limits_that_cannot_be(options, words):
    with pytest.raises(BuildError, match=words):
        BuildConfig(**options)


def test_a_sequence_longer_than_the_model(exported, tmp_path):
    with pytest.raises(
        BuildError, match="max_sequence 257 is more than the 256 positions of LlamaForCausalLM"
    ):
        build_engine(exported(), tmp_path / "engine", BuildConfig(max_sequence=257))


def test_a_block_that_does_not_divide_names_the_layer(exported, tmp_path):
    config = BuildConfig(overrides=(Override("*.mlp.down", WeightFormat("i4", 96)),))
    with pytest.raises(QuantizationError, match=r"layer layers.0.mlp.down: block size 96 does not divide"):
        build_engine(exported(), tmp_path / "engine", config)


def test_two_builds_of_one_place_do_not_mix(exported, tmp_path):
    """Both run to the end; what stands there is one of them, whole."""
    source, out = exported(), tmp_path / "engine"
    errors = []

    def build(quant: str) -> None:
        try:
            build_engine(source, out, BuildConfig(quant=quant))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=build, args=(quant,)) for quant in ("int4", "int8", "fp32")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    manifest = EngineManifest.load(out)
    manifest.check(out, facts(manifest))
    assert [p.name for p in Path(tmp_path).iterdir() if p.name.startswith(".engine")] == []
