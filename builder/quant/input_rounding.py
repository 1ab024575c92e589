"""Inputs in E4M3: their scales, and which of them are multiplied twice.

E4M3 keeps three bits behind the leading one, so an error is a share of the input it befalls, whatever the
scale. The few inputs that bring most of a product's energy bring most of its error: what rounding left of
them is rounded too, and multiplied by the same columns of W, which are packed a second time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from enginebay.builder.quant.formats import QuantizationError, WeightFormat
from enginebay.builder.quant.rtn import F8_MAX, QuantizedRows, dequantize_rows, quantize_rows

Float32 = NDArray[np.float32]

COLUMNS = 32  # repeated columns come in so many where scales are of rows: FP8 units take no fewer


@dataclass(frozen=True)
class Float8Inputs:
    """Inputs become E4M3 where weights are f8 or i4; int8 weights keep their int8 inputs, floats theirs.

    static    one scale a layer, from calibration; otherwise each token has its own
    headroom  a static scale reaches so many times the largest input seen, and what lies beyond saturates.
              E4M3 is as fine there as elsewhere: only its smallest numbers get scarcer
    repeated  the share of inputs that are multiplied twice
    """

    static: bool = False
    headroom: float = 2.0
    repeated: float = 0.25


@dataclass
class InputRounding:
    """By layer: `scales` where they are static, and the inputs to multiply twice, int32 [R] ascending."""

    scales: dict[str, float] = field(default_factory=dict)
    repeated: dict[str, NDArray[np.int32]] = field(default_factory=dict)

    def calibrate(
        self, layer: str, fmt: WeightFormat, config: Float8Inputs, inputs: Float32, weights: Float32 | None
    ) -> None:
        """From `inputs` [tokens, K] of linear `layer` with `weights` [N, K] in `fmt`; None: no input of it is
        repeated. QuantizationError naming the layer where inputs are not finite."""
        largest = float(np.abs(inputs).max(initial=0.0))
        if not np.isfinite(largest):
            raise QuantizationError(f"layer {layer}: its inputs in calibration are not finite")
        if config.static:  # inputs that were always 0 fit any scale
            self.scales[layer] = config.headroom * largest / F8_MAX if largest else 1.0
        if weights is not None:
            repeated = repeated_inputs(fmt, config.repeated, inputs, weights)
            if len(repeated):
                self.repeated[layer] = repeated


def repeated_inputs(fmt: WeightFormat, share: float, inputs: Float32, weights: Float32) -> NDArray[np.int32]:
    """Of K, about `share`, whole blocks of `fmt`: those with the largest sum over tokens and rows of (w x)^2,
    a share of which is what rounding them changes."""
    columns = weights.shape[1]
    block = fmt.block or COLUMNS
    count = min(round(columns * share / block) or 1, columns // block) * block if share else 0
    squares = [np.einsum("tk,tk->k", m, m, dtype=np.float64) for m in (inputs, weights)]
    largest = np.argsort(-squares[0] * squares[1], kind="stable")[:count]
    return np.sort(largest).astype(np.int32)


def repeat_columns(rows: QuantizedRows, columns: NDArray[np.int32]) -> QuantizedRows:
    """`rows` [n, K] with `columns` of them behind: as they are where a scale is a row's, else in blocks of
    their own, rounded to nearest. They meet a sixteenth of an input, and their rounding a sixteenth of that
    of the others."""
    if not rows.format.block:
        extra = QuantizedRows(rows.format, rows.values[:, columns])
    else:
        extra = quantize_rows(dequantize_rows(rows)[:, columns], rows.format, "a repeated column")

    def both(first: NDArray[np.float32] | None, second: NDArray[np.float32] | None) -> Float32 | None:
        return first if first is None or second is None else np.concatenate([first, second], axis=1)

    return QuantizedRows(
        rows.format,
        np.concatenate([rows.values, extra.values], axis=1),
        both(rows.scales, extra.scales),
        both(rows.minimums, extra.minimums),
    )
