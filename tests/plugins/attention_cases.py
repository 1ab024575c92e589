"""Random PagedAttention steps: sequences of any mix over a shuffled, poisoned block pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginebay.plugins import ops


@dataclass(frozen=True)
class Heads:
    """The static half of a PagedAttention: its attributes and constant inputs."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    rotary_dim: int = 32
    positions: int = 4096
    qk_norm: bool = False
    sinks: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)

    def constants(self, rng: np.random.Generator) -> dict[str, NDArray[np.float32]]:
        constants: dict[str, NDArray[np.float32]] = {}
        if self.rotary_dim:
            half = self.rotary_dim // 2
            angles = np.arange(self.positions)[:, None] / 10000.0 ** (np.arange(half) / half)
            constants["rope_cos"] = np.cos(angles).astype(np.float32)
            constants["rope_sin"] = np.sin(angles).astype(np.float32)
        if self.qk_norm:
            constants["q_norm"] = rng.uniform(0.5, 1.5, self.head_dim).astype(np.float32)
            constants["k_norm"] = rng.uniform(0.5, 1.5, self.head_dim).astype(np.float32)
        if self.sinks:
            constants["sinks"] = rng.normal(size=self.num_heads).astype(np.float32)
        return constants

    def keywords(self) -> dict[str, Any]:
        return {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "scale": self.head_dim**-0.5,
            **self.attributes,
        }


class Pool:
    """A cache and each sequence's blocks; unwritten slots are NaN, spare table entries out of range."""

    def __init__(
        self,
        heads: Heads,
        rng: np.random.Generator,
        *,
        block_size: int,
        dtype: Any = np.float32,
        blocks: int = 64,
    ) -> None:
        self.heads, self.rng, self.block_size = heads, rng, block_size
        int4 = np.dtype(dtype) == np.uint8
        row = ops.int4_cache_row_bytes(heads.head_dim) if int4 else heads.head_dim
        shape = (blocks, 2, block_size, heads.num_kv_heads, row)
        nothing = {"int8": 101, "uint8": 0x7E}.get(np.dtype(dtype).name, np.nan)  # 0x7e7e: a NaN of fp16
        self.cache = np.full(shape, nothing, np.float32).astype(dtype)
        self.free = list(rng.permutation(blocks))

    def table(self, lengths: list[int], width: int) -> NDArray[np.int32]:
        """Fresh blocks for sequences that will grow to `lengths` tokens."""
        table = np.full((len(lengths), width), 2**31 - 1, np.int32)
        for row, length in zip(table, lengths, strict=True):
            for i in range(-(-length // self.block_size)):
                row[i] = self.free.pop()
        return table


def step(
    qkv: list[NDArray[np.float32]],
    starts: list[int],
    table: NDArray[np.int32],
    block_size: int,
    padding: int = 0,
) -> dict[str, NDArray[Any]]:
    """Inputs of one step: sequence b brings the rows qkv[b], at cache positions from starts[b] on.

    A sequence without rows and start 0 is padding. `padding` rows of nonsense follow.
    """
    rows = np.concatenate([*qkv, np.full((padding, qkv[0].shape[1]), np.nan, np.float32)])
    counts = [len(part) for part in qkv]
    positions = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    slots = [
        table[b, where // block_size] * np.int64(block_size) + where % block_size
        for b, where in enumerate(positions)
    ]
    nonsense = np.full(padding, -(2**31), np.int64)
    return {
        "qkv": rows,
        "query_start": np.cumsum([0, *counts]).astype(np.int32),
        "kv_len": np.array([s + c for s, c in zip(starts, counts, strict=True)], np.int32),
        "block_table": table,
        "slot_mapping": np.concatenate([*slots, nonsense]).astype(np.int32),
        "position_ids": np.concatenate([*positions, nonsense]).astype(np.int32),
    }


def rows_of(rng: np.random.Generator, heads: Heads, count: int) -> NDArray[np.float32]:
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    return rng.normal(size=(count, width)).astype(np.float32)
