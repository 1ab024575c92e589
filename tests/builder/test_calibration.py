from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir
import pytest
from builder_support import KV_HEADS, LAYERS, OPS, VOCAB, PagedAttention, PlainLibrary
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import ShapeInferencePass

from enginebay.builder.build import BuildConfig, build_engine
from enginebay.builder.exported import read_exported
from enginebay.builder.packing import WeightPacker
from enginebay.builder.quant.cache import CACHES
from enginebay.builder.quant.calibrate import calibrate
from enginebay.builder.quant.fold import find_fold
from enginebay.builder.quant.formats import QuantizationError, WeightFormat
from enginebay.builder.quant.input_rounding import InputRounding
from enginebay.builder.quant.interpreter import Batch, Interpreter, linear_weight, weight_matrix
from enginebay.builder.quant.plan import RoundToNearest
from enginebay.builder.quant.recipes import RECIPES, recipe
from enginebay.builder.quant.scaling import AwqScaling, Site, SmoothScaling, channel_scale
from enginebay.builder.quant.text import CalibrationConfig, calibration_batch, default_text
from enginebay.builder.targets.base import CacheLayout
from enginebay.builder.targets.ort_cpu import OrtCpu


def batch(seed=0, count=6, length=40):
    rng = np.random.default_rng(seed)
    return Batch(tuple(tuple(rng.integers(0, VOCAB, length - i).tolist()) for i in range(count)))


def canonical(folder):
    source = read_exported(folder)
    ShapeInferencePass()(source.model)
    return source


def evaluate(model, tokens, ops):
    feeds = dict(tokens.arrays())
    for layer in range(LAYERS):
        feeds[f"cache.{layer}"] = np.zeros((tokens.blocks, 2, 16, KV_HEADS, 16), np.float32)
    proto = ir.to_proto(ir.external_data.load_to_model(model))
    return ReferenceEvaluator(proto, new_ops=ops).run(["logits"], feeds)[0]


@pytest.mark.parametrize(("tied", "bias"), [(True, False), (False, True)])
def test_the_interpreter_computes_what_the_graph_says(exported, tied, bias):
    model = canonical(exported(tied=tied, bias=bias)).model
    tokens = batch(count=3)
    run = Interpreter(model.graph, tokens)
    values, read = run.start(), {}
    for node in [*run.body, *run.tail]:
        weight = linear_weight(node)
        if weight is None:
            run.step(node, values)
        else:
            matrix = weight_matrix(weight)
            run.linear(node, values, matrix.rows(0, matrix.shape[0]))
        run.release(node, values, read)
    expected = evaluate(model, tokens, [PagedAttention])
    np.testing.assert_allclose(values[model.graph.outputs[0]], expected, atol=1e-4)
    assert set(values) == {model.graph.outputs[0]}, "everything else was released"


def quantised_logits(folder, chosen, tokens, scratch, calibration=None):
    """Float64 logits with the weights that the recipe gives, the rest of the computation exact."""
    source = canonical(folder)
    scratch.mkdir(exist_ok=True)
    quantizer = RoundToNearest()
    if chosen.calibrated:
        quantizer = calibrate(source.model, chosen, calibration or tokens, scratch)
    packer = WeightPacker(chosen, PlainLibrary(), quantizer)
    OrtCpu().lower(source.model, packer, CacheLayout(CACHES["fp32"], 16))
    logits = evaluate(source.model, tokens, OPS)
    return logits, {result.layer: result for result in packer.results}


@pytest.mark.parametrize("name", ["int4-gptq", "int4-awq"])
def test_a_calibrated_recipe_comes_nearer_to_the_model_than_rounding(exported, tmp_path, name):
    """On a model whose inputs are correlated and uneven, and on tokens that calibration did not see."""

    def uneven(tensors):
        rng = np.random.default_rng(3)
        for key in tensors:
            if "layernorm" in key:
                tensors[key] *= np.exp(rng.standard_normal(tensors[key].shape) * 1.2).astype(np.float32)

    folder, tokens = exported(edit=uneven, dtype=np.float32), batch(1)
    exact = evaluate(canonical(folder).model, tokens, [PagedAttention])
    errors = {}
    for quant in ("int4-rtn", name):
        chosen = recipe(quant).with_blocks(64, True)
        logits, results = quantised_logits(folder, chosen, tokens, tmp_path / quant, batch(2, count=16))
        errors[quant] = np.square(logits - exact).mean()
        assert results["layers.0.mlp.down"].format == WeightFormat("i4", 64)
        assert results["layers.0.mlp.down"].method == {"int4-rtn": "rtn"}.get(quant, quant[5:])
        assert results["lm_head"].method == "rtn"
    assert errors[name] < 0.8 * errors["int4-rtn"]


@pytest.mark.parametrize("bias", [True, False])
def test_scales_fold_into_what_produces_the_inputs(exported, tmp_path, bias):
    """At 8 bits nothing but the folding can go wrong: norms, value rows of grouped heads, up rows, biases."""

    def outliers(tensors):
        for layer in range(LAYERS):
            tensors[f"model.layers.{layer}.input_layernorm.weight"][[3, 9]] *= 30
            tensors[f"model.layers.{layer}.self_attn.v_proj.weight"][5] *= 20
            tensors[f"model.layers.{layer}.mlp.up_proj.weight"][17] *= 20

    folder, tokens = exported(edit=outliers, bias=bias, dtype=np.float32), batch(1)
    exact = evaluate(canonical(folder).model, tokens, [PagedAttention])
    plain, _ = quantised_logits(folder, recipe("int8"), tokens, tmp_path / "int8")
    logits, results = quantised_logits(folder, recipe("w8a8"), tokens, tmp_path / "w8a8")
    assert {result.method for name, result in results.items() if name != "lm_head"} == {"smoothquant"}
    assert np.abs(logits - exact).max() < 4 * np.abs(plain - exact).max()
    assert all(result.relative_error < 0.02 for result in results.values())


def test_every_linear_layer_of_a_llama_has_somewhere_to_fold(exported):
    graph = canonical(exported()).model.graph
    found = {node.name: find_fold(node) for node in graph if linear_weight(node) is not None}
    assert found["layers.0.attention.qkv"].node.name == "layers.0.pre_attention_norm"
    assert found["layers.0.mlp.gate_up"].node.name == "layers.0.pre_mlp_norm"
    down, out = found["layers.0.mlp.down"], found["layers.0.attention.out"]
    assert (down.node.name, down.first, down.channels) == ("layers.0.mlp.gate_up", 128, 128)
    assert (out.node.name, out.first, out.channels) == ("layers.0.attention.qkv", (4 + 2) * 16, 2 * 16)
    # Four query heads read two value heads.
    np.testing.assert_array_equal(out.channel[[0, 15, 16, 31, 32, 63]], [0, 15, 0, 15, 16, 31])


def test_smoothquant_is_its_formula():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((20, 8)).astype(np.float32), rng.standard_normal((5, 8)).astype(np.float32)
    x[:, 2] *= 50
    site = Site(None, w, x, (x.T @ x).astype(np.float64))
    scale = channel_scale(SmoothScaling(0.5), site, np.arange(8))
    expected = np.sqrt(np.abs(x).max(0) / np.abs(w).max(0))
    np.testing.assert_allclose(scale / scale[0], expected / expected[0], rtol=1e-5)


def test_awq_without_outliers_scales_nothing():
    """All channels alike: the best exponent is one that gives 1 everywhere."""
    w = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    x = np.ones((10, 64), np.float32)
    plan = type("Plan", (), {"format": WeightFormat("i4", 32), "matrix": type("M", (), {"name": "w"})})
    scale = channel_scale(AwqScaling(), Site(plan, w, x, np.eye(64)), np.arange(64))
    np.testing.assert_allclose(scale, 1)


@pytest.mark.filterwarnings("ignore:overflow")
def test_inputs_that_are_not_finite_name_the_layer(exported, tmp_path):
    def huge(tensors):
        tensors["model.layers.0.mlp.gate_proj.weight"][:] = 60000
        tensors["model.layers.0.mlp.up_proj.weight"][:] = 1e30
        tensors["model.layers.0.mlp.up_proj.weight"][0] = -1e30

    source = canonical(exported(edit=huge, dtype=np.float32))
    with (
        np.errstate(over="ignore"),
        pytest.raises(QuantizationError, match=r"layer layers\.0\.mlp\.down: .* not finite"),
    ):
        calibrate(source.model, recipe("int4-gptq"), batch(), tmp_path)


def token_file(folder, sequences):
    path = folder / "tokens.json"
    path.write_text(json.dumps(sequences))
    return CalibrationConfig(source=path)


def test_a_build_with_calibration(exported, tmp_path, monkeypatch):
    monkeypatch.setattr(OrtCpu, "plugins", PlainLibrary())
    seen = []
    config = BuildConfig(
        quant="int4-gptq",
        weight_block=64,
        weight_symmetric=True,
        calibration=token_file(tmp_path, [list(s) for s in batch().sequences]),
    )
    report = build_engine(exported(), tmp_path / "engine", config, lambda *step: seen.append(step))
    formats = {layer.layer: (layer.format.key, layer.method) for layer in report.layers}
    assert formats["layers.1.attention.qkv"] == ("i4.b64.sym", "gptq")
    assert formats["lm_head"] == ("i8.b32", "rtn")
    assert (4 * LAYERS, 4 * LAYERS + 1, f"layers.{LAYERS - 1}.mlp.down") in seen
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_default_text_is_split_in_halves():
    first, second = default_text(0), default_text(1)
    assert abs(len(first) - len(second)) <= 1
    assert len(first) > 200_000
    assert first[:1000] not in second


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.json", "{}", "not a list of lists of token ids"),
        ("t.json", "[[1, 2.5]]", "not a list of lists of token ids"),
        ("t.json", "[[1, true]]", "not a list of lists of token ids"),
        ("t.json", "[[1, 2", "not JSON"),
        ("t.json", "[]", "no sequence of at least two tokens"),
        ("t.json", "[[1]]", "no sequence of at least two tokens"),
        ("t.json", "[[1, 2], [3, 128]]", r"sequence 1 has token 128, outside the model's 0\.\.127"),
        ("t.json", "[[-1, 2]]", "sequence 0 has token -1"),
        ("t.npy", "not an array", "not an array of integers"),
        ("t.txt", "some text", "has no tokenizer.json"),
    ],
)
def test_a_calibration_source_that_cannot_be_used_is_named(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(QuantizationError, match=words):
        calibration_batch(tmp_path, VOCAB, CalibrationConfig(source=tmp_path / name))


def test_a_missing_source_and_a_missing_tokenizer(tmp_path):
    with pytest.raises(QuantizationError, match=r"nowhere\.json cannot be read: No such file"):
        calibration_batch(tmp_path, VOCAB, CalibrationConfig(source=tmp_path / "nowhere.json"))
    with pytest.raises(QuantizationError, match=r"no tokenizer\.json to read Python's help topics with"):
        calibration_batch(tmp_path, VOCAB, CalibrationConfig())


def test_pickled_arrays_are_refused(tmp_path):
    np.save(tmp_path / "t.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(QuantizationError, match=r"object \[1\], not integers"):
        calibration_batch(tmp_path, VOCAB, CalibrationConfig(source=tmp_path / "t.npy"))


def test_an_array_of_tokens(tmp_path):
    tokens = np.arange(12, dtype=np.int64).reshape(2, 6)
    np.save(tmp_path / "t.npy", tokens)
    config = CalibrationConfig(source=tmp_path / "t.npy", length=4)
    assert calibration_batch(tmp_path, VOCAB, config).sequences == ((0, 1, 2, 3), (6, 7, 8, 9))


def test_a_recipe_without_int4_takes_no_block():
    with pytest.raises(QuantizationError, match="recipe int8 has no int4 or fp8 layers"):
        recipe("int8").with_blocks(64, None)
    assert recipe("int4").with_blocks(64, True).linear == WeightFormat("i4", 64)
    assert recipe("int4").with_blocks(None, None) is RECIPES["int4"]


def test_static_scales_reach_twice_the_largest_input(exported, tmp_path):
    """The inputs of the first layer are those of the model as it came."""
    source, tokens = canonical(exported()), batch()
    result = calibrate(source.model, recipe("fp8-w8a8-static"), tokens, tmp_path)
    run = Interpreter(source.model.graph, tokens)
    values = run.start()
    for node in run.body:
        if linear_weight(node) is not None:
            break
        run.step(node, values)
    largest = np.abs(values[node.inputs[0]]).max()
    assert result.inputs.scales["layers.0.attention.qkv"] == pytest.approx(2 * largest / 448, rel=1e-6)
    linears = [n.name for n in source.model.graph if linear_weight(n) is not None and n.name != "lm_head"]
    assert sorted(result.inputs.scales) == sorted(linears)  # the head is int8


def test_a_layer_without_a_static_scale_is_named(exported):
    source = canonical(exported())
    inputs = InputRounding({"lm_head": 1.0})
    packer = WeightPacker(recipe("fp8-w8a8-static"), PlainLibrary(), RoundToNearest(), inputs)
    with pytest.raises(QuantizationError, match=r"layer layers\.0\.attention\.qkv: calibration did not"):
        OrtCpu().lower(source.model, packer, CacheLayout(CACHES["fp32"], 4))


def test_an_engine_says_how_inputs_are_rounded(exported, tmp_path):
    np.save(tmp_path / "t.npy", np.arange(64).reshape(2, 32) % VOCAB)
    config = CalibrationConfig(source=tmp_path / "t.npy")
    source, methods = exported(), {}
    for name in ("fp8-w8a8", "fp8-w8a8-static", "fp8", "w4a8"):
        report = build_engine(source, tmp_path / name, BuildConfig(quant=name, calibration=config))
        methods[name] = {layer.layer: layer.method for layer in report.layers}
        assert methods[name]["lm_head"] == "rtn"
    layer = "layers.1.mlp.down"
    assert methods["fp8-w8a8"][layer] == "gptq, E4M3 inputs, 64 of them twice"
    assert methods["w4a8"][layer] == "rtn, E4M3 inputs, 32 of them twice"
    assert methods["fp8-w8a8-static"][layer].startswith("gptq, E4M3 inputs of scale 0.")
    assert methods["fp8-w8a8-static"][layer].endswith(", 64 of them twice")
    assert methods["fp8"][layer] == "rtn"


@pytest.mark.filterwarnings("ignore:overflow")
def test_inputs_without_a_static_scale_name_the_layer(exported, tmp_path):
    """Weights of a size that the builder takes, whose product overflows float32."""

    def huge(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][:] = 2.0**100
        tensors["model.layers.1.mlp.gate_proj.weight"][:] = 2.0**100

    source = canonical(exported(dtype=np.float32, edit=huge))
    with pytest.raises(QuantizationError, match=r"layer layers\.1\.mlp\.down: its inputs in calibration"):
        calibrate(source.model, recipe("fp8-w8a8-static"), batch(), tmp_path)
