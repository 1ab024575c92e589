"""A traced model's graph in canonical form: names, shapes, and products of rows with weights as Gemm."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from enginebay.export.graph import cache_shape
from enginebay.export.spec import ModelSpec
from enginebay.plugins import ops

INPUTS = {
    "input_ids": ("T",),
    "position_ids": ("T",),
    "query_start": ("B+1",),
    "kv_len": ("B",),
    "block_table": ("B", "W"),
    "slot_mapping": ("T",),
    "logits_index": ("R",),
}
GROUPED = ("block_table", "slot_mapping")


def canonicalise(model: ir.Model, spec: ModelSpec) -> None:
    """In place: inputs, outputs and nodes get the names and symbolic shapes of docs/ARCHITECTURE.md."""
    graph = model.graph
    step, caches = graph.inputs[: len(INPUTS)], graph.inputs[len(INPUTS) :]
    for value, (name, dims) in zip(step, INPUTS.items(), strict=True):
        value.name = f"{name}.0" if name in GROUPED else name
        value.shape = ir.Shape(dims)
    for layer, (cache, out) in enumerate(zip(caches, graph.outputs[1:], strict=True)):
        shape = cache_shape(spec.cache_groups[spec.group_of(layer)])
        for value, name in ((cache, f"cache.{layer}"), (out, f"cache_out.{layer}")):
            value.name, value.shape, value.type = name, shape, ir.TensorType(ir.DataType.FLOAT)
    logits = graph.outputs[0]
    logits.name, logits.shape = "logits", ir.Shape(["R", spec.vocab_size])
    for index, node in enumerate(attention_nodes(model)):
        node.name = f"layers.{index}.attention"
        node.outputs[0].name = f"layers.{index}.attention.attended"
    head = logits.producer()
    if head is not None and head.op_type == "Gemm":
        head.name = "lm_head"
    _products_to_gemm(graph)
    model.metadata_props["enginebay.graph"] = "canonical"
    model.metadata_props["enginebay.exporter"] = "traced"


def attention_nodes(model: ir.Model) -> list[ir.Node]:
    """PagedAttention nodes in the order of the layers."""
    nodes = [node for node in model.graph if (node.domain, node.op_type) == (ops.DOMAIN, "PagedAttention")]
    order = {value: index for index, value in enumerate(model.graph.outputs)}
    return sorted(nodes, key=lambda node: order[node.outputs[1]])


def _products_to_gemm(graph: ir.Graph) -> None:
    """MatMul(x [1, T, K], W [K, N]) with the Add of a bias behind it becomes Gemm(x [T, K], Wᵀ, bias,
    transB=1)."""
    transposed: dict[str, ir.Value] = {}
    for node in list(graph):
        if node.op_type != "MatMul" or node.domain:
            continue
        x, weight = node.inputs
        assert x is not None
        assert weight is not None
        if not weight.is_initializer() or weight.const_value is None or len(weight.const_value.shape) != 2:
            continue
        assert weight.name is not None
        if weight.name not in transposed:
            values = np.ascontiguousarray(weight.const_value.numpy().T)
            transposed[weight.name] = _initializer(graph, f"{weight.name}.rows", values)
        columns, count = (int(size) for size in weight.const_value.shape.numpy())
        last, bias = _bias_behind(node, count)
        rows = _node(graph, last, "Reshape", [x, _shape_of(graph, (-1, columns))], {"allowzero": 0})
        inputs = [rows, transposed[weight.name], *([bias] if bias is not None else [])]
        product = _node(graph, last, "Gemm", inputs, {"transB": 1})
        lead = [1] * (len(x.shape) - 2) if x.shape is not None else [1]
        result = _node(
            graph, last, "Reshape", [product, _shape_of(graph, (*lead, -1, count))], {"allowzero": 0}
        )
        output = last.outputs[0]
        result.shape, result.type = output.shape, output.type
        name = output.name
        output.replace_all_uses_with(result, replace_graph_outputs=True)
        for old in (last, node) if last is not node else (node,):
            graph.remove(old, safe=True)
        result.name = name
    for name in transposed:
        if not graph.initializers[name].uses():
            del graph.initializers[name]


def _bias_behind(node: ir.Node, count: int) -> tuple[ir.Node, ir.Value | None]:
    """The Add of a vector of `count` that alone reads the product, and the vector.

    Else the product itself.
    """
    uses = list(node.outputs[0].uses())
    if len(uses) != 1 or node.outputs[0].is_graph_output() or uses[0][0].op_type != "Add":
        return node, None
    add = uses[0][0]
    other = add.inputs[1 - uses[0][1]]
    if other is None or not other.is_initializer() or other.const_value is None:
        return node, None
    return (add, other) if other.const_value.shape.numpy() == (count,) else (node, None)


def _node(
    graph: ir.Graph, before: ir.Node, op_type: str, inputs: list[ir.Value], attributes: dict[str, int]
) -> ir.Value:
    stem = before.outputs[0].name or before.name
    node = ir.node(op_type, inputs, attributes, name=f"{stem}.{op_type.lower()}.{len(inputs[0].uses())}")
    node.outputs[0].name = f"{node.name}.out"
    graph.insert_before(before, node)
    return node.outputs[0]


def _shape_of(graph: ir.Graph, shape: tuple[int, ...]) -> ir.Value:
    name = f"shape.{'_'.join(str(size) for size in shape)}"
    return graph.initializers.get(name) or _initializer(graph, name, np.asarray(shape, np.int64))


def _initializer(graph: ir.Graph, name: str, values: np.ndarray) -> ir.Value:  # type: ignore[type-arg]
    tensor = ir.tensor(values, name=name)
    value = ir.Value(
        name=name, shape=ir.Shape(values.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value
