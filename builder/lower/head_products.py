"""Products head by head (latent attention) get a row more than there are tokens.

ONNX Runtime multiplies a single row by another routine, whose sums are in another order; with at least two
rows a row's bits do not depend on how many others came along.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from enginebay.builder.lower.graph import RewriteReport


def pad_head_products(graph: ir.Graph) -> RewriteReport:
    """Rewrites MatMul(x [H, T, K], w [H, K, N]) into one over T + 1 rows, of which the last is cut off."""
    report = RewriteReport("head_products")
    for node in list(graph):
        if node.op_type != "MatMul" or node.domain != "":
            continue
        x = node.inputs[0]
        assert x is not None
        if x.shape is None or len(x.shape) != 3:
            report.miss(node, "its first operand has no three dimensions")
            continue
        pads = _integers(graph, "head_products.pads", [0, 0, 0, 0, 1, 0])
        padded = _before(graph, node, "Pad", [x, pads], f"{node.name}.padded")
        node.replace_input_with(0, padded)
        output = node.outputs[0]
        name, output.name = output.name, f"{node.name}.rows"
        start, end, axis = (
            _integers(graph, f"head_products.{label}", [value])
            for label, value in (("start", 0), ("end", -1), ("axis", 1))
        )
        cut = ir.node("Slice", [output, start, end, axis], name=f"{node.name}.cut")
        result = cut.outputs[0]
        result.name, result.shape, result.type = name, output.shape, output.type
        output.shape = None
        graph.insert_after(node, cut)
        for user, index in list(output.uses()):
            if user is not cut:
                user.replace_input_with(index, result)
        report.matched += 1
    return report


def _before(graph: ir.Graph, node: ir.Node, op_type: str, inputs: list[ir.Value], name: str) -> ir.Value:
    new = ir.node(op_type, inputs, name=name)
    new.outputs[0].name = name
    graph.insert_before(node, new)
    return new.outputs[0]


def _integers(graph: ir.Graph, name: str, values: list[int]) -> ir.Value:
    if name not in graph.initializers:
        tensor = ir.tensor(np.asarray(values, np.int64), name=name)
        graph.register_initializer(
            ir.Value(
                name=name,
                shape=ir.Shape([len(values)]),
                type=ir.TensorType(ir.DataType.INT64),
                const_value=tensor,
            )
        )
    return graph.initializers[name]
