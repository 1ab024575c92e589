"""Gemm over a checkpoint's weights becomes QuantLinear over packed weights."""

from __future__ import annotations

import onnx_ir as ir

from enginebay.builder.lower.graph import (
    RewriteReport,
    float_attribute,
    int_attribute,
    plugin_node,
    replace,
    static_shape,
    through_cast,
)
from enginebay.builder.packing import WeightPacker
from enginebay.builder.quant.stored import stored_weights
from enginebay.plugins import ops


def lower_linears(graph: ir.Graph, packer: WeightPacker) -> RewriteReport:
    """Rewrites Gemm(x, W [N, K], [bias [N]], transB=1), alpha and beta 1, W an initializer, a Cast of one
    or a DequantizeLinear of weights that came quantised."""
    report = RewriteReport("quant_linear")
    for node in list(graph):
        if node.op_type not in ("Gemm", "MatMul") or node.domain != "":
            continue
        reason = _obstacle(node)
        if reason is not None:
            report.miss(node, reason)
            continue
        x, weight, bias = node.inputs[0], node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
        assert weight is not None
        layer, stored = node.name or "linear", stored_weights(weight)
        if stored is None:
            packed = packer.place(graph, layer, through_cast(weight))
        else:
            packed = packer.place_stored(graph, layer, f"{layer}.weight", stored)
        y = ir.Value(type=ir.TensorType(ir.DataType.FLOAT))
        op, attributes, scale = ops.QUANT_LINEAR, packed.attributes, packer.input_scale(layer, packed)
        if scale is not None:
            op, attributes = ops.QUANT_LINEAR_F8_INPUTS, {**attributes, "input_scale": scale}
        inputs = [x, packed.value, bias, packed.repeated]
        while inputs[-1] is None:
            inputs.pop()
        lowered = plugin_node(op, inputs, attributes, [y], node.name)
        replace(graph, node, lowered, [(node.outputs[0], y)])
        report.matched += 1
    return report


def _obstacle(node: ir.Node) -> str | None:
    """Why this product stays as it is; None where it can be lowered."""
    weight = node.inputs[1]
    assert weight is not None
    source, stored = through_cast(weight), stored_weights(weight)
    if not source.is_initializer() and stored is None:
        return "its second operand is computed, not a weight"
    if node.op_type == "MatMul":
        return "MatMul holds the weight as [K, N]; the canonical form is Gemm with transB=1"
    shape = static_shape(source) if stored is None else stored.shape
    if shape is None or len(shape) != 2:
        return f"weight {source.name} has shape {shape}, not [N, K]"
    if int_attribute(node, "transB", 0) != 1 or any(
        (
            int_attribute(node, "transA", 0),
            *(float_attribute(node, key, 1.0) != 1.0 for key in ("alpha", "beta")),
        )
    ):
        return "needs transA=0, transB=1, alpha=1 and beta=1"
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None:
        held = through_cast(bias)
        if not held.is_initializer() or static_shape(held) != (shape[0],):
            return f"bias {held.name} is not an initializer of {shape[0]} values"
    return None
