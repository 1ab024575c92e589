"""What every rewrite needs: its report, and a few questions about onnx-ir values and nodes."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from enginebay.plugins import ops

FLOAT = ir.DataType.FLOAT


@dataclass(frozen=True)
class Miss:
    """A node that a rewrite looked at and left, and why."""

    node: str
    reason: str


@dataclass
class RewriteReport:
    """What one rewrite did to a graph."""

    rewrite: str
    matched: int = 0
    misses: list[Miss] = field(default_factory=list)

    def miss(self, node: ir.Node, reason: str) -> None:
        self.misses.append(Miss(node.name or node.op_type, reason))


def opset(graph: ir.Graph) -> int:
    """The graph's version of the standard ONNX operators."""
    return graph.opset_imports[""]


def through_cast(value: ir.Value) -> ir.Value:
    """The initializer behind a Cast to float32, or the value itself."""
    node = value.producer()
    if node is not None and node.op_type == "Cast" and node.domain == "":
        source = node.inputs[0]
        if source is not None and source.is_initializer() and value.dtype == FLOAT:
            return source
    return value


def static_shape(value: ir.Value) -> tuple[int, ...] | None:
    """The value's shape where every dimension is a number."""
    if value.shape is None or not value.shape.is_static():
        return None
    return tuple(int(dim) for dim in value.shape.numpy())


def int_attribute(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def float_attribute(node: ir.Node, name: str, default: float) -> float:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_float()


def string_attribute(node: ir.Node, name: str, default: str) -> str:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_string()


def only_user(value: ir.Value) -> ir.Node | None:
    """The single node that reads `value`, once, where nothing else does and it is no graph output."""
    readers = [node for node, _ in value.uses()]
    return readers[0] if len(readers) == 1 and not value.is_graph_output() else None


def plugin_node(
    op: ops.Op,
    inputs: list[ir.Value | None],
    attributes: dict[str, int | float | str],
    outputs: list[ir.Value],
    name: str | None,
) -> ir.Node:
    """A node of the enginebay domain; its attributes are checked against the op table."""
    known = {attribute.name for attribute in op.attributes}
    assert set(attributes) <= known, f"{op.name} has attributes {known}, not {set(attributes) - known}"
    return ir.node(op.name, inputs, attributes, domain=ops.DOMAIN, outputs=outputs, name=name)


def replace(graph: ir.Graph, old: ir.Node, new: ir.Node, pairs: list[tuple[ir.Value, ir.Value]]) -> None:
    """Put `new` where `old` stands; each (old value, new value) of `pairs` moves its readers and its name."""
    graph.insert_before(old, new)
    for before, after in pairs:
        take_over(before, after)
    graph.remove(old, safe=True)


def take_over(before: ir.Value, after: ir.Value) -> None:
    """`after` gets the name, type, shape and readers of `before`."""
    after.name, after.shape = before.name, before.shape
    if after.type is None:
        after.type = before.type
    before.replace_all_uses_with(after, replace_graph_outputs=True)


def remove_dead(graph: ir.Graph) -> int:
    """Remove nodes whose outputs nobody reads and initializers without readers; the count of both."""
    removed = 0
    for node in reversed(graph):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)
            removed += 1
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
            removed += 1
    return removed
