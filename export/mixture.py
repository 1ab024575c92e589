"""Mixture of experts as ONNX nodes: router, routed experts in one op, shared experts."""

from __future__ import annotations

import onnx_ir as ir

from enginebay.export.emitter import Emitter
from enginebay.export.nodes import feed_forward, linear
from enginebay.export.spec import Moe


def mixture(emit: Emitter, at: str, moe: Moe, value: ir.Value, hidden: int) -> ir.Value:
    """float32 [T, hidden] in and out; `at` is the layer's name."""
    name = f"{at}.moe"
    inputs: dict[str, ir.Value | None] = {
        "x": value,
        "router_logits": linear(emit, f"{name}.router", value),
        "gate_up": emit.weight32(f"{name}.gate_up.weight"),
        "down": emit.weight32(f"{name}.down.weight"),
    }
    if moe.correction_bias:
        inputs["correction_bias"] = emit.weight32(f"{name}.correction_bias")
    if moe.expert_bias:
        inputs["gate_up_bias"] = emit.weight32(f"{name}.gate_up.bias")
        inputs["down_bias"] = emit.weight32(f"{name}.down.bias")
    routed = ir.Value(
        name=f"{name}.routed", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["T", hidden])
    )
    grouped = moe.groups > 1
    emit.custom(
        name,
        "MoE",
        inputs,
        {
            "num_experts": moe.num_experts,
            "top_k": moe.top_k,
            "hidden": hidden,
            "intermediate": moe.intermediate,
            "scoring": moe.routing,
            "renormalize": int(moe.normalise),
            "num_groups": moe.groups if grouped else 0,
            "top_groups": moe.top_groups if grouped else 0,
            "routed_scale": moe.scale,
            "activation": moe.activation,
            "clamp": moe.clamp,
            "clamp_alpha": moe.clamp_alpha,
        },
        [routed],
    )
    if moe.shared is None:
        return routed
    shared = feed_forward(emit, f"{name}.shared", moe.shared, value)
    if moe.shared_gate:
        gate = emit.op(f"{name}.shared_gate.sigmoid", "Sigmoid", [linear(emit, f"{name}.shared_gate", value)])
        shared = emit.op(f"{name}.shared_scaled", "Mul", [shared, gate])
    return emit.op(f"{name}.sum", "Add", [routed, shared])
