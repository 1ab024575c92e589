"""What calibration finds for a cache: scales of 8 bits, which for E4M3 the checkpoint may bring, offsets of
int4.

8 bits: stored = value / scale. int4: offsets, the mean of each channel, are taken off 32 values where those
then span less. The values are keys and values as a cache holds them: after norms and RoPE.

The first token of a sequence is often one that most attention goes to, with keys and values far smaller than
others' (Xiao et al., 2023). The even steps of int8 are coarse there, so what they do to first tokens counts
as much as what they do to all others together; E4M3 and int4 are finer where values are smaller.
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
from enginebay.builder.quant.interpreter import BLOCK_SIZE, Batch, FloatCaches
from enginebay.export.spec import ModelSpec
from enginebay.plugins import ops

Array = NDArray[Any]
Float32 = NDArray[np.float32]
Constants = Mapping[str, Float32]  # by the cache's name, cache.L: CacheFormat.constant_shape

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
    constants: Constants

    def pool(self, name: str, shape: tuple[int, ...]) -> tuple[Array, dict[str, Float32]]:
        blocks, *block = shape
        element, name_of = _ELEMENTS[self.format.dtype], self.format.constants
        pool = np.zeros((blocks, *self.format.block_shape(tuple(block))), element)
        return pool, {name_of: self.constants[name]} if name_of else {}


def find_constants(graph: ir.Graph, batch: Batch, weights: WeightsOf, cache: CacheFormat) -> Constants:
    """Constants of `cache` for every attention of canonical `graph`, shapes inferred, as `batch` fills it.

    QuantizationError for a graph that the interpreter cannot run, and naming the layer whose keys or values
    are not finite.
    """
    filled = _Filled(graph, batch, cache)
    Logits(graph, batch, weights, filled)
    return filled.constants


def stored_scales(spec: ModelSpec, cache: CacheFormat) -> Constants:
    """The checkpoint's own scales, which are for E4M3, of the layers that have any."""
    if cache.dtype != "float8e4m3fn":
        return {}
    scales = {}
    for each in spec.cache_scales:
        group = spec.cache_groups[spec.group_of(each.layer)]
        shape = cache.constant_shape(group.block_shape(1))
        parts = [np.broadcast_to(np.asarray(part)[:, None], shape[1:]) for part in (each.keys, each.values)]
        scales[f"cache.{each.layer}"] = np.stack(parts).astype(np.float32)
    return scales


class _Filled(FloatCaches):
    """Finds a layer's constants as soon as its pool is filled."""

    def __init__(self, graph: ir.Graph, batch: Batch, cache: CacheFormat) -> None:
        self.constants: dict[str, Float32] = {}
        self._cache = cache
        self._tokens = batch.tokens
        self._weights = np.ones((batch.blocks, BLOCK_SIZE), np.float32)  # of the pool's slots
        if cache.dtype == "int8":
            self._weights[batch.first_blocks, 0] = batch.tokens / len(batch.sequences)
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
        if self._cache.constants == "cache_offsets":
            total = pool.sum(axis=(0, 2), dtype=np.float64)  # slots without a token hold zeros
            self.constants[name] = (total / self._tokens).astype(np.float32)
            return
        heads = largest.max(axis=-1, keepdims=True)
        reach = np.maximum(largest, FLOOR * np.where(heads == 0, 1, heads))
        base = (reach * (self._cache.headroom / self._cache.largest)).astype(np.float32)
        self.constants[name] = _closest(pool, base, self._weights, self._cache)


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


def _closest(pool: Array, base: Float32, weights: Float32, cache: CacheFormat) -> Float32:
    """Of the scales from `base` [2, Hkv, D] on those whose rounding changes the values least.

    `weights` [blocks, slots] are the tokens'. A channel whose values lie close together, as those of keys do
    where RoPE turns slowly, is best put just below a power of two in E4M3.
    """
    stored = _ELEMENTS[cache.dtype]
    best, least = base, np.full(base.shape, np.inf)
    for choice in range(cache.choices):
        scales = base * np.float32(2 ** (cache.octaves * choice / cache.choices))
        wide = scales[:, None]
        codes = pool / wide if stored != np.int8 else np.rint(pool / wide)
        changes = codes.astype(stored).astype(np.float32) * wide - pool
        squares = np.einsum("bksha,bksha,bs->kha", changes, changes, weights, optimize=True)
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
