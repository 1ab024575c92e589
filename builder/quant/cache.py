"""Formats of the key/value cache: a registry of frozen configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from enginebay.builder.quant.formats import QuantizationError
from enginebay.plugins import ops

AUTO = "auto"


@dataclass(frozen=True)
class CacheFormat:
    """How a cache holds keys and values.

    name      what --kv-cache says
    dtype     as the manifest names it; the pool's elements, but int4's are bytes of two codes
    element   of the pool in the graph
    constants PagedAttention's input that calibration finds, a number for each channel of a head: cache_scales
              of 8 bits, cache_offsets of int4; "": none
    largest   code, where there are scales
    headroom  how many times the largest value that calibration saw a scale reaches, at least
    colder    formats that blocks take as they age
    choices   scales from there on, over `octaves`, to choose from by the squares of what rounding changes
    """

    name: str
    summary: str
    dtype: str
    element: ir.DataType
    constants: Literal["", "cache_scales", "cache_offsets"] = ""
    largest: float = 0.0
    headroom: float = 1.0
    choices: int = 1
    octaves: float = 1.0
    colder: tuple[str, ...] = ()

    @property
    def tiers(self) -> tuple[CacheFormat, ...]:
        """Formats of the colder pools."""
        return tuple(CACHES[name] for name in self.colder)

    @property
    def calibrated(self) -> CacheFormat:
        """The format whose constants the engine needs: its own, or those of the one that blocks age to."""
        return self.tiers[0] if self.colder else self

    def block_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a block in elements of the pool; `shape` is that of its values.

        QuantizationError where the format cannot hold such a block.
        """
        for tier in self.tiers:
            tier.block_shape(shape)
        if len(shape) != 4 and self.constants:
            raise QuantizationError(
                f"kv cache {self.name}: this model caches latents, which are kept in floats: "
                "choose fp16, bf16 or fp32"
            )
        if self.dtype != "int4":
            return shape
        try:
            return (*shape[:-1], ops.int4_cache_row_bytes(shape[-1]))
        except ValueError as error:
            raise QuantizationError(f"kv cache {self.name}: {error}") from None

    def constant_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of a layer's constants, [2, Hkv, D] or []; `shape` is that of a block's values."""
        return (shape[0], *shape[2:]) if self.constants else ()


CACHES: dict[str, CacheFormat] = {
    cache.name: cache
    for cache in (
        CacheFormat("fp32", "float32", "float32", ir.DataType.FLOAT),
        CacheFormat("fp16", "float16", "float16", ir.DataType.FLOAT16),
        CacheFormat("bf16", "bfloat16", "bfloat16", ir.DataType.BFLOAT16),
        CacheFormat(
            *("int8", "int8, a calibrated scale for each channel of a head", "int8", ir.DataType.INT8),
            constants="cache_scales",
            largest=127.0,
            headroom=1.05,
            choices=16,
            octaves=1 / 3,
        ),
        CacheFormat(
            *("fp8", "E4M3, a calibrated scale for each channel of a head", "float8e4m3fn"),
            ir.DataType.FLOAT8E4M3FN,
            constants="cache_scales",
            largest=448.0,
            headroom=2.0,
            choices=16,
        ),
        CacheFormat(
            "int4",
            f"int4, a scale and a minimum for {ops.INT4_CACHE_GROUP} values of a token's head",
            "int4",
            ir.DataType.UINT8,
            constants="cache_offsets",
        ),
        CacheFormat(
            "tiers",
            "float16 for the newest tokens, then int8, then int4",
            "float16",
            ir.DataType.FLOAT16,
            colder=("int8", "int4"),
        ),
    )
}


def find_cache(name: str, default: str) -> CacheFormat:
    """The format called `name`, or `default` for auto; QuantizationError listing what there is otherwise."""
    chosen = default if name == AUTO else name
    if chosen not in CACHES:
        raise QuantizationError(f"kv cache '{chosen}' is unknown; there are {AUTO}, {', '.join(CACHES)}")
    return CACHES[chosen]
