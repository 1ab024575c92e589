"""Where the scale of a layer's input channels can go: into what produces them.

A linear layer computes the same if its column k is multiplied by s[k] and its input channel k divided by
s[k]. The division costs nothing where it folds into the producer: a norm's weight, the `up` rows before a
gated product, or the value rows before attention, of which one key/value head feeds several query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginebay.builder.lower.graph import only_user, static_shape, through_cast
from enginebay.builder.quant.interpreter import linear_weight
from enginebay.plugins import ops


@dataclass(frozen=True)
class Fold:
    """The producer of a layer's input.

    node     the norm, or the linear layer whose rows take the division
    first    its first row that does, for a linear layer
    channel  [K]: which of those rows (or norm channels) input channel k comes from
    """

    node: ir.Node
    first: int
    channel: NDArray[np.intp]

    @property
    def channels(self) -> int:
        return int(self.channel.max()) + 1


def find_fold(node: ir.Node) -> Fold | None:
    """The Fold of linear layer `node`; None where its input is read elsewhere too or comes from something
    else."""
    x = node.inputs[0]
    producer = None if x is None or only_user(x) is not node else x.producer()
    if producer is None or x is None or x.shape is None or not isinstance(x.shape[-1], int):
        return None
    width = x.shape[-1]
    if producer.domain == ops.DOMAIN:
        return _behind_attention(producer, width)
    if producer.op_type in ("RMSNormalization", "LayerNormalization"):
        return Fold(producer, 0, np.arange(width))
    if producer.op_type == "Mul":
        return _behind_product(producer, width)
    return None


def _behind_product(product: ir.Node, width: int) -> Fold | None:
    """act(gate) * up: the factor that is no activation, straight from a Split of a linear layer's output."""
    for factor in product.inputs:
        split = factor.producer() if factor is not None else None
        if factor is None or split is None or split.op_type != "Split" or only_user(factor) is not product:
            continue
        source = split.inputs[0]
        linear = source.producer() if source is not None and only_user(source) is split else None
        if linear is None or linear_weight(linear) is None:
            continue
        place = list(split.outputs).index(factor)
        return Fold(linear, place * width, np.arange(width))
    return None


def _behind_attention(attention: ir.Node, width: int) -> Fold | None:
    qkv = attention.inputs[0]
    linear = qkv.producer() if qkv is not None else None
    if attention.op_type != ops.PAGED_ATTENTION.name or linear is None or linear_weight(linear) is None:
        return None
    if qkv is None or only_user(qkv) is not attention:
        return None
    heads, kv_heads, dim = (
        attention.attributes[key].as_int() for key in ("num_heads", "num_kv_heads", "head_dim")
    )
    if width != heads * dim:
        return None
    head, offset = np.divmod(np.arange(width), dim)
    return Fold(linear, (heads + kv_heads) * dim, head // (heads // kv_heads) * dim + offset)


def scale_vector(graph: ir.Graph, node: ir.Node, position: int, factor: NDArray[np.float32]) -> None:
    """Multiplies input `position` of `node`, an initializer vector or a Cast of one, by `factor`, for this
    node alone."""
    value = node.inputs[position]
    assert value is not None
    source = through_cast(value)
    assert source.const_value is not None
    assert static_shape(source) == factor.shape
    name = f"{node.name}.{position}.scaled"
    tensor = ir.tensor(source.const_value.numpy().astype(np.float32) * factor, name=name)
    scaled = graph.initializers.get(name)
    if scaled is None:
        scaled = ir.Value(
            name=name, shape=ir.Shape(factor.shape), type=ir.TensorType(ir.DataType.FLOAT), const_value=tensor
        )
        graph.register_initializer(scaled)
        node.replace_input_with(position, scaled)
    else:
        scaled.const_value = tensor
