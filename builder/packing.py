"""From a checkpoint's weights to the packed bytes of an engine, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginebay.builder.quant.formats import WeightFormat
from enginebay.builder.quant.recipes import Recipe, Role
from enginebay.builder.quant.rtn import QuantizedRows, dequantize_rows, quantize_rows
from enginebay.builder.weights import WeightMatrix


class PackingLibrary(Protocol):
    """What packing asks of a device's kernel library (plugins/include/enginebay/quant_linear.h).

    Rows are packed in groups: packing a matrix by groups of ROW_GROUP rows, or any multiple, one after
    another gives the bytes of packing it at once.
    """

    def packed_bytes(self, fmt: WeightFormat, shape: tuple[int, int]) -> int: ...

    def layout(self, fmt: WeightFormat, shape: tuple[int, int]) -> str: ...

    def pack(self, weights: QuantizedRows) -> NDArray[np.uint8]: ...


@dataclass(frozen=True)
class LayerPlan:
    """A weight matrix, the layer that asked for it, and the format it gets."""

    layer: str
    matrix: WeightMatrix
    format: WeightFormat


class Quantizer(Protocol):
    """Gives a layer's weights in its format, rows in order, in whole ROW_GROUPs; says by which method."""

    def method(self, plan: LayerPlan) -> str: ...

    def rows(self, plan: LayerPlan) -> Iterator[QuantizedRows]: ...


class RoundToNearest:
    """Each weight to the nearest point of its block's grid; needs no calibration."""

    def method(self, plan: LayerPlan) -> str:
        return "cast" if plan.format.is_float else "rtn"

    def rows(self, plan: LayerPlan) -> Iterator[QuantizedRows]:
        for start, chunk in plan.matrix.chunks():
            yield quantize_rows(chunk, plan.format, plan.matrix.name, start)


@dataclass(frozen=True)
class LayerResult:
    """What became of one weight matrix. `relative_error`: Frobenius norm of the change over that of the
    weights."""

    layer: str
    tensor: str
    shape: tuple[int, int]
    format: WeightFormat
    method: str
    source_bytes: int
    packed_bytes: int
    relative_error: float
    max_error: float


@dataclass(frozen=True)
class Placed:
    """A packed weight in the graph and the attributes of the nodes that read it."""

    value: ir.Value
    attributes: dict[str, int | float | str]


class WeightPacker:
    """Gives lowerings their packed initializers and packs each when the engine's sidecar asks for it."""

    def __init__(self, recipe: Recipe, library: PackingLibrary, quantizer: Quantizer) -> None:
        self._recipe = recipe
        self._library = library
        self._quantizer = quantizer
        self._placed: dict[str, Placed] = {}
        self._plans: dict[str, LayerPlan] = {}
        self.layouts: dict[str, str] = {}
        self.results: list[LayerResult] = []

    def place(self, graph: ir.Graph, layer: str, weight: ir.Value, role: Role = "linear") -> Placed:
        """The packed form of initializer `weight`, as `layer` wants it. A tensor is packed once: who comes
        second (the embedding of a model whose head is tied to it) reads what the first chose."""
        assert weight.name is not None
        assert weight.const_value is not None
        if weight.name in self._placed:
            return self._placed[weight.name]
        matrix = WeightMatrix(weight.name, weight.const_value)
        fmt = self._recipe.format_of(layer, matrix.shape, role)
        size = self._library.packed_bytes(fmt, matrix.shape)
        name = f"{weight.name}.packed"
        self._plans[name] = LayerPlan(layer, matrix, fmt)
        self.layouts[fmt.key] = self._library.layout(fmt, matrix.shape)
        tensor = ir.LazyTensor(
            lambda: ir.tensor(np.concatenate(list(self.pack(name)))),
            ir.DataType.UINT8,
            ir.Shape([size]),
            name=name,
        )
        value = ir.Value(
            name=name, shape=tensor.shape, type=ir.TensorType(ir.DataType.UINT8), const_value=tensor
        )
        graph.register_initializer(value)
        rows, columns = matrix.shape
        attributes: dict[str, int | float | str] = {
            "in_features": columns,
            "out_features": rows,
            "format": fmt.kind,
            "block_size": 0 if fmt.is_float else fmt.scale_block(columns),
            "symmetric": int(fmt.symmetric),
        }
        self._placed[weight.name] = Placed(value, attributes)
        return self._placed[weight.name]

    def is_packed(self, name: str) -> bool:
        """Whether the initializer `name` is one of ours."""
        return name in self._plans

    def pack(self, name: str) -> Iterator[NDArray[np.uint8]]:
        """The bytes of packed initializer `name`, a group of rows at a time; then its entry in `results`."""
        plan = self._plans[name]
        squares = lost = worst = 0.0
        start = size = 0
        for part in self._quantizer.rows(plan):
            stop = start + len(part.values)
            exact = plan.matrix.rows(start, stop)
            difference = dequantize_rows(part) - exact
            squares += float(np.vdot(exact, exact))
            lost += float(np.vdot(difference, difference))
            worst = max(worst, float(np.abs(difference).max(initial=0.0)))
            packed = self._library.pack(part)
            yield packed
            start, size = stop, size + packed.nbytes
        assert start == plan.matrix.shape[0], (
            f"{plan.layer}: {start} of {plan.matrix.shape[0]} rows quantised"
        )
        self.results.append(
            LayerResult(
                layer=plan.layer,
                tensor=plan.matrix.name,
                shape=plan.matrix.shape,
                format=plan.format,
                method=self._quantizer.method(plan),
                source_bytes=plan.matrix.nbytes,
                packed_bytes=size,
                relative_error=(lost / squares) ** 0.5 if squares else 0.0,
                max_error=worst,
            )
        )
