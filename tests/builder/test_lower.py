from __future__ import annotations

import copy
from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
from builder_support import KV_HEADS, LAYERS, OPS, VOCAB, PagedAttention, PlainLibrary, ragged_step
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import ShapeInferencePass

from enginebay.builder.exported import read_exported
from enginebay.builder.lower.add_rms_norm import fuse_add_rms_norm
from enginebay.builder.lower.gated_activation import fuse_gated_activation
from enginebay.builder.lower.graph import remove_dead
from enginebay.builder.lower.quant_linear import lower_linears
from enginebay.builder.lower.select_rows import select_rows_early
from enginebay.builder.packing import WeightPacker
from enginebay.builder.quant.cache import CACHES
from enginebay.builder.quant.plan import RoundToNearest
from enginebay.builder.quant.recipes import recipe
from enginebay.builder.targets.base import CacheLayout, TargetError
from enginebay.builder.targets.ort_cpu import OrtCpu
from enginebay.plugins import ops


def packer(quant: str = "fp32") -> WeightPacker:
    return WeightPacker(recipe(quant), PlainLibrary(), RoundToNearest())


def evaluate(model: ir.Model, feeds, new_ops, dtype=np.float32):
    """Outputs of the model with poisoned caches."""
    graph = copy.copy(feeds)
    for layer in range(LAYERS):
        graph[f"cache.{layer}"] = np.full((8, 2, 4, KV_HEADS, 16), np.nan, dtype)
    proto = ir.to_proto(ir.external_data.load_to_model(model))
    return ReferenceEvaluator(proto, new_ops=new_ops).run(None, graph)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_lowered_graph_computes_what_the_canonical_graph_computes(exported, tied, bias, dtype):
    source = read_exported(exported(tied=tied, bias=bias, dtype=dtype))
    feeds = ragged_step(np.random.default_rng(1), VOCAB, [14, 4, 5])
    expected = evaluate(source.model, feeds, [PagedAttention])
    OrtCpu().lower(source.model, packer(), CacheLayout(CACHES["fp32"], 4))
    actual = evaluate(source.model, feeds, OPS)
    np.testing.assert_allclose(actual[0], expected[0], atol=2e-5)
    for mine, theirs in zip(actual[1:], expected[1:], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)  # NaN where nothing was written, in both


def test_a_layer_is_two_nodes_and_no_product_remains(exported):
    source = read_exported(exported())
    rewrites = OrtCpu().lower(source.model, packer("int4"), CacheLayout(CACHES["fp16"], 16))
    reports = {report.rewrite: report for report in rewrites}
    counts = Counter(node.op_type for node in source.model.graph)
    assert counts == {
        "Embedding": 1,
        "RMSNormalization": 1,
        "QuantLinear": 1,
        "PagedAttention": LAYERS,
        "LayerTail": LAYERS,
        "Gather": 2,
    }
    assert [miss.node for miss in reports["add_rms_norm"].misses] == ["layers.0.pre_attention_norm"]
    assert reports["add_rms_norm"].misses[0].reason == "no residual Add precedes it"
    left = [reports[name].misses for name in ("quant_linear", "embedding", "gated_activation", "cache")]
    assert left == [[], [], [], []]


def test_tied_weights_are_packed_once_and_read_twice(exported):
    source = read_exported(exported(tied=True))
    OrtCpu().lower(source.model, packer("int8"), CacheLayout(CACHES["fp16"], 16))
    nodes = list(source.model.graph)
    (embedding,) = (node for node in nodes if node.op_type == "Embedding")
    (head,) = (node for node in nodes if source.model.graph.outputs[0] in node.outputs)
    assert embedding.inputs[1] is head.inputs[ops.LAYER_TAIL.input_index("next_weight")]
    assert "model.embed_tokens.weight" not in source.model.graph.initializers


def test_cache_gets_dtype_and_block_size(exported):
    source = read_exported(exported())
    OrtCpu().lower(source.model, packer(), CacheLayout(CACHES["bf16"], 32))
    for value in [v for v in (*source.model.graph.inputs, *source.model.graph.outputs) if "cache" in v.name]:
        assert value.dtype == ir.DataType.BFLOAT16
        assert list(value.shape)[1:] == [2, 32, KV_HEADS, 16]


def test_the_last_layer_after_attention_sees_only_the_rows_asked_for(exported):
    source = read_exported(exported())
    OrtCpu().lower(source.model, packer(), CacheLayout(CACHES["fp32"], 4))
    tails = {node.name: node for node in source.model.graph if node.op_type == "LayerTail"}
    for layer, rows in ((LAYERS - 2, "T"), (LAYERS - 1, "R")):
        tail = tails[f"layers.{layer}.attention.out"]
        assert [str(value.shape[0]) for value in (*tail.inputs[:2], tail.outputs[0])] == [rows] * 3


def test_a_layer_whose_inside_is_read_elsewhere_stays_as_it_is(exported):
    source = read_exported(exported())
    graph = source.model.graph
    inside = next(node for node in graph if node.name == "layers.0.mlp.down").outputs[0]
    graph.outputs.append(inside)
    OrtCpu().lower(source.model, packer(), CacheLayout(CACHES["fp32"], 4))
    counts = Counter(node.op_type for node in graph)
    assert (counts["LayerTail"], counts["QuantLinear"], counts["GatedActivation"]) == (LAYERS - 1, 5, 1)


def test_no_rows_asked_for_gives_no_logits(exported):
    source = read_exported(exported())
    OrtCpu().lower(source.model, packer(), CacheLayout(CACHES["fp32"], 4))
    feeds = ragged_step(np.random.default_rng(1), VOCAB, [])
    assert evaluate(source.model, feeds, OPS)[0].shape == (0, VOCAB)


def test_a_row_read_elsewhere_is_not_selected_early(exported):
    """A drafter that reads every row's hidden state keeps the Gather where it was."""
    source = read_exported(exported())
    graph = source.model.graph
    ShapeInferencePass()(source.model)
    hidden = next(n for n in graph if n.name == "logits_rows").inputs[0]
    graph.outputs.append(hidden)
    report = select_rows_early(graph)
    assert report.matched == 0
    assert report.misses[0].node == "logits_rows"


def from_text(text: str) -> ir.Model:
    model = ir.from_onnx_text(text)
    ShapeInferencePass()(model)
    return model


LINEAR = """<ir_version: 10, opset_import: ["" : 24]>
g (float[T, 4] x) => (float[T, 3] y) <float[{shape}] w = {{{values}}}> {{ y = Gemm <{attributes}> (x, w) }}"""


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ("transB: int = 0", "needs transA=0, transB=1"),
        ("transB: int = 1, alpha: float = 2.0", "alpha=1"),
        ("transB: int = 1, beta: float = 0.5", "beta=1"),
    ],
)
def test_a_product_of_another_form_is_left_with_a_reason(attributes, reason):
    shape = "3, 4" if "transB: int = 1" in attributes else "4, 3"
    model = from_text(LINEAR.format(shape=shape, values=", ".join(["1"] * 12), attributes=attributes))
    report = lower_linears(model.graph, packer())
    assert report.matched == 0
    assert reason in report.misses[0].reason


GATED = """<ir_version: 10, opset_import: ["" : 24]>
g (float[T, {width}] x) => (float[T, 4] y) <int64[2] sizes = {{{sizes}}}> {{
  a, b = Split <axis: int = -1> (x, sizes)
  {body}
}}"""


@pytest.mark.parametrize(
    ("body", "activation"),
    [
        ("c = Swish(a) y = Mul(c, b)", "silu"),
        ("s = Sigmoid(a) c = Mul(s, a) y = Mul(b, c)", "silu"),
        ('c = Gelu <approximate: string = "tanh"> (a) y = Mul(c, b)', "gelu_tanh"),
        ("c = Gelu(a) y = Mul(c, b)", "gelu"),
        ("c = Relu(a) y = Mul(b, c)", "relu"),
        ("r = Relu(a) c = Mul(r, r) y = Mul(c, b)", "relu2"),
    ],
)
def test_every_activation_of_the_op_table_is_recognised(body, activation):
    model = from_text(GATED.format(width=8, sizes="4, 4", body=body))
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    expected = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x})[0] if "Swish" not in body else None
    assert fuse_gated_activation(model.graph).matched == 1
    remove_dead(model.graph)
    (node,) = model.graph
    assert node.attributes["activation"].as_string() == activation
    model.graph.opset_imports["enginebay"] = 1
    actual = ReferenceEvaluator(ir.to_proto(model), new_ops=OPS).run(None, {"x": x})[0]
    if expected is None:
        expected = x[:, :4] / (1 + np.exp(-x[:, :4])) * x[:, 4:]
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("width", "sizes", "body", "reason"),
    [
        (12, "4, 8", "c = Swish(a) d = Slice(b, z, e, z1) y = Mul(c, d)", "two equal halves"),
        (8, "4, 4", "c = Swish(a) y = Add(c, b)", "do not meet"),
        (8, "4, 4", "c = Swish <alpha: float = 1.7> (a) y = Mul(c, b)", "do not meet"),
        (8, "4, 4", "c = Swish(b) y = Mul(c, b)", "do not meet"),
        (8, "4, 4", "c = Swish(a) d = Mul(c, b) y = Add(d, a)", "do not meet"),
    ],
)
def test_other_uses_of_a_split_are_left_with_a_reason(width, sizes, body, reason):
    text = GATED.format(width=width, sizes=sizes, body=body)
    text = text.replace("> {", ", int64[1] z = {0}, int64[1] e = {4}, int64[1] z1 = {1}> {", 1)
    report = fuse_gated_activation(from_text(text).graph)
    assert report.matched == 0
    assert reason in report.misses[0].reason


NORM = """<ir_version: 10, opset_import: ["" : 24]>
g (float[T, 4] a, float[T, 4] b, float[1, 4] c) => (float[T, 4] y) <float[4] w = {{1, 1, 1, 1}}> {{
  {body}
}}"""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = RMSNormalization(a, w)", "no residual Add"),
        ("s = Add(a, w) y = RMSNormalization(s, w)", "not a computed [T, H] value"),
        ("s = Mul(a, b) y = RMSNormalization(s, w)", "no residual Add"),
    ],
)
def test_other_norms_are_left_with_a_reason(body, reason):
    report = fuse_add_rms_norm(from_text(NORM.format(body=body)).graph)
    assert report.matched == 0
    assert reason in report.misses[0].reason


def test_a_sum_read_by_others_keeps_its_readers():
    model = from_text(NORM.format(body="s = Add(a, b) n = RMSNormalization(s, w) y = Add(n, s)"))
    a, b = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    feeds = {"a": a, "b": b, "c": a[:1]}
    assert fuse_add_rms_norm(model.graph).matched == 1
    assert [node.op_type for node in model.graph] == ["AddRMSNorm", "Add"]
    model.graph.opset_imports["enginebay"] = 1
    total = a + b
    expected = total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-5) + total
    actual = ReferenceEvaluator(ir.to_proto(model), new_ops=OPS).run(None, feeds)[0]
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_a_node_without_a_kernel_is_refused_by_name(exported):
    source = read_exported(exported())
    graph = source.model.graph
    logits = graph.outputs[0]
    sine = ir.node("Sin", [logits], name="logits.sine")
    sine.outputs[0].name, logits.name = "logits", "before"
    graph.append(sine)
    graph.outputs[0] = sine.outputs[0]
    with pytest.raises(TargetError, match=r"1 nodes cannot run on ort-cpu: logits.sine \(Sin\): no kernel"):
        OrtCpu().lower(source.model, packer(), CacheLayout(CACHES["fp32"], 16))


def test_a_product_that_could_not_be_lowered_is_refused_with_the_reason(exported):
    source = read_exported(exported())
    node = next(n for n in source.model.graph if n.name == "layers.1.mlp.down")
    node.attributes["alpha"] = ir.AttrFloat32("alpha", 2.0)
    with pytest.raises(TargetError, match=r"layers.1.mlp.down \(Gemm\): quant_linear: needs transA=0"):
        OrtCpu().lower(source.model, packer(), CacheLayout(CACHES["fp32"], 16))
