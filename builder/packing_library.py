"""The CPU kernel library as the builder sees it: weights in, packed bytes out."""

from __future__ import annotations

from functools import cached_property
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from enginebay.builder.quant.formats import QuantizationError, WeightFormat
from enginebay.builder.quant.rtn import QuantizedRows
from enginebay.plugins.load import KernelLibrary, PluginError, library_hash


class _Layout(TypedDict):
    format: str
    block_size: int
    symmetric: bool


class CpuPackingLibrary:
    """`enginebay.plugins.load` with WeightFormat for its arguments. PluginError where there is no library."""

    def __init__(self) -> None:
        self._library = KernelLibrary()

    @cached_property
    def sha256(self) -> str:
        return library_hash(self._library.path)

    def packed_bytes(self, fmt: WeightFormat, shape: tuple[int, int]) -> int:
        try:
            return self._library.linear_bytes(rows=shape[0], columns=shape[1], **_layout(fmt, shape[1]))
        except PluginError as error:
            raise QuantizationError(f"weights of shape {list(shape)} in format {fmt.key}: {error}") from error

    def layout(self, fmt: WeightFormat, shape: tuple[int, int]) -> str:
        return self._library.linear_layout(rows=shape[0], columns=shape[1], **_layout(fmt, shape[1]))

    def pack(self, weights: QuantizedRows) -> NDArray[np.uint8]:
        layout = _layout(weights.format, weights.values.shape[1])
        values = weights.values.view(np.uint8) if weights.format.kind == "f8" else weights.values
        return self._library.pack_linear(values, weights.scales, weights.minimums, **layout)


def _layout(fmt: WeightFormat, columns: int) -> _Layout:
    block = 0 if fmt.is_float else fmt.scale_block(columns)
    return {"format": fmt.kind, "block_size": block, "symmetric": fmt.symmetric}
