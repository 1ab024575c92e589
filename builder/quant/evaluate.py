"""Perplexity and divergence of a quantised model from the model as it came, in numpy on the canonical graph.

Weights alone are quantised here: what a target does to activations is `enginebay verify`'s to measure.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginebay.builder.quant.experts import experts_of, is_moe, shared_columns
from enginebay.builder.quant.formats import QuantizationError
from enginebay.builder.quant.interpreter import (
    ROWS,
    Batch,
    Caches,
    Interpreter,
    Values,
    linear_weight,
    weight_matrix,
)
from enginebay.builder.quant.plan import LayerPlan, Quantizer
from enginebay.builder.quant.recipes import Recipe
from enginebay.builder.quant.rtn import dequantize_rows
from enginebay.builder.quant.stored import StoredMatrix
from enginebay.builder.weights import WeightMatrix

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class ModelError:
    """Over `tokens` positions: perplexity of the next token, mean KL(reference || quantised) in nats, and
    the share of positions at which both choose the same token."""

    tokens: int
    perplexity: float
    reference_perplexity: float
    mean_kl: float
    greedy_match: float


class WeightsOf(Protocol):
    """Weights [N, K] of a linear layer, or of one expert's `part` of a mixture."""

    def __call__(self, node: ir.Node, part: str = "", expert: int = 0) -> Float32: ...


def exact_weights(node: ir.Node, part: str = "", expert: int = 0) -> Float32:
    """As the checkpoint has them."""
    matrix = _matrix(node, part, expert)
    return matrix.rows(0, matrix.shape[0])


def quantised_weights(quantizer: Quantizer, recipe: Recipe) -> WeightsOf:
    """What an engine of `recipe` multiplies by."""

    def weights(node: ir.Node, part: str = "", expert: int = 0) -> Float32:
        matrix = _matrix(node, part, expert)
        if isinstance(matrix, StoredMatrix):
            return matrix.rows(0, matrix.shape[0])
        layer, columns = node.name or "linear", matrix.shape[1]
        if part:
            layer, columns = f"{layer}.{part}", shared_columns(node)
        plan = LayerPlan(layer, matrix, recipe.format_of(layer, (matrix.shape[0], columns)))
        return np.concatenate([dequantize_rows(chunk.rows) for chunk in quantizer.rows(plan)])

    return weights


def _matrix(node: ir.Node, part: str, expert: int) -> WeightMatrix:
    if part:
        return experts_of(node)[part][expert]
    weight = linear_weight(node)
    assert weight is not None
    return weight_matrix(weight)


class Logits:
    """A model run up to its last rows; logits are made ROWS rows at a time, as they are wide."""

    def __init__(
        self, graph: ir.Graph, batch: Batch, weights: WeightsOf, caches: Caches | None = None
    ) -> None:
        self._graph = graph
        self._run = Interpreter(graph, batch, caches=caches)
        self._weights = weights
        self._values = self._run.start()
        read: dict[ir.Value, int] = {}
        for node in self._run.body:
            self._node(node, self._values, weights(node) if linear_weight(node) is not None else None)
            self._run.release(node, self._values, read)

    @cached_property
    def _heads(self) -> dict[ir.Node, Float32]:
        return {node: self._weights(node) for node in self._run.tail if linear_weight(node) is not None}

    def rows(self, start: int, stop: int) -> Float64:
        """float64 [stop - start, vocab]."""
        values = dict(self._values)
        index = next(value for value in self._graph.inputs if value.name == "logits_index")
        values[index] = np.arange(start, stop, dtype=np.int32)
        for node in self._run.tail:
            self._node(node, values, self._heads.get(node))
        return values[self._graph.outputs[0]].astype(np.float64)

    def _node(self, node: ir.Node, values: Values, weights: Float32 | None) -> None:
        if is_moe(node):
            self._run.experts(node, values, lambda part, expert, _: self._weights(node, part, expert))
        elif weights is None:
            self._run.step(node, values)
        else:
            self._run.linear(node, values, weights)


def compare(reference: Logits, quantised: Logits, batch: Batch) -> ModelError:
    """Both models on the same sequences."""
    following = np.concatenate([np.array([*s[1:], -1]) for s in batch.sequences])
    losses, kls, same = np.zeros(2), 0.0, 0
    for start in range(0, batch.tokens, ROWS):
        stop = min(start + ROWS, batch.tokens)
        exact, ours = log_softmax(reference.rows(start, stop)), log_softmax(quantised.rows(start, stop))
        kls += float((np.exp(exact) * (exact - ours)).sum())
        same += int((exact.argmax(axis=1) == ours.argmax(axis=1)).sum())
        rows = np.flatnonzero(following[start:stop] >= 0)
        tokens = following[start:stop][rows]
        losses -= exact[rows, tokens].sum(), ours[rows, tokens].sum()
    predicted = int((following >= 0).sum())
    if not np.isfinite([*np.exp(losses / predicted), kls]).all():
        raise QuantizationError(
            "the model cannot be evaluated: its logits on the text give a perplexity or KL that is no finite "
            "number; look for weights far too large, or build without --evaluate"
        )
    return ModelError(
        tokens=batch.tokens,
        perplexity=float(np.exp(losses[1] / predicted)),
        reference_perplexity=float(np.exp(losses[0] / predicted)),
        mean_kl=kls / batch.tokens,
        greedy_match=same / batch.tokens,
    )


def log_softmax(logits: Float64) -> Float64:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Float64 = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
