"""Everything after the last attention works on the rows that need logits only.

The canonical graph gathers them before the final norm. What lies between that Gather and the last attention
(output projection, residual, MLP) computes each row from that row alone, so the Gather moves up to where
rows stop being independent: a prefill then spends no time there on rows nobody asked for.
"""

from __future__ import annotations

import onnx_ir as ir

from enginebay.builder.lower.graph import RewriteReport, int_attribute

# Ops whose output row t is a function of their inputs' row t.
ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Swish", "Sigmoid", "Gelu", "Relu", "Tanh", "Cast"})
FIRST_INPUT = frozenset({"Gemm", "RMSNormalization", "LayerNormalization", "Split"})


def select_rows_early(graph: ir.Graph, index_name: str = "logits_index") -> RewriteReport:
    """Moves Gather(hidden, `index_name`), axis 0, above the row-wise nodes that lead to it alone."""
    report = RewriteReport("select_rows")
    for gather in list(graph):
        if gather.op_type != "Gather" or gather.domain != "" or int_attribute(gather, "axis", 0) != 0:
            continue
        hidden, index = gather.inputs
        if hidden is None or index is None or index.name != index_name:
            continue
        region = _region(graph, gather, hidden)
        if not region:
            report.miss(gather, "what precedes it is not row-wise, or is read elsewhere too")
            continue
        _move_up(graph, gather, hidden, index, region)
        report.matched += 1
    return report


def _region(graph: ir.Graph, gather: ir.Node, hidden: ir.Value) -> set[ir.Node]:
    """The row-wise nodes all of whose readers are in the region or the Gather."""
    region: set[ir.Node] = set()
    for node in reversed(graph):
        if node.domain != "" or node.op_type not in ELEMENTWISE | FIRST_INPUT:
            continue
        readers = {user for output in node.outputs for user, _ in output.uses()}
        private = not any(output.is_graph_output() for output in node.outputs)
        if readers and private and readers <= region | {gather} and _row_inputs(node, hidden):
            region.add(node)
    return region


def _row_inputs(node: ir.Node, hidden: ir.Value) -> list[ir.Value]:
    """The inputs of `node` whose first dimension is the tokens of the step."""
    inputs = node.inputs[:1] if node.op_type in FIRST_INPUT else node.inputs
    assert hidden.shape is not None
    tokens = hidden.shape[0]
    return [
        v
        for v in inputs
        if v is not None and v.shape is not None and len(v.shape) == 2 and v.shape[0] == tokens
    ]


def _move_up(
    graph: ir.Graph, gather: ir.Node, hidden: ir.Value, index: ir.Value, region: set[ir.Node]
) -> None:
    rows = gather.outputs[0].shape
    assert rows is not None
    selected: dict[ir.Value, ir.Value] = {}
    for node in [node for node in graph if node in region]:
        for value in dict.fromkeys(_row_inputs(node, hidden)):
            if value.producer() in region:
                continue
            if value not in selected:
                assert value.shape is not None
                out = ir.Value(
                    name=f"{value.name}.rows",
                    type=value.type,
                    shape=ir.Shape([rows[0], *list(value.shape)[1:]]),
                )
                moved = ir.node(
                    "Gather", [value, index], {"axis": 0}, outputs=[out], name=f"{value.name}.rows"
                )
                graph.insert_before(node, moved)
                selected[value] = out
            for position, held in enumerate(node.inputs):
                if held is value:
                    node.replace_input_with(position, selected[value])
    for node in region:
        for output in node.outputs:
            if output.shape is not None:
                output.shape = ir.Shape([rows[0], *list(output.shape)[1:]])
    gather.outputs[0].replace_all_uses_with(hidden, replace_graph_outputs=True)
    graph.remove(gather, safe=True)
