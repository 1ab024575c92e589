"""Scales of a layer's input channels that make its weights, or its inputs, easier to round.

* AWQ (Lin et al., 2023): channels with large inputs get larger weights, so that rounding them costs
  relatively less; the exponent is searched by the loss of the rounded layer.
* SmoothQuant (Xiao et al., 2022): outliers move from the inputs into the weights, for 8-bit inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from enginebay.builder.quant.gptq import loss
from enginebay.builder.quant.plan import LayerPlan
from enginebay.builder.quant.rtn import dequantize_rows, quantize_rows

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

_TINY = np.float32(1e-8)


@dataclass(frozen=True)
class AwqScaling:
    """`steps` exponents from 0 (no scaling) below 1; `rows` of the weights, spread evenly, stand for all in
    the search."""

    steps: int = 20
    rows: int = 512


@dataclass(frozen=True)
class SmoothScaling:
    """`alpha` 0: the inputs keep their outliers; 1: the weights take them all."""

    alpha: float = 0.5


@dataclass(frozen=True)
class Site:
    """A layer in calibration: its weights [N, K], its inputs [tokens, K], and inputs^T inputs [K, K]."""

    plan: LayerPlan
    weights: Float32
    inputs: Float32
    hessian: Float64


def channel_scale(config: AwqScaling | SmoothScaling, site: Site, channel: NDArray[np.intp]) -> Float32:
    """s [channels], to multiply column k of the weights by s[channel[k]] and divide input k by."""
    weights, inputs = site.weights, site.inputs
    if isinstance(config, SmoothScaling):
        largest_input = _by_channel(np.abs(inputs).max(axis=0), channel, np.maximum)
        largest_weight = _by_channel(np.abs(weights).max(axis=0), channel, np.maximum)
        return _balanced(largest_input**config.alpha / largest_weight ** (1 - config.alpha))
    count = np.bincount(channel)
    magnitude = np.bincount(channel, np.abs(inputs).mean(axis=0)).astype(np.float32) / count
    some = weights[np.linspace(0, len(weights) - 1, min(len(weights), config.rows)).astype(np.intp)]
    best, chosen = np.inf, np.ones(len(count), np.float32)
    for step in range(config.steps):
        scale = _balanced((magnitude + _TINY) ** np.float32(step / config.steps))
        columns = scale[channel]
        rounded = (
            dequantize_rows(quantize_rows(some * columns, site.plan.format, site.plan.matrix.name)) / columns
        )
        lost = loss(rounded - some, site.hessian)
        if lost < best:
            best, chosen = lost, scale
    return chosen


def _balanced(scale: Float32) -> Float32:
    """Around 1, in powers of two apart from rounding: the smallest and the largest are as far from 1."""
    scale = np.maximum(scale, _TINY)
    result: Float32 = (scale / np.sqrt(scale.max() * scale.min())).astype(np.float32)
    return result


def _by_channel(values: Float32, channel: NDArray[np.intp], combine: np.ufunc) -> Float32:
    result = np.full(int(channel.max()) + 1, _TINY, np.float32)
    combine.at(result, channel, values)
    return result
