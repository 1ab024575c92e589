"""What the manifest says of the key/value cache, compared with the heads of the model it is for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from enginebay.plugins import ops

# Of an element of a cache pool. int4: a block's rows are bytes, two codes each, then scales and minimums.
CACHE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8e4m3fn": 1, "int4": 1}
COLDER = ("int8", "int4")  # of the pools behind the first, in order
COUNT_MAX = 2**31 - 1  # kernels count in int32
_CALIBRATED = ("int8", "float8e4m3fn", "int4")


def count_fault(key: str, value: object, least: int = 1) -> Iterator[str]:
    """A line where `value` is no count that a kernel can work with."""
    if type(value) is not int or not least <= value <= COUNT_MAX:
        yield f"{key}: {value!r} is out of range; it must be between {least} and {COUNT_MAX}"


@dataclass(frozen=True)
class TierRecord:
    """A colder pool of each layer, [blocks, *block_shape] of `dtype`, for blocks whose tokens all have `age`
    newer ones at least."""

    dtype: str
    age: int
    block_shape: tuple[int, ...]


@dataclass(frozen=True)
class CacheGroupRecord:
    """Layers whose caches share a block table; the pool of each is [blocks, *block_shape] of `dtype`.

    `constant_shape`: of what calibration found for each layer, scales or for int4 offsets, which the graph
    holds; [] where there is none. `tiers`: pools behind that one, by age; the scales of an int8 one are in
    cache_scales.npz too, by the cache's name.
    """

    kind: str
    layers: tuple[int, ...]
    dtype: str
    block_size: int
    block_shape: tuple[int, ...]
    constant_shape: tuple[int, ...]
    tiers: tuple[TierRecord, ...] = ()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the group; with tiers, of the first pool."""
        return self.pool_bytes[0]

    @property
    def pools(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """dtype and block shape of each pool of a layer."""
        return ((self.dtype, self.block_shape), *((tier.dtype, tier.block_shape) for tier in self.tiers))

    @property
    def pool_bytes(self) -> tuple[int, ...]:
        """`block_bytes` of each pool."""
        return tuple(len(self.layers) * math.prod(shape) * CACHE_BYTES[dtype] for dtype, shape in self.pools)

    def faults(self, key: str, model: Mapping[str, Any]) -> Iterator[str]:
        """What no group can have; `key` is the group's own in the manifest, `model` the ModelSpec's group.

        Later lines take what earlier ones say for granted: only the first is worth reading.
        """
        for at, (dtype, _) in enumerate(self.pools):
            where = f"{key}.dtype" if at == 0 else f"{key}.tiers[{at - 1}].dtype"
            if dtype not in CACHE_BYTES:
                yield f"{where}: {dtype!r} is none of {', '.join(CACHE_BYTES)}"
        if not self.layers:
            yield f"{key}.layers: empty"
        elif min(self.layers) < 0:
            yield f"{key}.layers: {min(self.layers)} is no layer"
        yield from count_fault(f"{key}.block_size", self.block_size)
        if self.kind not in ("paged", "latent"):
            yield f"{key}.kind: {self.kind!r} is none of paged, latent"
        if (self.kind, list(self.layers)) != (model.get("kind"), model.get("layers")):
            yield (
                f"{key}: {self.kind} layers {list(self.layers)}, but the model has {model.get('kind')!r} "
                f"layers {model.get('layers')}"
            )
        heads, dim = model.get("kv_heads"), model.get("head_dim")
        for name, value in (("kv_heads", heads), ("head_dim", dim)):
            yield from count_fault(f"model.{key}.{name}", value)
        assert isinstance(heads, int)
        assert isinstance(dim, int)
        yield from self._shape_faults(key, heads, dim)
        yield from self._tier_faults(key)

    def _shape_faults(self, key: str, heads: int, dim: int) -> Iterator[str]:
        what = f"{heads} heads of {dim}" if self.kind == "paged" else f"latents of {dim}"
        for at, (dtype, shape) in enumerate(self.pools):
            where = f"{key}.block_shape" if at == 0 else f"{key}.tiers[{at - 1}].block_shape"
            try:
                row = ops.int4_cache_row_bytes(dim) if dtype == "int4" else dim
            except ValueError as error:
                yield f"{where}: {error}"
                return
            paged = self.kind == "paged"
            expected = (2, self.block_size, heads, row) if paged else (self.block_size, row)
            if shape != expected:
                yield (
                    f"{where}: {list(shape)}, but a {self.kind} {dtype} block of {self.block_size} tokens, "
                    f"{what}, is {list(expected)}"
                )
        needed = self.kind == "paged" and any(dtype in _CALIBRATED for dtype, _ in self.pools)
        allowed = ((2, heads), (2, heads, dim)) if needed else ((),)
        if self.constant_shape not in allowed:
            yield (
                f"{key}.constant_shape: {list(self.constant_shape)}, but a {self.dtype} cache of {what} "
                "takes " + " or ".join(str(list(shape)) for shape in allowed)
            )

    def _tier_faults(self, key: str) -> Iterator[str]:
        dtypes = tuple(tier.dtype for tier in self.tiers)
        if dtypes not in ((), COLDER):
            yield f"{key}.tiers: {', '.join(dtypes)}; there are none, or {' and '.join(COLDER)}"
        if dtypes and (self.kind != "paged" or self.dtype in _CALIBRATED):
            yield f"{key}.tiers: behind a {self.kind} {self.dtype} cache; only paged floats have tiers"
        youngest = 1
        for at, tier in enumerate(self.tiers):
            where = f"{key}.tiers[{at}].age"
            yield from count_fault(where, tier.age)
            if tier.age < youngest:
                yield f"{where}: {tier.age} is less than {youngest}; ages ascend"
            youngest = tier.age + 1
