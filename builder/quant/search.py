"""Which layers get more bits: a mix of formats under a budget, by what each layer's rounding does to the
output.

For every linear layer, its weights alone are rounded in the cheapest format and the rest of the model runs
exactly: the KL divergence of the next-token distributions is the layer's sensitivity. Other formats' are
scaled by what they lose in the layer's own output. Layers are then upgraded in the order of divergence
saved per bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginebay.builder.quant.evaluate import exact_weights, log_softmax
from enginebay.builder.quant.formats import QuantizationError, WeightFormat
from enginebay.builder.quant.gptq import loss
from enginebay.builder.quant.interpreter import Batch, Interpreter, Values, linear_weight
from enginebay.builder.quant.plan import StageProgress
from enginebay.builder.quant.recipes import HEAD, Override, Recipe
from enginebay.builder.quant.rtn import dequantize_rows, quantize_rows

Float32 = NDArray[np.float32]

LOGITS_STRIDE = 4
CANDIDATES = (
    WeightFormat("i4", 128),
    WeightFormat("i4", 64),
    WeightFormat("i4", 32, symmetric=False),
    WeightFormat("i8", 128),
    WeightFormat("i8", 64),
)


@dataclass(frozen=True)
class Sensitivity:
    """Of one layer: `weights` of them, and for each format that fits its bits a weight and the KL
    divergence (nats) that rounding to it alone causes, cheapest format first."""

    layer: str
    weights: int
    options: tuple[tuple[WeightFormat, float, float], ...]


@dataclass(frozen=True)
class Mix:
    """Formats by layer, their average bits a weight, and the divergence expected if the layers' add up."""

    overrides: tuple[Override, ...]
    bits: float
    expected_kl: float
    sensitivities: tuple[Sensitivity, ...]


def measure(
    graph: ir.Graph,
    batch: Batch,
    formats: Sequence[WeightFormat] = CANDIDATES,
    progress: StageProgress | None = None,
) -> tuple[Sensitivity, ...]:
    """The sensitivity of every linear layer but the head, over every LOGITS_STRIDEth token, of a canonical
    graph with shapes inferred."""
    run = Interpreter(graph, batch)
    nodes = [*run.body, *run.tail]
    expected = log_softmax(_finish(run, nodes, _start(run, batch), graph).astype(np.float64))
    layers = [node for node in nodes if linear_weight(node) is not None and node.name != HEAD]
    results: list[Sensitivity] = []
    values = _start(run, batch)
    read: dict[ir.Value, int] = {}
    for place, node in enumerate(nodes):
        if node in layers:
            weights = exact_weights(node)
            probe = dict(values)
            options = _local_losses(run, node, weights, values, formats)
            cheapest, _, base = options[0]
            run.linear(node, probe, dequantize_rows(quantize_rows(weights, cheapest, node.name or "")))
            logits = log_softmax(_finish(run, nodes[place + 1 :], probe, graph).astype(np.float64))
            divergence = float((np.exp(expected) * (expected - logits)).sum(axis=1).mean())
            if not np.isfinite([divergence, *(lost for _, _, lost in options)]).all():
                raise QuantizationError(
                    f"layer {node.name}: quantised to {cheapest.key}, its KL on the text is {divergence:g}; "
                    "look for weights far too large, or build without --bits"
                )
            divergence = max(0.0, divergence)  # rounding may leave it a little below
            scaled = tuple(
                (fmt, bits, divergence * lost / base if base else 0.0) for fmt, bits, lost in options
            )
            results.append(Sensitivity(node.name or "", weights.size, scaled))
            run.linear(node, values, weights)
            if progress is not None:
                progress(len(results), len(layers), f"sensitivity of {node.name}")
            if node is layers[-1]:
                break
        else:
            run.step(node, values)
        run.release(node, values, read)
    return tuple(results)


def choose(sensitivities: Sequence[Sensitivity], bits: float) -> Mix:
    """The mix of least expected divergence whose weights average at most `bits`; QuantizationError if none
    can."""
    total = sum(s.weights for s in sensitivities)
    chosen = [0] * len(sensitivities)
    spent = sum(s.weights * s.options[0][1] for s in sensitivities)
    if spent > bits * total:
        raise QuantizationError(
            f"{bits:g} bits a weight cannot be reached: the cheapest formats take {spent / total:.3f}"
        )
    while True:
        steps = [
            (saved / cost, index, option)
            for index, s in enumerate(sensitivities)
            for option, (cost, saved) in enumerate(_upgrades(s, chosen[index]), start=chosen[index] + 1)
            if saved > 0 and spent + cost <= bits * total
        ]
        if not steps:
            break
        _, index, option = max(steps)
        s = sensitivities[index]
        spent += s.weights * (s.options[option][1] - s.options[chosen[index]][1])
        chosen[index] = option
    picked = [(s, s.options[option]) for s, option in zip(sensitivities, chosen, strict=True)]
    return Mix(
        overrides=tuple(Override(s.layer, fmt) for s, (fmt, _, _) in picked),
        bits=spent / total,
        expected_kl=sum(kl for _, (_, _, kl) in picked),
        sensitivities=tuple(sensitivities),
    )


def search(
    graph: ir.Graph, recipe: Recipe, batch: Batch, bits: float, progress: StageProgress | None = None
) -> tuple[Recipe, Mix]:
    """`recipe` with a format for each linear layer, `bits` a weight on average, scales counted, head and
    embedding not."""
    mix = choose(measure(graph, batch, progress=progress), bits)
    return recipe.with_overrides(mix.overrides), mix


def _start(run: Interpreter, batch: Batch) -> Values:
    """The inputs, with logits of every LOGITS_STRIDEth token: neighbours tell much the same, and logits are
    wide."""
    values = run.start()
    index = next(value for value in values if value.name == "logits_index")
    values[index] = np.arange(0, batch.tokens, LOGITS_STRIDE, dtype=np.int32)
    return values


def _upgrades(s: Sensitivity, current: int) -> list[tuple[float, float]]:
    """(bits more, divergence less) of each dearer option."""
    _, bits, kl = s.options[current]
    return [(s.weights * (more - bits), kl - less) for _, more, less in s.options[current + 1 :]]


def _local_losses(
    run: Interpreter, node: ir.Node, weights: Float32, values: Values, formats: Sequence[WeightFormat]
) -> list[tuple[WeightFormat, float, float]]:
    """(format, bits, loss in the layer's output) of the formats that fit, by bits, none worse than a
    cheaper one."""
    inputs = run.read(node.inputs[0], values)
    hessian = (inputs.T @ inputs).astype(np.float64)
    columns = weights.shape[1]
    fitting = [fmt for fmt in formats if columns % (fmt.block or columns) == 0]
    options: list[tuple[WeightFormat, float, float]] = []
    for fmt in sorted(fitting, key=lambda fmt: fmt.bits_per_weight(columns)):
        lost = loss(dequantize_rows(quantize_rows(weights, fmt, node.name or "")) - weights, hessian)
        if not options or lost < options[-1][2]:
            options.append((fmt, fmt.bits_per_weight(columns), lost))
    if not options:
        raise QuantizationError(
            f"layer {node.name}: no block size of the search divides its {columns} inputs"
        )
    return options


def _finish(run: Interpreter, nodes: Sequence[ir.Node], values: Values, graph: ir.Graph) -> Float32:
    """Runs `nodes` with the checkpoint's weights; the logits."""
    read: dict[ir.Value, int] = {}
    for node in nodes:
        if linear_weight(node) is None:
            run.step(node, values)
        else:
            run.linear(node, values, exact_weights(node))
        run.release(node, values, read)
    return values[graph.outputs[0]]
