"""The seam between the batcher and a model: arrays of one step in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Move = tuple[int, int]  # of a cache block: from and to, block ids of different pools


@dataclass(frozen=True)
class Tier:
    """A colder cache pool: `num_blocks` of it, for blocks whose tokens all have `age` newer ones at least."""

    num_blocks: int
    age: int


@dataclass(frozen=True)
class EngineLimits:
    """What the engine was built for. All counts; `num_blocks` of `block_size` tokens form a layer's pool."""

    vocab_size: int
    max_sequence: int  # tokens of prompt and output together
    max_batch: int  # sequences of a step
    max_step_tokens: int  # tokens of a step
    block_size: int
    num_blocks: int
    # Where not 0: a sequence that knows more tokens than this reads another RoPE table, by positions shifted
    # by this much, and what it computed before is of no use to it.
    rope_switch: int = 0
    tiers: tuple[Tier, ...] = ()  # pools behind that one, ages ascending; block ids count on through them


@dataclass(frozen=True)
class StepInputs:
    """One ragged step, as docs/ARCHITECTURE.md lists it. One cache group for now."""

    input_ids: Int32  # [T]
    position_ids: Int32  # [T]
    query_start: Int32  # [B+1]
    kv_len: Int32  # [B]
    block_table: Int32  # [B, W]
    slot_mapping: Int32  # [T]
    logits_index: Int32  # [R]


class Engine(Protocol):
    """A loaded model with its cache pools."""

    @property
    def limits(self) -> EngineLimits: ...

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        """Logits [R, vocab] of the rows in `logits_index`. Writes this step's keys and values into the
        pools. The array is valid until the next call."""
        ...

    def move(self, moves: Sequence[Move]) -> None:
        """Converts cache blocks to other pools, one move after the other. Only with `limits.tiers`."""
        ...
