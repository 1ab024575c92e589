"""The scales that a checkpoint brings for an FP8 cache: stored key or value = value / scale."""

from __future__ import annotations

import re

from enginebay.export.checkpoint import Checkpoint
from enginebay.export.errors import CheckpointError
from enginebay.export.fp8 import read_array, to_floats
from enginebay.export.packed import check_scales
from enginebay.export.spec import Attention, CacheScales, ModelSpec

# As vLLM, compressed-tensors and ModelOpt name them; kv_scale is of both.
_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.(?:attn\.|[kv]_proj\.)?(k|v|kv)_scale$")


def read_cache_scales(
    checkpoint: Checkpoint, spec: ModelSpec
) -> tuple[tuple[CacheScales, ...], tuple[str, ...]]:
    """The scales of every layer that has any, in order, and the names of their tensors.

    CheckpointError naming the tensor for a scale that is 0, negative or not finite, a layer that is none, a
    count that is neither 1 nor the layer's key/value heads, and keys' scales without values'.
    """
    found: dict[int, dict[str, tuple[float, ...]]] = {}
    names = []
    for name in sorted(checkpoint.tensors):
        match = _NAME.search(name)
        if match is None:
            continue
        names.append(name)
        layer, part = int(match[1]), match[2]
        if layer >= len(spec.layers):
            raise CheckpointError(f"'{name}' is of layer {layer}, the model has {len(spec.layers)}")
        scales = to_floats(read_array(checkpoint.tensors[name])).reshape(-1)
        check_scales(scales, name)
        attention = spec.layers[layer].attention
        heads = attention.num_kv_heads if isinstance(attention, Attention) else 1
        if len(scales) not in (1, heads):
            raise CheckpointError(
                f"'{name}' has {len(scales)} scales; expected one, or one for each of {heads} heads"
            )
        for each in part:
            found.setdefault(layer, {})[each] = tuple(scales.tolist())
    for layer, parts in found.items():
        if len(parts) == 1:
            (has,) = parts
            raise CheckpointError(
                f"layer {layer} has a {has}_scale for its cache and no {'v' if has == 'k' else 'k'}_scale"
            )
    return tuple(CacheScales(at, found[at]["k"], found[at]["v"]) for at in sorted(found)), tuple(names)
