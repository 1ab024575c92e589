"""Overrides that no layer of the model answers to are mistakes, and said before anything is computed."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

import onnx_ir as ir

from enginebay.builder.quant.experts import PARTS, is_moe
from enginebay.builder.quant.formats import QuantizationError
from enginebay.builder.quant.interpreter import linear_weight
from enginebay.builder.quant.recipes import Override
from enginebay.builder.quant.stored import stored_weights
from enginebay.plugins import ops

_SHOWN = 6  # names of a long list: half of them its first, half its last


def layer_names(graph: ir.Graph) -> list[str]:
    """What patterns may match: linear layers, parts of experts, and an embedding with weights of its own.

    Weights that came quantised stay as they are and so are not among them.
    """
    linears = {node: weight for node in graph if (weight := linear_weight(node)) is not None}
    heads, names = set(linears.values()), []
    for node in graph:
        if node in linears:
            names.append(node.name or "linear")
        elif is_moe(node):
            names += [f"{node.name}.{part}" for part in PARTS if _plain(node, part)]
        elif node.op_type == "Gather" and node.domain == "":
            weight = node.inputs[0]
            if weight is not None and weight.is_initializer() and weight not in heads:
                names.append(node.name or "embed")
    return names


def check_overrides(graph: ir.Graph, overrides: Iterable[Override]) -> None:
    """QuantizationError naming the first pattern that matches no layer of canonical `graph`."""
    names = layer_names(graph)
    for override in overrides:
        if not any(fnmatchcase(name, override.pattern) for name in names):
            half = _SHOWN // 2
            shown = names if len(names) <= _SHOWN else [*names[:half], "...", *names[-half:]]
            raise QuantizationError(
                f"override '{override.pattern}={override.format.key}' matches no layer whose format can be "
                f"chosen; there are {', '.join(shown) or 'none'}"
            )


def _plain(node: ir.Node, part: str) -> bool:
    """Whether experts' weights are the checkpoint's own numbers."""
    value = node.inputs[ops.MOE.input_index(part)]
    return value is not None and stored_weights(value) is None
