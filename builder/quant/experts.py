"""A mixture of experts in numpy, one expert's weights in memory: for calibration and for measuring.

Routing is plugins/reference.py's, so that calibration sends tokens where the kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginebay.builder.lower.graph import static_shape, through_cast
from enginebay.builder.quant.stored import stored_experts, stored_weights
from enginebay.builder.weights import WeightMatrix, expert_matrices
from enginebay.plugins import ops, reference

Float32 = NDArray[np.float32]
PARTS = ("gate_up", "down")

# (part, expert, the inputs [tokens, K] routed to it) -> weights [N, K]. Called for every expert, reached or
# not.
ExpertWeights = Callable[[str, int, Float32], Float32]


def is_moe(node: ir.Node) -> bool:
    return node.domain == ops.DOMAIN and node.op_type == ops.MOE.name


def experts_of(node: ir.Node) -> dict[str, list[WeightMatrix]]:
    """The matrices of every expert by part, StoredMatrix where they came quantised; nothing is read."""
    result: dict[str, list[WeightMatrix]] = {}
    for part in PARTS:
        value = node.inputs[ops.MOE.input_index(part)]
        assert value is not None
        if (stored := stored_experts(value)) is not None:
            result[part] = [*stored]
            continue
        source = through_cast(value)
        assert source.name is not None
        assert source.const_value is not None, f"{source.name} is not a weight"
        result[part] = expert_matrices(source.name, source.const_value)
    return result


def shared_columns(node: ir.Node) -> int:
    """What a block must divide: the input widths of both parts."""
    widths = []
    for part in PARTS:
        value = node.inputs[ops.MOE.input_index(part)]
        assert value is not None
        stored = stored_weights(value)
        shape = static_shape(through_cast(value)) if stored is None else tuple(stored.values.shape.numpy())
        widths.append(int((shape or (0,))[-1]))
    return math.gcd(*widths)


def run_moe(node: ir.Node, inputs: dict[str, NDArray[Any]], weights: ExpertWeights) -> Float32:
    """The output [T, H] of MoE `node`; `inputs` by the op table's names, without the experts' weights."""
    attributes = {key: attribute.value for key, attribute in node.attributes.items()}
    x, scores = inputs["x"], np.zeros((len(inputs["x"]), attributes["num_experts"]), np.float32)
    for token, logits in enumerate(inputs["router_logits"].astype(np.float64)):
        chosen, worth = reference.route(
            logits,
            inputs.get("correction_bias"),
            scoring=attributes.get("scoring", "softmax"),
            top_k=attributes["top_k"],
            num_groups=attributes.get("num_groups", 0),
            top_groups=attributes.get("top_groups", 0),
        )
        if attributes.get("renormalize", 0):
            worth = worth / worth.sum()
        scores[token, chosen] = worth * attributes.get("routed_scale", 1.0)
    y = np.zeros_like(x)
    for expert in range(attributes["num_experts"]):
        rows = np.flatnonzero(scores[:, expert])
        mine = x[rows]
        both = mine @ weights("gate_up", expert, mine).T + _bias(inputs, "gate_up_bias", expert)
        inner = _activate(both, attributes)
        out = inner @ weights("down", expert, inner).T + _bias(inputs, "down_bias", expert)
        y[rows] += scores[rows, expert, None] * out
    return y


def _activate(both: Float32, attributes: dict[str, Any]) -> Float32:
    clamp = attributes.get("clamp", 0.0)
    if not clamp:
        return reference.gated_activation(both.astype(np.float64), attributes["activation"]).astype(
            np.float32
        )
    gate, up = np.split(both, 2, axis=-1)
    gate, up = np.minimum(gate, clamp), np.clip(up, -clamp, clamp)
    result: Float32 = ((up + 1) * gate / (1 + np.exp(-attributes.get("clamp_alpha", 1.702) * gate))).astype(
        np.float32
    )
    return result


def _bias(inputs: dict[str, NDArray[Any]], name: str, expert: int) -> NDArray[Any] | float:
    return inputs[name][expert] if name in inputs else 0.0
