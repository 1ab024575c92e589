"""Norms, linear layers, activations and MLPs as ONNX nodes."""

from __future__ import annotations

import onnx_ir as ir

from enginebay.export.emitter import Emitter
from enginebay.export.spec import Activation, Mlp, Norm


def norm(emit: Emitter, name: str, spec: Norm | None, value: ir.Value) -> ir.Value:
    """Normalises the last axis; None is the identity."""
    if spec is None:
        return value
    weight = emit.weight32(f"{name}.weight")
    if spec.kind == "rms":
        return _shaped(
            emit.op(name, "RMSNormalization", [value, weight], axis=-1, epsilon=spec.epsilon), value
        )
    inputs = [value, weight] + ([emit.weight32(f"{name}.bias")] if spec.bias else [])
    return _shaped(emit.op(name, "LayerNormalization", inputs, axis=-1, epsilon=spec.epsilon), value)


def linear(emit: Emitter, name: str, value: ir.Value) -> ir.Value:
    """value · Wᵀ + bias, where the role `name` has a bias. A weight quantised in another order of its inputs
    reads them in that order."""
    if emit.has(f"{name}.weight.order"):
        value = emit.op(f"{name}.ordered", "Gather", [value, emit.weight(f"{name}.weight.order")], axis=1)
    inputs = [value, emit.weight32(f"{name}.weight")]
    if emit.has(f"{name}.bias"):
        inputs.append(emit.weight32(f"{name}.bias"))
    return emit.op(name, "Gemm", inputs, transB=1)


def activate(emit: Emitter, name: str, kind: Activation, value: ir.Value) -> ir.Value:
    if kind == "silu":
        return emit.op(name, "Swish", [value])
    if kind == "gelu":
        return emit.op(name, "Gelu", [value], approximate="none")
    if kind == "gelu_tanh":
        return emit.op(name, "Gelu", [value], approximate="tanh")
    rectified = emit.op(name, "Relu", [value])
    return rectified if kind == "relu" else emit.op(f"{name}.squared", "Mul", [rectified, rectified])


def feed_forward(emit: Emitter, name: str, mlp: Mlp, value: ir.Value) -> ir.Value:
    if mlp.gated:
        gate_up = linear(emit, f"{name}.gate_up", value)
        gate, up = emit.split(f"{name}.split", gate_up, [mlp.intermediate, mlp.intermediate])
        activated = emit.op(
            f"{name}.gated", "Mul", [activate(emit, f"{name}.activation", mlp.activation, gate), up]
        )
    else:
        activated = activate(emit, f"{name}.activation", mlp.activation, linear(emit, f"{name}.up", value))
    return linear(emit, f"{name}.down", activated)


def scaled(emit: Emitter, name: str, value: ir.Value, factor: float) -> ir.Value:
    return value if factor == 1.0 else emit.op(name, "Mul", [value, emit.scalar(factor)])


def _shaped(result: ir.Value, like: ir.Value) -> ir.Value:
    result.shape = like.shape
    return result
