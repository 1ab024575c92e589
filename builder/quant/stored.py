"""Weights that the checkpoint brought quantised: read as they are, never rounded again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginebay.builder.quant.formats import WeightFormat
from enginebay.builder.quant.plan import LayerPlan, QuantizedChunk
from enginebay.builder.quant.rtn import QuantizedRows, dequantize_rows
from enginebay.builder.weights import CHUNK_BYTES, ROW_GROUP, WeightMatrix, expert_matrices, read_values

I4_CENTRE = 8


@dataclass(frozen=True)
class StoredWeights:
    """w = scale·(q − zero), or scale·q + minimum: values UINT4, INT8 or E4M3 [N, K], scales float32 [N,
    groups], zeros UINT4 [N, groups] or None, minimums float32 [N, groups, 1] or None.

    As a Quantizer it gives these values to any plan of its format.
    """

    values: ir.TensorProtocol
    scales: ir.TensorProtocol
    zeros: ir.TensorProtocol | None = None
    minimums: ir.TensorProtocol | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = (int(dim) for dim in self.values.shape.numpy())
        return rows, columns

    @property
    def group(self) -> int:
        """Values along K that share a scale."""
        return int(self.values.shape.numpy()[-1]) // int(self.scales.shape.numpy()[-1])

    @property
    def format(self) -> WeightFormat:
        """The format that holds these values; symmetric int4 where every zero is the middle."""
        columns, groups = self.shape[1], int(self.scales.shape.numpy()[1])
        if self.values.dtype == ir.DataType.FLOAT8E4M3FN:
            return WeightFormat("f8", 0 if groups == 1 else columns // groups)
        if self.values.dtype == ir.DataType.INT8:
            return WeightFormat("i8", 0 if groups == 1 else columns // groups)
        symmetric = self.minimums is None and bool((self._zeros() == I4_CENTRE).all())
        return WeightFormat("i4", columns // groups, symmetric)

    def method(self, plan: LayerPlan) -> str:  # noqa: ARG002 (of Quantizer)
        return "as stored"

    def rows(self, plan: LayerPlan) -> Iterator[QuantizedChunk]:
        fmt, mine, (rows, columns) = plan.format, self.format, self.shape
        # Beside other experts, blocks may be finer, and symmetric ones have their minimum at -8 steps.
        assert fmt.kind == mine.kind
        assert mine.symmetric or not fmt.symmetric
        finer, rest = divmod(self.group, fmt.scale_block(columns))
        assert finer
        assert not rest
        scales, lows = self.scales.numpy().astype(np.float32), None if fmt.symmetric else self._lows()
        step = max(1, CHUNK_BYTES // (4 * columns * ROW_GROUP)) * ROW_GROUP
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            values = read_values(self.values, start, stop)
            scale = np.repeat(scales[start:stop], finer, axis=1)
            minimums = None if lows is None else np.repeat(lows[start:stop], finer, axis=1)
            chunk = QuantizedRows(fmt, values, scale, minimums)
            yield QuantizedChunk(chunk, dequantize_rows(chunk))

    def dequantized(self) -> NDArray[np.float32]:
        """float32 [N, K]."""
        plan = LayerPlan("", None, self.format)  # type: ignore[arg-type]
        return np.concatenate([chunk.exact for chunk in self.rows(plan)])

    def _lows(self) -> NDArray[np.float32]:
        """Minimums [N, groups] of 4-bit values."""
        scales: NDArray[np.float32] = self.scales.numpy().astype(np.float32)
        if self.minimums is not None:
            return np.asarray(self.minimums.numpy(), np.float32).reshape(scales.shape)
        return -scales * self._zeros().astype(np.float32) + np.float32(0)

    def _zeros(self) -> NDArray[np.uint8]:
        if self.zeros is None:
            return np.zeros(tuple(self.scales.shape.numpy()), np.uint8)
        result: NDArray[np.uint8] = self.zeros.numpy().astype(np.uint8)
        return result


@dataclass(frozen=True)
class StoredMatrix(WeightMatrix):
    """An expert's matrix that came quantised: its rows are what the values stand for."""

    weights: StoredWeights

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        return self.weights.dequantized()[start:stop]


class StoredExperts:
    """A Quantizer of StoredMatrix plans."""

    def method(self, plan: LayerPlan) -> str:  # noqa: ARG002 (of Quantizer)
        return "as stored"

    def rows(self, plan: LayerPlan) -> Iterator[QuantizedChunk]:
        assert isinstance(plan.matrix, StoredMatrix)
        yield from plan.matrix.weights.rows(plan)


def stored_experts(value: ir.Value) -> list[StoredMatrix] | None:
    """The matrices of experts [E, N, K] that came quantised; None where `value` is anything else."""
    whole = stored_weights(value)
    if whole is None or len(whole.values.shape) != 3:
        return None
    scales = np.asarray(whole.scales.numpy(), np.float32)
    zeros = None if whole.zeros is None else whole.zeros.numpy().astype(np.uint8)
    matrices = expert_matrices(str(whole.values.name), whole.values)
    return [
        StoredMatrix(
            matrix.name,
            matrix.tensor,
            StoredWeights(
                matrix.tensor, ir.tensor(scales[e]), None if zeros is None else ir.tensor(zeros[e])
            ),
        )
        for e, matrix in enumerate(matrices)
    ]


def common_format(matrices: Sequence[StoredMatrix]) -> WeightFormat | None:
    """The format that holds them all, with minimums where one has zeros away from the middle, in the largest
    blocks that divide those of each; None where their kinds differ."""
    formats = [matrix.weights.format for matrix in matrices]
    if len({fmt.kind for fmt in formats}) > 1:
        return None
    by_row = not any(fmt.block for fmt in formats)
    block = 0 if by_row else math.gcd(*(matrix.weights.group for matrix in matrices))
    return replace(formats[0], block=block, symmetric=all(fmt.symmetric for fmt in formats))


def stored_weights(value: ir.Value) -> StoredWeights | None:
    """What `value` stands for, if it is the DequantizeLinear, by groups along the last axis, of initializers,
    or the Reshape of the Add of minimums [N, groups, 1] to the Reshape [N, groups, block] of one."""
    added = _operands(_produced(value, "Reshape"), "Add")
    if added is None:
        return _dequantized(value)
    blocks, minimums = added
    steps = _produced(blocks, "Reshape")
    stored = None if steps is None else _dequantized(steps)
    if stored is None or minimums.const_value is None:
        return None
    return replace(stored, minimums=minimums.const_value)


def is_weight(value: ir.Value | None) -> bool:
    """Whether `value` is known before the model runs: an initializer, or what those that came quantised stand
    for on the way to stored_weights."""
    if value is None or value.is_initializer():
        return True
    node = value.producer()
    known = ("Cast", "DequantizeLinear", "Reshape", "Add")
    return (
        node is not None
        and node.domain == ""
        and node.op_type in known
        and all(is_weight(operand) for operand in reversed(node.inputs))
    )


def _produced(value: ir.Value | None, op_type: str) -> ir.Value | None:
    """The first operand of the node `op_type` that gives `value`."""
    node = None if value is None else value.producer()
    return None if node is None or node.op_type != op_type or node.domain != "" else node.inputs[0]


def _operands(value: ir.Value | None, op_type: str) -> tuple[ir.Value, ir.Value] | None:
    first = _produced(value, op_type)
    node = None if value is None else value.producer()
    if first is None or node is None or node.inputs[1] is None:
        return None
    return first, node.inputs[1]


def _dequantized(value: ir.Value) -> StoredWeights | None:
    node = value.producer()
    if node is None or node.op_type != "DequantizeLinear" or node.domain != "":
        return None
    held = [v for v in node.inputs if v is not None]
    if not all(v.is_initializer() for v in held):
        return None
    tensors = [v.const_value for v in held]
    assert tensors[0] is not None
    assert tensors[1] is not None
    if node.attributes["axis"].as_int() != len(tensors[0].shape) - 1:
        return None
    if tensors[0].dtype not in (ir.DataType.UINT4, ir.DataType.INT8, ir.DataType.FLOAT8E4M3FN):
        return None
    return StoredWeights(tensors[0], tensors[1], tensors[2] if len(tensors) > 2 else None)
