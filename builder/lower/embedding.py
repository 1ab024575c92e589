"""Gather of embedding rows becomes Embedding over packed weights; tied weights are the ones the head
reads."""

from __future__ import annotations

import onnx_ir as ir

from enginebay.builder.lower.graph import (
    FLOAT,
    RewriteReport,
    int_attribute,
    only_user,
    plugin_node,
    replace,
    static_shape,
)
from enginebay.builder.packing import WeightPacker
from enginebay.plugins import ops


def lower_embeddings(graph: ir.Graph, packer: WeightPacker) -> RewriteReport:
    """Rewrites Gather(W [N, K], ids int32 [T]), axis 0, W an initializer, with the Cast to float32 behind
    it."""
    report = RewriteReport("embedding")
    for node in list(graph):
        if node.op_type != "Gather" or node.domain != "":
            continue
        weight, ids = node.inputs
        assert weight is not None
        assert ids is not None
        if not weight.is_initializer():
            continue
        shape = static_shape(weight)
        if shape is None or len(shape) != 2 or int_attribute(node, "axis", 0) != 0:
            report.miss(node, f"{weight.name} of shape {shape} is not gathered by rows")
            continue
        if ids.dtype != ir.DataType.INT32:
            report.miss(node, f"ids {ids.name} are {ids.dtype}, not int32")
            continue
        last = node
        if weight.dtype != FLOAT:
            cast = only_user(node.outputs[0])
            if cast is None or cast.op_type != "Cast" or cast.outputs[0].dtype != FLOAT:
                report.miss(node, f"rows of {weight.dtype} are not cast to float32")
                continue
            last = cast
        packed = packer.place(graph, node.name or "embed", weight, "embedding")
        y = ir.Value(type=ir.TensorType(FLOAT))
        lowered = plugin_node(ops.EMBEDDING, [ids, packed.value], packed.attributes, [y], node.name)
        replace(graph, last, lowered, [(last.outputs[0], y)])
        if last is not node:
            graph.remove(node, safe=True)
        report.matched += 1
    return report
