"""What a quantiser is to the packer: a layer's plan in, quantised rows out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from enginebay.builder.quant.formats import WeightFormat
from enginebay.builder.quant.rtn import QuantizedRows, quantize_rows
from enginebay.builder.weights import WeightMatrix


@dataclass(frozen=True)
class LayerPlan:
    """A weight matrix, the layer that asked for it, the format it gets, and zero bytes to follow it
    packed."""

    layer: str
    matrix: WeightMatrix
    format: WeightFormat
    padding: int = 0


@dataclass(frozen=True)
class QuantizedChunk:
    """Some rows of a layer, and the float32 weights they stand for."""

    rows: QuantizedRows
    exact: NDArray[np.float32]


class StageProgress(Protocol):
    def __call__(self, done: int, total: int, what: str) -> None:
        """`done` of `total` layers are through this stage; `what` says what the last was."""
        ...


class Quantizer(Protocol):
    """Gives a layer's weights in its format, rows in order, in whole ROW_GROUPs; says by which method."""

    def method(self, plan: LayerPlan) -> str: ...

    def rows(self, plan: LayerPlan) -> Iterator[QuantizedChunk]: ...


class RoundToNearest:
    """Each weight to the nearest point of its block's grid; needs no calibration."""

    def method(self, plan: LayerPlan) -> str:
        return "cast" if plan.format.is_float else "rtn"

    def rows(self, plan: LayerPlan) -> Iterator[QuantizedChunk]:
        for start, chunk in plan.matrix.chunks():
            yield QuantizedChunk(quantize_rows(chunk, plan.format, plan.matrix.name, start), chunk)
