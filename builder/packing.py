"""From a checkpoint's weights to the packed bytes of an engine, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginebay.builder.quant.formats import QuantizationError, WeightFormat
from enginebay.builder.quant.input_rounding import InputRounding, repeat_columns
from enginebay.builder.quant.plan import LayerPlan, Quantizer
from enginebay.builder.quant.recipes import Recipe, Role
from enginebay.builder.quant.rtn import QuantizedRows, dequantize_rows
from enginebay.builder.quant.stored import StoredExperts, StoredMatrix, StoredWeights
from enginebay.builder.weights import WeightMatrix, expert_matrices
from enginebay.plugins.ops import EXPERT_ALIGNMENT


class PackingLibrary(Protocol):
    """What packing asks of a device's kernel library (plugins/include/enginebay/quant_linear.h).

    Rows are packed in groups: packing a matrix by groups of ROW_GROUP rows, or any multiple, one after
    another gives the bytes of packing it at once.
    """

    def packed_bytes(self, fmt: WeightFormat, shape: tuple[int, int]) -> int: ...

    def layout(self, fmt: WeightFormat, shape: tuple[int, int]) -> str: ...

    def pack(self, weights: QuantizedRows) -> NDArray[np.uint8]: ...


@dataclass(frozen=True)
class LayerResult:
    """What became of one weight matrix. `relative_error`: Frobenius norm of the change over that of the
    weights; `squared_error`: the square of the former; `max_error`: of a weight."""

    layer: str
    tensor: str
    shape: tuple[int, int]
    format: WeightFormat
    method: str
    source_bytes: int
    packed_bytes: int
    relative_error: float
    squared_error: float
    max_error: float


@dataclass(frozen=True)
class Placed:
    """A packed weight in the graph and the attributes of the nodes that read it. `repeated`: int32 [R], the
    columns that it holds a second time behind the others, for inputs in E4M3."""

    value: ir.Value
    attributes: dict[str, int | float | str]
    repeated: ir.Value | None = None


class WeightPacker:
    """Gives lowerings their packed initializers and packs each when the engine's sidecar asks for it."""

    def __init__(
        self,
        recipe: Recipe,
        library: PackingLibrary,
        quantizer: Quantizer,
        inputs: InputRounding | None = None,
    ) -> None:
        """`inputs`: what calibration found out for a recipe whose inputs become E4M3."""
        self._recipe = recipe
        self._inputs = inputs or InputRounding()
        self._library = library
        self._quantizer = quantizer
        self._placed: dict[str, Placed] = {}
        self._plans: dict[str, tuple[LayerPlan, ...]] = {}
        self._quantizers: dict[str, Quantizer] = {}
        self._repeated: dict[str, NDArray[np.int32]] = {}
        self._input_methods: dict[str, str] = {}
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
        self._placed[weight.name] = self._place(graph, weight.name, LayerPlan(layer, matrix, fmt))
        return self._placed[weight.name]

    def place_stored(self, graph: ir.Graph, layer: str, name: str, weights: StoredWeights) -> Placed:
        """The packed form of weights that came quantised: whatever the recipe says, they stay as they are."""
        self._quantizers[f"{name}.packed"] = weights
        plan = LayerPlan(layer, WeightMatrix(name, weights.values), weights.format)
        return self._place(graph, name, plan)

    def _place(self, graph: ir.Graph, name: str, plan: LayerPlan) -> Placed:
        fmt, (rows, columns) = plan.format, plan.matrix.shape
        twice = self._inputs.repeated.get(plan.layer)
        repeated = None
        if twice is not None:
            tensor = ir.tensor(twice, name=f"{plan.layer}.repeated")
            kind, shape = ir.TensorType(ir.DataType.INT32), ir.Shape([len(twice)])
            repeated = ir.Value(name=tensor.name, shape=shape, type=kind, const_value=tensor)
            graph.register_initializer(repeated)
            self._repeated[f"{name}.packed"] = twice
            columns += len(twice)
        value = self._register(
            graph, name, (plan,), self._library.packed_bytes(fmt, (rows, columns)), (rows, columns)
        )
        attributes = {
            "in_features": columns,
            "out_features": rows,
            **_format_attributes(fmt, 0 if fmt.is_float else fmt.scale_block(columns)),
        }
        return Placed(value, attributes, repeated)

    def input_scale(self, layer: str, packed: Placed) -> float | None:
        """What linear `layer` rounds its inputs to E4M3 with, 0 for a scale of each row's own; None: it does
        not. QuantizationError where calibration gave a static scale to every layer but this."""
        inputs = self._recipe.inputs_of(str(packed.attributes["format"]))
        if inputs is None:
            return None
        count = len(self._inputs.repeated.get(layer, ()))
        twice = f", {count} of them twice" if count else ""
        if not inputs.static:
            self._input_methods[layer] = f", E4M3 inputs{twice}"
            return 0.0
        if layer not in self._inputs.scales:
            raise QuantizationError(
                f"layer {layer}: calibration did not reach it, so its inputs have no scale; build with "
                "quant fp8-w8a8, whose scales are each token's own"
            )
        self._input_methods[layer] = f", E4M3 inputs of scale {self._inputs.scales[layer]:.4g}{twice}"
        return self._inputs.scales[layer]

    def place_experts(self, graph: ir.Graph, layer: str, weight: ir.Value, columns: int) -> Placed:
        """The packed form of initializer `weight` [experts, N, K]: one expert after another, each at a
        multiple of EXPERT_ALIGNMENT bytes. The attributes are those of the format alone; its block divides
        `columns`, which divides K."""
        assert weight.name is not None
        assert weight.const_value is not None
        matrices = expert_matrices(weight.name, weight.const_value)
        fmt = self._recipe.format_of(layer, (matrices[0].shape[0], columns))
        size = self._library.packed_bytes(fmt, matrices[0].shape)
        padding = -size % EXPERT_ALIGNMENT
        plans = tuple(LayerPlan(layer, matrix, fmt, padding) for matrix in matrices)
        size = len(plans) * (size + padding)
        value = self._register(graph, weight.name, plans, size, matrices[0].shape)
        return Placed(value, _format_attributes(fmt, fmt.block))

    def place_stored_experts(
        self, graph: ir.Graph, layer: str, matrices: Sequence[StoredMatrix], fmt: WeightFormat
    ) -> Placed:
        """As `place_experts`, of experts that came quantised: they stay as they are."""
        size = self._library.packed_bytes(fmt, matrices[0].shape)
        padding = -size % EXPERT_ALIGNMENT
        plans = tuple(LayerPlan(layer, matrix, fmt, padding) for matrix in matrices)
        name = f"{layer}.weight"
        value = self._register(graph, name, plans, len(plans) * (size + padding), matrices[0].shape)
        self._quantizers[f"{name}.packed"] = StoredExperts()
        return Placed(value, _format_attributes(fmt, fmt.block))

    def _register(
        self,
        graph: ir.Graph,
        weight: str,
        plans: tuple[LayerPlan, ...],
        size: int,
        shape: tuple[int, int],
    ) -> ir.Value:
        """`shape` [N, K] as packed, repeated columns counted."""
        name = f"{weight}.packed"
        self._plans[name] = plans
        fmt = plans[0].format
        self.layouts[fmt.layout_key(shape[1])] = self._library.layout(fmt, shape)
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
        return value

    def is_packed(self, name: str) -> bool:
        """Whether the initializer `name` is one of ours."""
        return name in self._plans

    def pack(self, name: str) -> Iterator[NDArray[np.uint8]]:
        """The bytes of packed initializer `name`, a group of rows at a time; then its entry in `results`."""
        plans, quantizer = self._plans[name], self._quantizers.get(name, self._quantizer)
        twice = self._repeated.get(name)
        squares = lost = worst = 0.0
        size = 0
        for plan in plans:
            start = 0
            for chunk in quantizer.rows(plan):
                difference = dequantize_rows(chunk.rows) - chunk.exact
                squares += _sum_of_squares(chunk.exact)
                lost += _sum_of_squares(difference)
                worst = max(worst, float(np.abs(difference).max(initial=0.0)))
                rows = chunk.rows if twice is None else repeat_columns(chunk.rows, twice)
                packed = self._library.pack(rows)
                yield packed
                start, size = start + len(chunk.exact), size + packed.nbytes
            assert start == plan.matrix.shape[0], (
                f"{plan.layer}: {start} of {plan.matrix.shape[0]} rows quantised"
            )
            if plan.padding:
                yield np.zeros(plan.padding, np.uint8)
                size += plan.padding
        first = plans[0]
        height, columns = first.matrix.shape
        self.results.append(
            LayerResult(
                layer=first.layer,
                tensor=name.removesuffix(".packed"),
                shape=(len(plans) * height, columns),
                format=first.format,
                method=" and ".join(dict.fromkeys(quantizer.method(plan) for plan in plans))
                + self._input_methods.get(first.layer, ""),
                source_bytes=sum(plan.matrix.nbytes for plan in plans),
                packed_bytes=size,
                squared_error=lost,
                relative_error=(lost / squares) ** 0.5 if squares else 0.0,
                max_error=worst,
            )
        )


def _sum_of_squares(values: NDArray[np.float32]) -> float:
    """In float64: the square of a large weight is beyond float32."""
    return float(np.einsum("ij,ij->", values, values, dtype=np.float64))


def _format_attributes(fmt: WeightFormat, block_size: int) -> dict[str, int | float | str]:
    return {
        "format": fmt.kind,
        "block_size": block_size,
        "symmetric": int(fmt.symmetric),
    }
