"""Split in two, activation of the first half, product with the second: GatedActivation."""

from __future__ import annotations

import onnx_ir as ir

from enginebay.builder.lower.graph import (
    FLOAT,
    RewriteReport,
    float_attribute,
    int_attribute,
    only_user,
    plugin_node,
    replace,
    string_attribute,
)
from enginebay.plugins import ops


def fuse_gated_activation(graph: ir.Graph) -> RewriteReport:
    """Rewrites Mul(act(gate), up) where (gate, up) = Split(x, axis=-1) in equal halves and act is in
    ops.ACTIVATIONS."""
    report = RewriteReport("gated_activation")
    for split in list(graph):
        if split.op_type != "Split" or split.domain != "":
            continue
        x = split.inputs[0]
        if x is None or len(split.outputs) != 2 or not _halves(split):
            report.miss(split, "does not cut the last axis in two equal halves")
            continue
        gate, up = split.outputs
        product = only_user(up)
        activation = _activation_between(gate, product)
        if product is None or activation is None:
            report.miss(
                split, f"its halves do not meet as act(gate)*up with act one of {', '.join(ops.ACTIVATIONS)}"
            )
            continue
        y = ir.Value(type=ir.TensorType(FLOAT))
        fused = plugin_node(ops.GATED_ACTIVATION, [x], {"activation": activation}, [y], product.name)
        replace(graph, product, fused, [(product.outputs[0], y)])
        report.matched += 1
    return report


def _halves(split: ir.Node) -> bool:
    x = split.inputs[0]
    if x is None or x.shape is None or int_attribute(split, "axis", 0) not in (-1, len(x.shape) - 1):
        return False
    first, second = (output.shape for output in split.outputs)
    return first is not None and second is not None and first[-1] == second[-1] and isinstance(first[-1], int)


def _activation_between(gate: ir.Value, product: ir.Node | None) -> str | None:
    """The activation that leads from `gate` to the other factor of `product`."""
    if product is None or product.op_type != "Mul":
        return None
    for factor in product.inputs:
        assert factor is not None
        node = factor.producer()
        if node is not None and (name := _activation(node, gate)) and only_user(factor) is product:
            return name
    return None


def _activation(node: ir.Node, gate: ir.Value) -> str | None:
    """The name of the activation whose last node is `node`, if it reads `gate` and nothing else."""
    readers = {user for user, _ in gate.uses()}
    match node.op_type:
        case "Swish" if readers == {node} and float_attribute(node, "alpha", 1.0) == 1.0:
            return "silu"
        case "Gelu" if readers == {node}:
            return "gelu_tanh" if string_attribute(node, "approximate", "none") == "tanh" else "gelu"
        case "Relu" if readers == {node}:
            return "relu"
        case "Mul":
            inner = [value.producer() for value in node.inputs if value is not None and value is not gate]
            if len(inner) == 1 and inner[0] is not None and readers == {node, inner[0]}:
                return (
                    "silu"
                    if inner[0].op_type == "Sigmoid" and only_user(inner[0].outputs[0]) is node
                    else None
                )
            squared = node.inputs[0]
            if squared is not None and squared is node.inputs[1]:
                relu = squared.producer()
                if relu is not None and relu.op_type == "Relu" and readers == {relu}:
                    return "relu2"
    return None
