"""Vectors (norm weights, biases) held in a narrow dtype become float32 initializers, without a Cast in the
step."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from enginebay.builder.lower.graph import FLOAT, RewriteReport, static_shape, through_cast

ELEMENTS_MAX = 1 << 20


def fold_casts(graph: ir.Graph) -> RewriteReport:
    """Rewrites Cast(initializer, to float32) of at most ELEMENTS_MAX elements.

    A larger one, too, where it is only reshaped: those are multiplied head by head (latent attention), by a
    standard op that reads float32.
    """
    report = RewriteReport("fold_casts")
    for node in list(graph):
        if node.op_type != "Cast" or node.domain != "":
            continue
        output = node.outputs[0]
        source = through_cast(output)
        if source is output or source.const_value is None:
            continue
        elements = int(np.prod(static_shape(source) or (ELEMENTS_MAX + 1,)))
        if elements > ELEMENTS_MAX and not _only_reshaped(output):
            report.miss(node, f"{source.name} has {elements} elements; casting it would store it wider")
            continue
        name = f"{source.name}.f32"
        folded = graph.initializers.get(name)
        if folded is None:
            tensor = ir.tensor(source.const_value.numpy().astype(np.float32), name=name)
            folded = ir.Value(name=name, shape=source.shape, type=ir.TensorType(FLOAT), const_value=tensor)
            graph.register_initializer(folded)
        output.replace_all_uses_with(folded)
        graph.remove(node, safe=True)
        report.matched += 1
    return report


def _only_reshaped(value: ir.Value) -> bool:
    readers = [node for node, _ in value.uses()]
    return bool(readers) and all(node.op_type == "Reshape" and node.domain == "" for node in readers)
