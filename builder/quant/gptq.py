"""GPTQ: columns are rounded one after another, and what each loses is made up for by those not yet rounded.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022.
With H = X^T X over the inputs X [tokens, K] of a layer, the loss of weights Q in the place of W is tr((W-Q)
H (W-Q)^T).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from ml_dtypes import float8_e4m3fn
from numpy.typing import NDArray

from enginebay.builder.quant.formats import QuantizationError, WeightFormat
from enginebay.builder.quant.rtn import (
    F8_MAX,
    F8_SCALES,
    QuantizedRows,
    check_finite,
    eleven_bits,
    grid,
    round_to_grid,
    split_blocks,
    storable_scales,
)

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

_F8_STEPS = tuple(2 ** (step / F8_SCALES) for step in range(F8_SCALES))  # E4M3 is as fine an octave further
ROWS = 4096  # of weights solved together: they do not depend on each other


@dataclass(frozen=True)
class GptqConfig:
    """damping       added to H's diagonal, as a share of its mean: keeps H invertible
    act_order     columns with the largest inputs first, while the most can still make up for them
    column_block  columns whose corrections are gathered before they reach the rest
    shrinks       factors on a block's range to choose from, by the loss its own columns would cause
    """

    damping: float = 0.01
    act_order: bool = True
    column_block: int = 64
    shrinks: tuple[float, ...] = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


def gptq_rows(
    weights: Float32, hessian: Float64, fmt: WeightFormat, name: str, config: GptqConfig | None = None
) -> QuantizedRows:
    """Weights [N, K] in format `fmt`, integers or E4M3, with H [K, K] of the layer's inputs.

    Every row is solved by itself; the grids (scale and minimum of each block) are chosen first and stay. A
    column whose input was always 0 is rounded to nearest. Raises QuantizationError for weights or H that
    are not finite.
    """
    config = config or GptqConfig()
    check_finite(weights, name, 0)
    if not np.isfinite(hessian).all():
        raise QuantizationError(f"tensor {name}: calibration gave inputs that are not finite numbers")
    order = _inverse_factor(hessian, config)
    parts = [
        _solve(weights[start : start + ROWS], hessian, fmt, order, config)
        for start in range(0, len(weights), ROWS)
    ]
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return QuantizedRows(
        fmt,
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.scales for part in parts if part.scales is not None]),
        np.concatenate(minimums) if minimums else None,
    )


@dataclass(frozen=True)
class _Order:
    """`factor` [K, K] upper triangular U with U^T U = H^-1 for the columns in `order` [K]."""

    factor: Float32
    columns: NDArray[np.intp]


def _solve(
    weights: Float32, hessian: Float64, fmt: WeightFormat, order: _Order, config: GptqConfig
) -> QuantizedRows:
    """Some rows, a column of all of them at a time."""
    scales, minimums = best_grid(weights, hessian, fmt, config.shrinks)
    block = fmt.scale_block(weights.shape[1])
    steps_of, start_of = scales.T.copy(), _offsets(scales, minimums, fmt).T.copy()  # [blocks, N]
    factor, where = order.factor, order.columns
    left = weights[:, where].T.copy()  # [K, N]: a column of W is contiguous
    values = np.empty(weights.shape, {"i8": np.int8, "f8": float8_e4m3fn}.get(fmt.kind, np.uint8))
    columns = len(left)
    for start in range(0, columns, config.column_block):
        stop = min(start + config.column_block, columns)
        errors = np.empty((stop - start, left.shape[1]), np.float32)
        for k in range(start, stop):
            step, offset = steps_of[where[k] // block], start_of[where[k] // block]
            chosen = _nearest((left[k] - offset) / step, fmt)
            values[:, where[k]] = chosen
            errors[k - start] = (left[k] - (chosen * step + offset)) / factor[k, k]
            left[k + 1 : stop] -= factor[k, k + 1 : stop, None] * errors[k - start]
        left[stop:] -= factor[start:stop, stop:].T @ errors
    return QuantizedRows(fmt, values, scales, minimums)


def _nearest(steps: Float32, fmt: WeightFormat) -> Float32:
    """The values of `fmt` nearest to `steps`, as float32."""
    if fmt.kind == "f8":
        return np.clip(steps, -F8_MAX, F8_MAX).astype(float8_e4m3fn).astype(np.float32)
    low, high = (-127, 127) if fmt.kind == "i8" else (0, 15)
    return np.clip(np.rint(steps), low, high)


def rounded_rows(
    weights: Float32, hessian: Float64, fmt: WeightFormat, shrinks: tuple[float, ...]
) -> QuantizedRows:
    """Weights [N, K] rounded to nearest in the grids of `best_grid`."""
    values: list[NDArray[Any]] = []
    grids = []
    for start in range(0, len(weights), ROWS):
        part = weights[start : start + ROWS]
        scales, minimums = best_grid(part, hessian, fmt, shrinks)
        values.append(round_to_grid(split_blocks(part, fmt), fmt, scales, minimums).reshape(part.shape))
        grids.append((scales, minimums))
    lows = [minimums for _, minimums in grids if minimums is not None]
    return QuantizedRows(
        fmt,
        np.concatenate(values),
        np.concatenate([scales for scales, _ in grids]),
        np.concatenate(lows) if lows else None,
    )


def loss(difference: Float32, hessian: Float64) -> float:
    """tr(D H D^T): what `difference` [N, K] in the weights changes in the layer's outputs, summed over the
    inputs."""
    return float(np.vdot(difference, difference @ hessian.astype(np.float32)))


def best_grid(
    weights: Float32, hessian: Float64, fmt: WeightFormat, shrinks: tuple[float, ...]
) -> tuple[Float32, Float32 | None]:
    """Scales and minimums [N, K/block]: of the range of each block times each of `shrinks`, the one whose
    rounding to nearest loses least, by the part of H between the block's own columns."""
    blocks = split_blocks(weights, fmt)
    width = blocks.shape[2]
    own = np.stack([hessian[k : k + width, k : k + width] for k in range(0, len(hessian), width)]).astype(
        np.float32
    )
    scales, minimums = grid(blocks, fmt)
    if fmt.kind == "f8":
        shrinks = _F8_STEPS
    best = np.full(scales.shape, np.inf, np.float32)
    chosen_scales, chosen_minimums = scales.copy(), None if minimums is None else minimums.copy()
    for shrink in shrinks:
        trial_minimums = None
        if minimums is not None:
            middle = minimums + scales * np.float32(7.5)
            trial_minimums = eleven_bits(middle - scales * np.float32(7.5 * shrink))
        trial_scales = storable_scales(scales * np.float32(shrink))
        steps = round_to_grid(blocks, fmt, trial_scales, trial_minimums).astype(np.float32)
        if trial_minimums is not None:
            rounded = steps * trial_scales[:, :, None] + trial_minimums[:, :, None]
        else:
            rounded = (steps - (8 if fmt.kind == "i4" else 0)) * trial_scales[:, :, None]
        lost = (rounded - blocks).transpose(1, 0, 2)  # [blocks, N, width]
        losses = np.einsum("bnk,bnk->nb", lost @ own, lost)
        better = losses < best
        best = np.where(better, losses, best)
        chosen_scales = np.where(better, trial_scales, chosen_scales)
        if trial_minimums is not None and chosen_minimums is not None:
            chosen_minimums = np.where(better, trial_minimums, chosen_minimums)
    return chosen_scales, chosen_minimums


def damped(hessian: Float64, damping: float) -> Float64:
    """H with `damping` times the mean of its diagonal added there; an input that was always 0 counts as 1."""
    result = hessian.copy()
    diagonal = np.einsum("ii->i", result)
    dead = diagonal == 0
    mean = float(diagonal[~dead].mean()) if not dead.all() else 1.0
    diagonal[dead] = mean
    diagonal += damping * mean
    return result


def _inverse_factor(hessian: Float64, config: GptqConfig) -> _Order:
    diagonal = np.diag(hessian)
    order = np.argsort(-diagonal, kind="stable") if config.act_order else np.arange(len(diagonal))
    ordered = damped(hessian, config.damping)[np.ix_(order, order)]
    inverse = np.linalg.inv(ordered)
    factor = np.linalg.cholesky((inverse + inverse.T) / 2).T
    return _Order(factor.astype(np.float32), order)


def _offsets(scales: Float32, minimums: Float32 | None, fmt: WeightFormat) -> Float32:
    """[N, blocks]: what step 0 stands for."""
    if minimums is not None:
        return minimums
    return -np.float32(8 if fmt.kind == "i4" else 0) * scales
