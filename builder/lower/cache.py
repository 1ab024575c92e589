"""The cache pools take the dtype and the block size that the engine is built for."""

from __future__ import annotations

import onnx_ir as ir

from enginebay.builder.lower.graph import RewriteReport, int_attribute
from enginebay.plugins import ops

DTYPES = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}


def set_cache_layout(graph: ir.Graph, dtype: str, block_size: int) -> RewriteReport:
    """Sets type and block size of `cache` and `cache_out` of every PagedAttention.

    dtype: float32, float16 or bfloat16. The pool's shape is [blocks, 2, block_size, kv_heads, head_dim], or
    [blocks, block_size, width] of latents.
    """
    report = RewriteReport("cache")
    kind = ir.TensorType(DTYPES[dtype])
    for node in graph:
        if node.domain != ops.DOMAIN or node.op_type != ops.PAGED_ATTENTION.name:
            continue
        cache, out = node.inputs[ops.PAGED_ATTENTION.input_index("cache")], node.outputs[1]
        axis = 1 if int_attribute(node, "latent_dim", 0) else 2
        if cache is None or cache.shape is None or len(cache.shape) != 2 * axis + 1:
            report.miss(node, f"has no cache of {2 * axis + 1} dimensions with the block size at {axis}")
            continue
        dims = list(cache.shape)
        dims[axis] = block_size
        for value in (cache, out):
            value.type, value.shape = kind, ir.Shape(dims)
        report.matched += 1
    return report
