"""MoE over a checkpoint's experts becomes QuantMoE over packed ones."""

from __future__ import annotations

import math

import onnx_ir as ir

from enginebay.builder.lower.graph import RewriteReport, plugin_node, replace, static_shape, through_cast
from enginebay.builder.packing import WeightPacker
from enginebay.builder.quant.stored import common_format, stored_experts
from enginebay.plugins import ops


def lower_moe(graph: ir.Graph, packer: WeightPacker) -> RewriteReport:
    """Rewrites MoE whose gate_up [E, 2I, H] and down [E, H, I] are initializers, Casts of them,
    or DequantizeLinears of experts that came quantised."""
    report = RewriteReport("moe")
    for node in list(graph):
        if node.domain != ops.DOMAIN or node.op_type != ops.MOE.name:
            continue
        inputs = list(node.inputs)
        places = {name: ops.MOE.input_index(name) for name in ("gate_up", "down")}
        values = {name: value for name, at in places.items() if (value := inputs[at]) is not None}
        stored = {name: stored_experts(value) for name, value in values.items()}
        if all(stored.values()):
            held = {name: matrices for name, matrices in stored.items() if matrices is not None}
            fmt = common_format([matrix for matrices in held.values() for matrix in matrices])
            if fmt is None:
                report.miss(node, "its experts came quantised in formats that differ")
                continue
            packed = {
                name: packer.place_stored_experts(graph, f"{node.name}.{name}", matrices, fmt)
                for name, matrices in held.items()
            }
        else:
            sources = {name: through_cast(value) for name, value in values.items()}
            computed = [name for name, source in sources.items() if not source.is_initializer()]
            if computed or any(len(static_shape(source) or ()) != 3 for source in sources.values()):
                report.miss(
                    node, f"{' and '.join(computed) or 'an expert weight'} is not an initializer [E, N, K]"
                )
                continue
            widths = [(static_shape(source) or (0,))[-1] for source in sources.values()]
            packed = {
                name: packer.place_experts(graph, f"{node.name}.{name}", source, math.gcd(*widths))
                for name, source in sources.items()
            }
        if packed["gate_up"].attributes != packed["down"].attributes:
            report.miss(node, "gate_up and down got different formats; override both alike")
            continue
        for name, at in places.items():
            inputs[at] = packed[name].value
        attributes: dict[str, int | float | str] = {
            name: attribute.value for name, attribute in node.attributes.items()
        }
        y = ir.Value(type=ir.TensorType(ir.DataType.FLOAT))
        lowered = plugin_node(
            ops.QUANT_MOE, inputs, {**attributes, **packed["down"].attributes}, [y], node.name
        )
        replace(graph, node, lowered, [(node.outputs[0], y)])
        report.matched += 1
    return report
