"""A residual Add and the RMSNormalization that reads it become AddRMSNorm, which gives both."""

from __future__ import annotations

import onnx_ir as ir

from enginebay.builder.lower.graph import (
    FLOAT,
    RewriteReport,
    float_attribute,
    int_attribute,
    plugin_node,
    static_shape,
    take_over,
)
from enginebay.plugins import ops


def fuse_add_rms_norm(graph: ir.Graph) -> RewriteReport:
    """Rewrites RMSNormalization(Add(a, b), weight), axis -1, both operands computed and float32 [T, H].

    The first norm of a model, which follows the embedding, has no Add and stays RMSNormalization.
    """
    report = RewriteReport("add_rms_norm")
    for norm in list(graph):
        if norm.op_type != "RMSNormalization" or norm.domain != "":
            continue
        total, weight = norm.inputs[0], norm.inputs[1]
        assert total is not None
        assert weight is not None
        add = total.producer()
        reason = _obstacle(norm, add, weight)
        if reason is not None:
            report.miss(norm, reason)
            continue
        assert add is not None
        y, new_total = (ir.Value(type=ir.TensorType(FLOAT)) for _ in range(2))
        fused = plugin_node(
            ops.ADD_RMS_NORM,
            [add.inputs[0], add.inputs[1], weight],
            {"epsilon": float_attribute(norm, "epsilon", 1e-5)},
            [y, new_total],
            norm.name,
        )
        graph.insert_before(add, fused)
        take_over(norm.outputs[0], y)
        take_over(total, new_total)
        graph.remove(norm, safe=True)
        graph.remove(add, safe=True)
        report.matched += 1
    return report


def _obstacle(norm: ir.Node, add: ir.Node | None, weight: ir.Value) -> str | None:
    if add is None or add.op_type != "Add" or add.domain != "":
        return "no residual Add precedes it"
    if int_attribute(norm, "axis", -1) != -1:
        return "normalises over more than the last axis"
    shape = static_shape(weight)
    if not weight.is_initializer() or weight.dtype != FLOAT or shape is None or len(shape) != 1:
        return "its weight is not a float32 vector"
    for operand in add.inputs:
        assert operand is not None
        if operand.is_initializer() or operand.shape is None or len(operand.shape) != 2:
            return f"{operand.name} is not a computed [T, H] value"
        if operand.shape[1] != shape[0] or operand.dtype != FLOAT:
            return f"{operand.name} is {operand.dtype} {operand.shape}, not float32 rows of {shape[0]}"
    return None
