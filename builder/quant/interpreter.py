"""Runs the canonical graph node by node in numpy: one layer's weights in memory, no torch, no runtime.

Calibration needs what a runtime hides: the input of every linear layer, computed with the layers before it
already quantised. All sequences run together as one ragged step, so each weight is read once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginebay.builder.lower.graph import through_cast
from enginebay.builder.quant.experts import PARTS, ExpertWeights, experts_of, is_moe, run_moe
from enginebay.builder.quant.formats import QuantizationError
from enginebay.builder.quant.stored import is_weight, stored_weights
from enginebay.builder.weights import WeightMatrix
from enginebay.plugins import ops
from enginebay.plugins.load import KernelLibrary

Float32 = NDArray[np.float32]
Array = NDArray[Any]
Values = dict[ir.Value, Array]

BLOCK_SIZE = 16
ROWS = 512  # rows of the last product at a time: logits are wide


def linear_weight(node: ir.Node) -> ir.Value | None:
    """The initializer that `node`, a Gemm of the canonical graph, multiplies by; None for any other node."""
    if node.op_type != "Gemm" or node.domain != "" or node.inputs[1] is None:
        return None
    source = through_cast(node.inputs[1])
    return source if source.is_initializer() else None


def weight_matrix(value: ir.Value) -> WeightMatrix:
    assert value.name is not None
    assert value.const_value is not None
    return WeightMatrix(value.name, value.const_value)


@dataclass(frozen=True)
class Batch:
    """Token sequences as the arrays of one ragged step, blocks of the cache given out in order."""

    sequences: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sequences))

    def arrays(self, block_size: int = BLOCK_SIZE) -> dict[str, NDArray[np.int32]]:
        """The graph's inputs by name, for a cache of blocks of `block_size`; logits_index takes every row."""
        lengths = [len(sequence) for sequence in self.sequences]
        blocks = [-(-length // block_size) for length in lengths]
        first = np.cumsum([0, *blocks[:-1]])
        table = np.zeros((len(lengths), max(blocks)), np.int32)
        for row, (start, count) in enumerate(zip(first, blocks, strict=True)):
            table[row, :count] = np.arange(start, start + count)
        positions = np.concatenate([np.arange(length) for length in lengths])
        slots = np.concatenate(
            [start * block_size + np.arange(length) for start, length in zip(first, lengths, strict=True)]
        )
        return {
            "input_ids": np.concatenate([np.asarray(s, np.int32) for s in self.sequences]),
            "position_ids": positions.astype(np.int32),
            "query_start": np.cumsum([0, *lengths]).astype(np.int32),
            "kv_len": np.asarray(lengths, np.int32),
            "block_table.0": table,
            "slot_mapping.0": slots.astype(np.int32),
            "logits_index": np.arange(len(positions), dtype=np.int32),
        }

    @property
    def first_blocks(self) -> NDArray[np.intp]:
        """Where each sequence begins in the pool."""
        return np.cumsum([0, *(-(-len(sequence) // BLOCK_SIZE) for sequence in self.sequences[:-1])])

    @property
    def blocks(self) -> int:
        return sum(-(-len(sequence) // BLOCK_SIZE) for sequence in self.sequences)


class Caches(Protocol):
    """Gives attention the pool that it writes and reads within the step, and sees it afterwards."""

    def pool(self, name: str, shape: tuple[int, ...]) -> tuple[Array, dict[str, Float32]]:
        """An empty pool for `shape` [blocks, 2, block_size, Hkv, D] of values, and its constants by input."""
        ...

    def written(self, name: str, pool: Array) -> None:
        """`name` (cache.L) holds the step's keys and values, norms and RoPE applied."""
        ...


class FloatCaches:
    """What the canonical graph says: float32."""

    def pool(self, _name: str, shape: tuple[int, ...]) -> tuple[Array, dict[str, Float32]]:
        return np.zeros(shape, np.float32), {}

    def written(self, name: str, pool: Array) -> None:
        pass


class Interpreter:
    """Evaluates nodes of a canonical graph over one Batch."""

    def __init__(self, graph: ir.Graph, batch: Batch, threads: int = 1, caches: Caches | None = None) -> None:
        self._graph = graph
        self._batch = batch
        self._caches = caches or FloatCaches()
        self._kernels = KernelLibrary(threads=threads)
        self._readers = {
            value: len(value.uses())
            for node in graph
            for value in (*node.inputs, *node.outputs)
            if value is not None
        }
        nodes = list(graph)
        place = next((i for i, node in enumerate(nodes) if _selects_rows(node)), len(nodes))
        self.body: Sequence[ir.Node] = nodes[:place]
        self.tail: Sequence[ir.Node] = nodes[place:]

    def start(self) -> Values:
        """A fresh environment: the graph's inputs."""
        arrays: dict[str, Array] = dict(self._batch.arrays())
        return {value: arrays[value.name] for value in self._graph.inputs if value.name in arrays}

    def step(self, node: ir.Node, values: Values) -> None:
        """Computes the outputs of `node` into `values`. Linear layers are the caller's: see `linear`."""
        if all(is_weight(v) for v in node.inputs):
            return  # weights on their way from how they are stored, read where they are needed
        if node.domain == ops.DOMAIN and node.op_type == ops.PAGED_ATTENTION.name:
            values[node.outputs[0]] = self._attention(node, values)
            return
        if is_moe(node):
            matrices = experts_of(node)
            self.experts(
                node, values, lambda part, e, _: matrices[part][e].rows(0, matrices[part][e].shape[0])
            )
            return
        compute = _OPS.get(node.op_type) if node.domain == "" else None
        if compute is None:
            raise QuantizationError(
                f"calibration cannot run {node.name} ({node.domain or 'onnx'}::{node.op_type}); "
                "choose a recipe and a cache that need none, such as int4-rtn and fp16"
            )
        results = compute(node, [self.read(value, values) for value in node.inputs])
        values.update(zip(node.outputs, results, strict=True))

    def linear(self, node: ir.Node, values: Values, weight: Float32) -> None:
        """Computes the linear layer `node` with `weight` [N, K] in the place of its own."""
        x, bias = node.inputs[0], node.inputs[2] if len(node.inputs) > 2 else None
        y = self.read(x, values) @ weight.T
        values[node.outputs[0]] = y if bias is None else y + self.read(bias, values)

    def experts(self, node: ir.Node, values: Values, weights: ExpertWeights) -> None:
        """Computes the mixture of experts `node` with `weights` in the place of its own."""
        inputs = {
            param.name: self.read(value, values)
            for param, value in zip(ops.MOE.inputs, node.inputs, strict=False)
            if value is not None and param.name not in PARTS
        }
        values[node.outputs[0]] = run_moe(node, inputs, weights)

    def read(self, value: ir.Value | None, values: Values) -> Array:
        """A computed value, or an initializer as the graph's float32."""
        assert value is not None
        if value in values:
            return values[value]
        stored = stored_weights(value)
        if stored is not None:
            return stored.dequantized()
        source = through_cast(value)
        assert source.const_value is not None, f"{value.name} is neither computed nor a weight"
        array = source.const_value.numpy()
        return array.astype(np.float32) if value.dtype == ir.DataType.FLOAT else array

    def release(self, node: ir.Node, values: Values, done: dict[ir.Value, int]) -> None:
        """Forgets inputs of `node` that no later node reads; `done` counts the readers so far."""
        for value in node.inputs:
            if value in values and value is not None:
                done[value] = done.get(value, 0) + 1
                if done[value] == self._readers[value] and not value.is_graph_output():
                    del values[value]

    def _attention(self, node: ir.Node, values: Values) -> Array:
        """A pool of this layer alone: the kernel writes it and reads it within the step."""
        names = [param.name for param in ops.PAGED_ATTENTION.inputs]
        cache = node.inputs[ops.PAGED_ATTENTION.input_index("cache")]
        attributes: dict[str, Any] = {key: attribute.value for key, attribute in node.attributes.items()}
        assert cache is not None
        assert cache.name is not None
        width = (attributes["num_kv_heads"], attributes["head_dim"])
        pool, constants = self._caches.pool(cache.name, (self._batch.blocks, 2, BLOCK_SIZE, *width))
        inputs: dict[str, Any] = {
            name: self.read(value, values)
            for name, value in zip(names, node.inputs, strict=False)
            if value is not None and value is not cache
        } | constants
        attended = self._kernels.run_attention(cache=pool, **inputs, **attributes)
        self._caches.written(cache.name, pool)
        return attended


def _selects_rows(node: ir.Node) -> bool:
    index = node.inputs[1] if node.op_type == "Gather" and node.domain == "" else None
    return index is not None and index.name == "logits_index"


def _rms_norm(node: ir.Node, inputs: list[Array]) -> list[Array]:
    x, weight = inputs
    epsilon = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-5
    scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32) + np.float32(epsilon))
    return [x * scale * weight]


def _layer_norm(node: ir.Node, inputs: list[Array]) -> list[Array]:
    x = inputs[0] - inputs[0].mean(axis=-1, keepdims=True)
    epsilon = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-5
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(epsilon)) * inputs[1]
    return [y + inputs[2] if len(inputs) > 2 else y]


def _split(node: ir.Node, inputs: list[Array]) -> list[Array]:
    if len(inputs) > 1:
        return list(np.split(inputs[0], np.cumsum(inputs[1])[:-1], axis=-1))
    return list(np.split(inputs[0], len(node.outputs), axis=-1))


def _sigmoid(x: Array) -> Array:
    result: Array = 1 / (1 + np.exp(-np.maximum(x, np.float32(-80))))
    return result


def _gelu(node: ir.Node, inputs: list[Array]) -> list[Array]:
    (x,) = inputs
    approximate = node.attributes.get("approximate")
    if approximate is not None and approximate.as_string() == "tanh":
        inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
        return [np.float32(0.5) * x * (1 + np.tanh(inner))]
    return [np.float32(0.5) * x * (1 + _erf(x * np.float32(math.sqrt(0.5))))]


def _erf(x: Array) -> Array:
    """Abramowitz and Stegun 7.1.26, error below 1.5e-7."""
    t = 1 / (1 + np.float32(0.3275911) * np.abs(x))
    powers = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
    total = np.zeros_like(x)
    for coefficient in reversed(powers):
        total = (total + np.float32(coefficient)) * t
    return np.copysign(1 - total * np.exp(-x * x), x)


def _swish(node: ir.Node, inputs: list[Array]) -> list[Array]:
    alpha = node.attributes["alpha"].as_float() if "alpha" in node.attributes else 1.0
    return [inputs[0] * _sigmoid(np.float32(alpha) * inputs[0])]


def _gather(node: ir.Node, inputs: list[Array]) -> list[Array]:
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    return [np.take(inputs[0], inputs[1], axis=axis)]


def _gemm(_node: ir.Node, inputs: list[Array]) -> list[Array]:
    """Of weights that came quantised; layers to quantise are the caller's."""
    y = inputs[0] @ inputs[1].T
    return [y + inputs[2] if len(inputs) > 2 else y]


_OPS: dict[str, Callable[[ir.Node, list[Array]], list[Array]]] = {
    "Gather": _gather,
    "Gemm": _gemm,
    "Cast": lambda _, inputs: [inputs[0].astype(np.float32)],
    "Add": lambda _, inputs: [inputs[0] + inputs[1]],
    "Sub": lambda _, inputs: [inputs[0] - inputs[1]],
    "Mul": lambda _, inputs: [inputs[0] * inputs[1]],
    "Div": lambda _, inputs: [inputs[0] / inputs[1]],
    "Tanh": lambda _, inputs: [np.tanh(inputs[0])],
    "Sigmoid": lambda _, inputs: [_sigmoid(inputs[0])],
    "Relu": lambda _, inputs: [np.maximum(inputs[0], 0)],
    "Concat": lambda _, inputs: [np.concatenate(inputs, axis=-1)],
    "Swish": _swish,
    "Gelu": _gelu,
    "Split": _split,
    "RMSNormalization": _rms_norm,
    "LayerNormalization": _layer_norm,
}
