"""The cache pools take the format and the block size that the engine is built for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginebay.builder.lower.graph import RewriteReport, int_attribute
from enginebay.builder.quant.cache import CacheFormat
from enginebay.plugins import ops

CACHE = ops.PAGED_ATTENTION.input_index("cache")


def set_cache_layout(
    graph: ir.Graph, cache: CacheFormat, block_size: int, constants: Mapping[str, NDArray[np.float32]]
) -> RewriteReport:
    """Sets type and shape of `cache` and `cache_out` of every PagedAttention, and gives it its constants.

    A cache with tiers gets the colder pools as inputs of the graph, cache_int8.L and cache_int4.L.
    The pool's shape is [blocks, 2, block_size, kv_heads, row], or [blocks, block_size, width] of latents.
    `constants`: by the cache's name, float32 as CacheFormat.constant_shape says; none for a format without.
    """
    report = RewriteReport("cache")
    kind = ir.TensorType(cache.element)
    for node in graph:
        if node.domain != ops.DOMAIN or node.op_type != ops.PAGED_ATTENTION.name:
            continue
        pool, out = node.inputs[CACHE], node.outputs[1]
        axis = 1 if int_attribute(node, "latent_dim", 0) else 2
        if pool is None or pool.shape is None or len(pool.shape) != 2 * axis + 1:
            report.miss(node, f"has no cache of {2 * axis + 1} dimensions with the block size at {axis}")
            continue
        sizes = list(pool.shape)
        sizes[axis] = block_size
        block = tuple(size for size in sizes[1:] if isinstance(size, int))
        if len(block) < 2 * axis:
            report.miss(node, f"has a cache of {pool.shape}, whose heads and sizes are not all known")
            continue
        shape = ir.Shape([sizes[0], *cache.block_shape(block)])
        for value in (pool, out):
            value.type, value.shape = kind, shape
        assert pool.name is not None
        for tier in cache.tiers:
            _add_pool(graph, node, pool.name, tier, block)
        if cache.calibrated.constants:
            _add_constant(graph, node, cache.calibrated.constants, constants[pool.name])
        report.matched += 1
    return report


def _add_pool(graph: ir.Graph, node: ir.Node, cache: str, tier: CacheFormat, block: tuple[int, ...]) -> None:
    """Gives `node` the colder pool cache_int8.L or cache_int4.L, an input of the graph."""
    pool = ir.Value(
        name=cache.replace("cache.", f"cache_{tier.name}."),
        type=ir.TensorType(tier.element),
        shape=ir.Shape([f"blocks_{tier.name}", *tier.block_shape(block)]),
    )
    graph.inputs.append(pool)
    _set_input(node, f"cache_{tier.name}", pool)


def _set_input(node: ir.Node, name: str, value: ir.Value) -> None:
    index = ops.PAGED_ATTENTION.input_index(name)
    node.resize_inputs(max(len(node.inputs), index + 1))
    node.replace_input_with(index, value)


def _add_constant(graph: ir.Graph, node: ir.Node, input_name: str, numbers: NDArray[np.float32]) -> None:
    name = f"{node.name}.{input_name}"
    value = ir.Value(
        name=name,
        type=ir.TensorType(ir.DataType.FLOAT),
        shape=ir.Shape(numbers.shape),
        const_value=ir.tensor(numbers, name=name),
    )
    graph.register_initializer(value)
    _set_input(node, input_name, value)
