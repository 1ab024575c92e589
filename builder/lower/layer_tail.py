"""What lies between one attention and the next becomes LayerTail: one node where there were seven.

Run last: it looks for the nodes that the other rewrites made.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from enginebay.builder.lower.graph import (
    FLOAT,
    RewriteReport,
    float_attribute,
    int_attribute,
    only_user,
    plugin_node,
    string_attribute,
    take_over,
)
from enginebay.plugins import ops


@dataclass(frozen=True)
class _Chain:
    """out, AddRMSNorm, gate_up, GatedActivation, down, AddRMSNorm, next."""

    nodes: tuple[ir.Node, ...]

    @property
    def products(self) -> tuple[ir.Node, ...]:
        return self.nodes[0], self.nodes[2], self.nodes[4], self.nodes[6]

    def replacement(self) -> ir.Node:
        out, norm, _, gated, down, next_norm, following = self.nodes
        residual = next(value for value in norm.inputs[:2] if value is not out.outputs[0])
        weights = [product.inputs[1] for product in self.products]
        biases = [product.inputs[2] if len(product.inputs) > 2 else None for product in self.products]
        while biases and biases[-1] is None:
            biases.pop()
        attributes: dict[str, int | float | str] = {
            "attended": int_attribute(out, "in_features", 0),
            "hidden": int_attribute(out, "out_features", 0),
            "intermediate": int_attribute(down, "in_features", 0),
            "next_features": int_attribute(following, "out_features", 0),
            "activation": string_attribute(gated, "activation", ""),
            "mlp_epsilon": float_attribute(norm, "epsilon", 1e-6),
            "next_epsilon": float_attribute(next_norm, "epsilon", 1e-6),
        }
        for name, product in zip(ops.TAIL_PRODUCTS, self.products, strict=True):
            attributes[f"{name}_format"] = string_attribute(product, "format", "")
            attributes[f"{name}_block_size"] = int_attribute(product, "block_size", 0)
            attributes[f"{name}_symmetric"] = int_attribute(product, "symmetric", 1)
            attributes[f"{name}_layout"] = string_attribute(product, "layout", "")
        inputs = [out.inputs[0], residual, norm.inputs[2], next_norm.inputs[2], *weights, *biases]
        y, total = (ir.Value(type=ir.TensorType(FLOAT)) for _ in range(2))
        return plugin_node(ops.LAYER_TAIL, inputs, attributes, [y, total], out.name)


def fuse_layer_tails(graph: ir.Graph) -> RewriteReport:
    """Rewrites each QuantLinear that begins such a chain, where nothing else reads what is in between."""
    report = RewriteReport("layer_tail")
    for norm in [node for node in graph if node.op_type == ops.ADD_RMS_NORM.name]:
        if norm.graph is None:  # a chain before it took it
            continue
        chain = _chain(norm)
        if chain is None:
            continue
        fused = chain.replacement()
        last, next_norm = chain.nodes[-1], chain.nodes[-2]
        graph.insert_before(last, fused)
        take_over(last.outputs[0], fused.outputs[0])
        take_over(next_norm.outputs[1], fused.outputs[1])
        for node in reversed(chain.nodes):
            graph.remove(node, safe=True)
        report.matched += 1
    return report


def _chain(norm: ir.Node) -> _Chain | None:
    """The chain whose first AddRMSNorm is `norm`."""
    for value in norm.inputs[:2]:
        out = None if value is None else value.producer()
        if out is None or out.op_type != ops.QUANT_LINEAR.name or only_user(out.outputs[0]) is not norm:
            continue
        gate_up = _reader(norm, ops.QUANT_LINEAR)
        gated = _reader(gate_up, ops.GATED_ACTIVATION)
        down = _reader(gated, ops.QUANT_LINEAR)
        next_norm = _reader(down, ops.ADD_RMS_NORM)
        following = _reader(next_norm, ops.QUANT_LINEAR)
        if gate_up is None or gated is None or down is None or next_norm is None or following is None:
            return None
        # The residual of the second norm is the first one's sum and nobody else's.
        if only_user(norm.outputs[1]) is not next_norm or norm.outputs[1] not in next_norm.inputs[:2]:
            return None
        return _Chain((out, norm, gate_up, gated, down, next_norm, following))
    return None


def _reader(node: ir.Node | None, op: ops.Op) -> ir.Node | None:
    """The one node that reads the first output of `node`, as its first two inputs, if it is an `op`."""
    if node is None:
        return None
    reader = only_user(node.outputs[0])
    if reader is None or reader.op_type != op.name or reader.domain != ops.DOMAIN:
        return None
    return reader if node.outputs[0] in reader.inputs[:2] else None
