"""Scales of 8-bit caches, found by calibration.

stored = value / scale, where a scale is the largest value over the largest code, fixed when the engine is
built. The values are keys and values as a cache holds them: after norms and RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginebay.builder.lower.graph import int_attribute
from enginebay.builder.quant.cache import CacheFormat
from enginebay.builder.quant.evaluate import Logits, WeightsOf
from enginebay.builder.quant.formats import QuantizationError
from enginebay.builder.quant.interpreter import Batch, FloatCaches
from enginebay.plugins import ops

Array = NDArray[Any]
Float32 = NDArray[np.float32]
Scales = Mapping[str, Float32]  # by the cache's name, cache.L: CacheFormat.scale_shape

FLOOR = 1 / 64  # of a head's largest scale: a channel that calibration found silent may yet speak
_ELEMENTS: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int8": np.int8,
    "float8e4m3fn": ml_dtypes.float8_e4m3fn,
    "int4": np.uint8,
}


@dataclass(frozen=True)
class StoredCaches(FloatCaches):
    """Pools of a format, as an engine has them: attention reads what the format makes of keys and values."""

    format: CacheFormat
    scales: Scales

    def pool(self, name: str, shape: tuple[int, ...]) -> tuple[Array, Float32 | None]:
        blocks, *block = shape
        element = _ELEMENTS[self.format.dtype]
        return np.zeros((blocks, *self.format.block_shape(tuple(block))), element), self.scales.get(name)


def find_scales(graph: ir.Graph, batch: Batch, weights: WeightsOf, cache: CacheFormat) -> Scales:
    """Scales of `cache` for every attention of canonical `graph`, shapes inferred, as `batch` fills it.

    QuantizationError for a graph that the interpreter cannot run, and naming the layer whose keys or values
    are not finite.
    """
    seen = _Largest(graph)
    Logits(graph, batch, weights, seen)
    return {name: _scales(largest, cache) for name, largest in seen.largest.items()}


class _Largest(FloatCaches):
    """Notes the largest magnitude of every channel, float32 [2, Hkv, D] by the cache's name.

    Of key channels that RoPE turns into each other it is the length of the pair: what one of them holds the
    other may hold at another position.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.largest: dict[str, Float32] = {}
        self._nodes = {
            cache.name: node
            for node in graph
            if node.domain == ops.DOMAIN and node.op_type == ops.PAGED_ATTENTION.name
            if (cache := _input(node, "cache")) is not None
        }

    def written(self, name: str, pool: Array) -> None:
        node = self._nodes[name]
        largest: Float32 = np.abs(pool).max(axis=(0, 2))
        first, second = _turned(node)
        lengths = np.hypot(pool[:, 0, :, :, first], pool[:, 0, :, :, second])  # [pairs, blocks, slots, Hkv]
        largest[0][:, first] = largest[0][:, second] = lengths.max(axis=(1, 2)).T
        if not np.isfinite(largest).all():
            raise QuantizationError(f"{node.name}: its keys or values in calibration are not finite")
        self.largest[name] = largest


def _scales(largest: Float32, cache: CacheFormat) -> Float32:
    """[2, Hkv, D] of largest magnitudes to what CacheFormat.scale_shape says."""
    heads = largest.max(axis=-1, keepdims=True)
    heads[heads == 0] = 1
    scales = np.maximum(largest, FLOOR * heads) if cache.scales == "channel" else heads[..., 0]
    return (scales * (cache.headroom / cache.largest)).astype(np.float32)


def _turned(node: ir.Node) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Channels that RoPE turns into each other: the first and the second of every pair."""
    cosines = _input(node, "rope_cos")
    if cosines is None:
        return np.arange(0), np.arange(0)
    assert cosines.shape is not None
    half = int(cosines.shape.numpy()[1])
    pairs = np.arange(half)
    return (2 * pairs, 2 * pairs + 1) if int_attribute(node, "rope_interleaved", 0) else (pairs, pairs + half)


def _input(node: ir.Node, name: str) -> ir.Value | None:
    index = ops.PAGED_ATTENTION.input_index(name)
    return node.inputs[index] if index < len(node.inputs) else None
