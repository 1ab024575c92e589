"""Quantises a model layer by layer, each layer on the inputs that the quantised layers before it give.

One pass over the canonical graph: every linear layer is met with its inputs in hand, quantised, written to
a scratch folder and applied, so that the next layer sees its errors. In memory: one layer's weights and the
live activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from ml_dtypes import float8_e4m3fn
from numpy.typing import NDArray

from enginebay.builder.quant.experts import experts_of, is_moe, shared_columns
from enginebay.builder.quant.fold import Fold, find_fold, scale_vector
from enginebay.builder.quant.formats import QuantizationError, WeightFormat
from enginebay.builder.quant.gptq import GptqConfig, gptq_rows, rounded_rows
from enginebay.builder.quant.input_rounding import InputRounding
from enginebay.builder.quant.interpreter import Batch, Interpreter, Values, linear_weight, weight_matrix
from enginebay.builder.quant.plan import LayerPlan, QuantizedChunk, RoundToNearest, StageProgress
from enginebay.builder.quant.recipes import Recipe
from enginebay.builder.quant.rtn import (
    QuantizedRows,
    dequantize_rows,
    eleven_bits,
    quantize_rows,
)
from enginebay.builder.quant.scaling import Site, channel_scale
from enginebay.builder.quant.stored import StoredMatrix, stored_weights

Float32 = NDArray[np.float32]


@dataclass
class _Stored:
    """A quantised layer in the scratch folder, and what its rows and columns were multiplied by."""

    folder: Path
    format: WeightFormat
    method: str
    row_scale: Float32  # [N]
    column_scale: Float32  # [K]

    def save(self, rows: QuantizedRows) -> None:
        self.folder.mkdir()
        for name in ("values", "scales", "minimums"):
            array = getattr(rows, name)
            if array is not None:
                np.save(self.folder / f"{name}.npy", array)

    def load(self, name: str) -> NDArray[np.generic] | None:
        path = self.folder / f"{name}.npy"
        array: NDArray[np.generic] | None = np.load(path, mmap_mode="r+") if path.exists() else None
        if array is not None and array.dtype.kind == "V":  # numpy's files do not know E4M3
            array = array.view(float8_e4m3fn)
        return array

    def scale_rows(self, first: int, factor: Float32) -> None:
        """Multiplies rows from `first` on by `factor`: exactly in the grid, up to the 11 bits of a scale."""
        stop = first + len(factor)
        self.row_scale[first:stop] *= factor
        for name in ("scales", "minimums"):
            array = self.load(name)
            if array is not None:
                array[first:stop] = eleven_bits(array[first:stop].astype(np.float32) * factor[:, None])


class Calibrated:
    """A Quantizer with the results of a calibration; layers it did not see are rounded to nearest.

    `inputs`: of linear layers whose inputs become E4M3.
    """

    def __init__(self) -> None:
        self.inputs = InputRounding()
        self._stored: dict[str, _Stored] = {}
        self._rounding = RoundToNearest()

    def add(self, tensor: str, stored: _Stored) -> None:
        self._stored[tensor] = stored

    def stored(self, tensor: str) -> _Stored | None:
        return self._stored.get(tensor)

    def method(self, plan: LayerPlan) -> str:
        stored = self._stored.get(plan.matrix.name)
        return self._rounding.method(plan) if stored is None else stored.method

    def rows(self, plan: LayerPlan) -> Iterator[QuantizedChunk]:
        stored = self._stored.get(plan.matrix.name)
        if stored is None:
            yield from self._rounding.rows(plan)
            return
        assert stored.format == plan.format, (
            f"{plan.layer}: calibrated as {stored.format}, wanted {plan.format}"
        )
        values, scales, minimums = (stored.load(name) for name in ("values", "scales", "minimums"))
        assert values is not None
        assert scales is not None
        for start, chunk in plan.matrix.chunks():
            part = slice(start, start + len(chunk))
            rows = QuantizedRows(
                plan.format,
                np.array(values[part]),
                np.array(scales[part], np.float32),
                None if minimums is None else np.array(minimums[part], np.float32),
            )
            yield QuantizedChunk(rows, chunk * stored.row_scale[part, None] * stored.column_scale)


def calibrate(
    model: ir.Model,
    recipe: Recipe,
    batch: Batch,
    scratch: Path,
    progress: StageProgress | None = None,
) -> Calibrated:
    """Quantises the linear layers of canonical `model`, shapes inferred, as `recipe` says, on `batch`.

    Edits the graph where channel scales fold into norms and biases. Raises QuantizationError for a graph
    that the interpreter cannot run, and for weights or activations that are not finite.
    """
    run = Interpreter(model.graph, batch)
    session = _Session(model.graph, recipe, run, scratch)
    nodes = [*run.body, *run.tail]
    layers = [node for node in nodes if linear_weight(node) is not None or _is_stored(node)]
    values = run.start()
    read: dict[ir.Value, int] = {}
    for node in nodes:
        if is_moe(node):
            session.experts(node, values)
        elif node not in layers:
            run.step(node, values)
        else:
            weights = session.layer(node, values)
            if progress is not None:
                progress(layers.index(node) + 1, len(layers), node.name or "linear")
            if node is layers[-1]:
                break  # nobody reads the logits
            run.linear(node, values, weights)
        run.release(node, values, read)
    return session.result


class _Session:
    def __init__(self, graph: ir.Graph, recipe: Recipe, run: Interpreter, scratch: Path) -> None:
        self._graph = graph
        self._recipe = recipe
        self._run = run
        self._scratch = scratch
        self.result = Calibrated()

    def layer(self, node: ir.Node, values: Values) -> Float32:
        """Quantises the linear layer `node` on the inputs in `values`; the weights [N, K] it has then. Those
        that came quantised stay as they are."""
        weight, x, name = linear_weight(node), node.inputs[0], node.name
        assert x is not None
        assert name is not None
        inputs = self._run.read(x, values)
        if weight is None:
            stored = stored_weights(node.inputs[1]) if node.inputs[1] is not None else None
            assert stored is not None
            weights = stored.dequantized()
            self._round_inputs(name, stored.format, inputs, weights)
            return weights
        matrix = weight_matrix(weight)
        plan = LayerPlan(name, matrix, self._recipe.format_of(name, matrix.shape))
        weights = matrix.rows(0, matrix.shape[0])
        # An embedding tied to the layer reads the same columns, once.
        self._round_inputs(name, plan.format, inputs, weights if len(weight.uses()) == 1 else None)
        if not self._calibrates(plan):
            return dequantize_rows(quantize_rows(weights, plan.format, matrix.name))
        hessian = _hessian(inputs, name)
        columns, method = np.ones(matrix.shape[1], np.float32), self._recipe.method
        if self._recipe.scaling is not None:
            fold = find_fold(node) if len(weight.uses()) == 1 else None
            if fold is not None and self._can_fold(fold):
                columns = self._scale(fold, Site(plan, weights, inputs, hessian))
                weights = weights * columns
                hessian /= np.outer(columns, columns)
                values[x] = inputs / columns
            else:
                method = f"{method} without scaling"
        rows = self._round(weights, hessian, plan)
        self._store(plan, rows, method, columns)
        return dequantize_rows(rows)

    def experts(self, node: ir.Node, values: Values) -> None:
        """Quantises every expert of a mixture on the tokens routed to it, and computes the mixture's output.

        An expert that no token reached is rounded to nearest, and its method says so. Channels are not
        scaled: the router and other experts read the same inputs.
        """
        matrices, columns = experts_of(node), shared_columns(node)

        def weights_of(part: str, expert: int, inputs: Float32) -> Float32:
            matrix, layer = matrices[part][expert], f"{node.name}.{part}"
            if isinstance(matrix, StoredMatrix):
                return matrix.rows(0, matrix.shape[0])
            fmt = self._recipe.format_of(layer, (matrix.shape[0], columns))
            plan = LayerPlan(layer, matrix, fmt)
            weights = matrix.rows(0, matrix.shape[0])
            if not self._calibrates(plan):
                return dequantize_rows(quantize_rows(weights, fmt, matrix.name))
            scaled = "" if self._recipe.scaling is None else " without scaling"
            if len(inputs):
                rows, method = (
                    self._round(weights, _hessian(inputs, matrix.name), plan),
                    self._recipe.method + scaled,
                )
            else:
                rows, method = quantize_rows(weights, fmt, matrix.name), "rtn where no token came"
            self._store(plan, rows, method, np.ones(matrix.shape[1], np.float32))
            return dequantize_rows(rows)

        self._run.experts(node, values, weights_of)

    def _calibrates(self, plan: LayerPlan) -> bool:
        """Floats are rounded to nearest, and so are E4M3 but by GPTQ, and a head of 8 bits."""
        kinds = ("i4", "i8", "f8") if isinstance(self._recipe.rounding, GptqConfig) else ("i4", "i8")
        fitted = plan.format.kind in kinds and not self._recipe.head_is_rounded(plan.layer)
        return fitted and self._recipe.fits_weights

    def _round_inputs(self, name: str, fmt: WeightFormat, inputs: Float32, weights: Float32 | None) -> None:
        """What E4M3 inputs of the layer need, where the recipe rounds them."""
        rounded = self._recipe.inputs_of(fmt.kind)
        if rounded is not None:
            self.result.inputs.calibrate(name, fmt, rounded, inputs, weights)

    def _store(self, plan: LayerPlan, rows: QuantizedRows, method: str, columns: Float32) -> None:
        folder = self._scratch / str(len(list(self._scratch.iterdir())))
        stored = _Stored(folder, plan.format, method, np.ones(plan.matrix.shape[0], np.float32), columns)
        stored.save(rows)
        self.result.add(plan.matrix.name, stored)

    def _round(self, weights: Float32, hessian: NDArray[np.float64], plan: LayerPlan) -> QuantizedRows:
        rounding, fmt = self._recipe.rounding, plan.format
        if isinstance(rounding, GptqConfig):
            return gptq_rows(weights, hessian, fmt, plan.matrix.name, rounding)
        return rounded_rows(weights, hessian, fmt, rounding.shrinks)

    def _can_fold(self, fold: Fold) -> bool:
        """A norm always can; a linear layer if its own weights are quantised and in the scratch folder."""
        if linear_weight(fold.node) is None:
            return True
        return self._producer(fold) is not None

    def _producer(self, fold: Fold) -> _Stored | None:
        weight = linear_weight(fold.node)
        return None if weight is None or weight.name is None else self.result.stored(weight.name)

    def _scale(self, fold: Fold, site: Site) -> Float32:
        """Chooses the scale of the layer's columns [K] and folds its inverse into the producer."""
        assert self._recipe.scaling is not None
        scale = channel_scale(self._recipe.scaling, site, fold.channel)
        inverse = 1 / scale
        if linear_weight(fold.node) is None:
            for position in range(1, len(fold.node.inputs)):
                scale_vector(self._graph, fold.node, position, inverse)
        else:
            stored = self._producer(fold)
            assert stored is not None
            stored.scale_rows(fold.first, inverse)
            if len(fold.node.inputs) > 2 and fold.node.inputs[2] is not None:
                factor = np.ones(len(stored.row_scale), np.float32)
                factor[fold.first : fold.first + len(inverse)] = inverse
                scale_vector(self._graph, fold.node, 2, factor)
        return scale[fold.channel]


def _hessian(inputs: Float32, name: str) -> NDArray[np.float64]:
    """inputs^T inputs [K, K]; QuantizationError naming the layer where it is not finite."""
    hessian = (inputs.T @ inputs).astype(np.float64)
    if not np.isfinite(hessian).all():
        raise QuantizationError(f"layer {name}: its inputs in calibration are not finite, or their squares")
    return hessian


def _is_stored(node: ir.Node) -> bool:
    """Whether `node` multiplies by weights that came quantised."""
    weight = node.inputs[1] if node.op_type == "Gemm" and node.domain == "" else None
    return weight is not None and stored_weights(weight) is not None
