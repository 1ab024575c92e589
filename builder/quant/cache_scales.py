"""Scales of 8-bit caches: found by calibration, or for E4M3 what the checkpoint brought along.

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
from enginebay.export.spec import ModelSpec
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
    filled = _Filled(graph, cache)
    Logits(graph, batch, weights, filled)
    return filled.scales


def stored_scales(spec: ModelSpec, cache: CacheFormat) -> Scales:
    """The checkpoint's own scales, which are for E4M3, of the layers that have any."""
    if cache.dtype != "float8e4m3fn":
        return {}
    scales = {}
    for each in spec.cache_scales:
        group = spec.cache_groups[spec.group_of(each.layer)]
        shape = cache.scale_shape(group.block_shape(1))
        parts = [np.broadcast_to(np.asarray(part)[:, None], shape[1:]) for part in (each.keys, each.values)]
        scales[f"cache.{each.layer}"] = np.stack(parts).astype(np.float32)
    return scales


class _Filled(FloatCaches):
    """Chooses a layer's scales as soon as its pool is filled."""

    def __init__(self, graph: ir.Graph, cache: CacheFormat) -> None:
        self.scales: dict[str, Float32] = {}
        self._cache = cache
        self._nodes = {
            value.name: node
            for node in graph
            if node.domain == ops.DOMAIN and node.op_type == ops.PAGED_ATTENTION.name
            if (value := _input(node, "cache")) is not None
        }

    def written(self, name: str, pool: Array) -> None:
        node = self._nodes[name]
        largest = _largest(node, pool)
        if not np.isfinite(largest).all():
            raise QuantizationError(f"{node.name}: its keys or values in calibration are not finite")
        heads = largest.max(axis=-1, keepdims=True)
        reach = np.maximum(largest, FLOOR * np.where(heads == 0, 1, heads))
        base = (reach * (self._cache.headroom / self._cache.largest)).astype(np.float32)
        self.scales[name] = base if self._cache.choices == 1 else _closest(pool, base, self._cache)


def _largest(node: ir.Node, pool: Array) -> Float32:
    """Largest magnitude of every channel, [2, Hkv, D].

    Of key channels that RoPE turns into each other it is the length of the pair: what one of them holds the
    other may hold at another position.
    """
    largest: Float32 = np.abs(pool).max(axis=(0, 2))
    first, second = _turned(node)
    lengths = np.hypot(pool[:, 0, :, :, first], pool[:, 0, :, :, second])  # [pairs, blocks, slots, Hkv]
    largest[0][:, first] = largest[0][:, second] = lengths.max(axis=(1, 2)).T
    return largest


def _closest(pool: Array, base: Float32, cache: CacheFormat) -> Float32:
    """Of the scales from `base` [2, Hkv, D] to its double those whose rounding changes the values least.

    A channel whose values lie close together, as those of keys do where RoPE turns slowly, is best put just
    below a power of two.
    """
    best, least = base, np.full(base.shape, np.inf)
    for choice in range(cache.choices):
        scales = base * np.float32(2 ** (choice / cache.choices))
        wide = scales[:, None]
        changes = (pool / wide).astype(_ELEMENTS[cache.dtype]).astype(np.float32) * wide - pool
        squares = np.einsum("bksha,bksha->kha", changes, changes)
        best, least = np.where(squares < least, scales, best), np.minimum(squares, least)
    return best.astype(np.float32)


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
