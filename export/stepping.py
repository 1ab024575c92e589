"""Driving anything that runs ragged steps: blocks, slots and positions of a few sequences, without a
scheduler.

`verify` and the tests use it to ask a model for the logits of chosen tokens in any mixture of prefill,
chunked prefill, prefix sharing and decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


class Limits(Protocol):
    """What a step runner can take. Counts."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_sequence(self) -> int: ...
    @property
    def max_batch(self) -> int: ...
    @property
    def max_step_tokens(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def rope_switch(self) -> int: ...  # ModelSpec.rope_switch


class StepRunner(Protocol):
    """A loaded model with its cache pools; `inputs` has the fields of Step."""

    @property
    def limits(self) -> Limits: ...

    def run(self, inputs: Any, /) -> NDArray[np.float32]:
        """Logits [R, vocab] of the rows in `logits_index`, valid until the next call."""
        ...


@dataclass(frozen=True)
class Step:
    """The arrays of one ragged step, as docs/ARCHITECTURE.md lists them."""

    input_ids: Int32  # [T]
    position_ids: Int32  # [T]
    query_start: Int32  # [B+1]
    kv_len: Int32  # [B]
    block_table: Int32  # [B, W]
    slot_mapping: Int32  # [T]
    logits_index: Int32  # [R]


@dataclass
class Stream:
    """One sequence: its known tokens, how many are in the cache, and the blocks that hold them."""

    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


class Stepper:
    """Allocates blocks and runs steps over streams. Raises ValueError where the pool is too small."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._block_size = runner.limits.block_size
        self._rope_switch = runner.limits.rope_switch
        self._references = [0] * runner.limits.num_blocks

    def share(self, parent: Stream, tokens: Sequence[int]) -> Stream:
        """A stream that reuses the parent's full computed blocks of their common prefix, but at least one
        token less."""
        limit = min(parent.computed, len(tokens) - 1)
        same = next((i for i in range(limit) if parent.tokens[i] != tokens[i]), limit)
        count = same // self._block_size
        blocks = parent.blocks[:count]
        for block in blocks:
            self._references[block] += 1
        return Stream(list(tokens), count * self._block_size, blocks)

    def release(self, stream: Stream) -> None:
        """Gives the blocks back; the stream's tokens must be computed anew."""
        for block in stream.blocks:
            self._references[block] -= 1
        stream.blocks, stream.computed = [], 0

    def step(self, work: Sequence[tuple[Stream, int]]) -> list[NDArray[np.float32]]:
        """Computes the next `count` known tokens of each stream.

        Logits [count, vocab] of every one of them.
        """
        logits = self._runner.run(self.arrays(work)).copy()
        for stream, count in work:
            stream.computed += count
        bounds = np.cumsum([count for _, count in work])[:-1]
        return np.split(logits, bounds)

    def arrays(self, work: Sequence[tuple[Stream, int]], logits: bool = True) -> Step:
        """The arrays of a step; the streams' blocks are grown, their counters are not."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for stream, count in work:
            end = stream.computed + count
            assert count > 0
            assert end <= len(stream.tokens)
            self._grow(stream, end)
            places = range(stream.computed, end)
            shift = self._shift(stream.tokens)
            ids += stream.tokens[stream.computed : end]
            positions += [place + shift for place in places]
            size = self._block_size
            slots += [stream.blocks[place // size] * size + place % size for place in places]
        table = np.zeros((len(work), max(len(stream.blocks) for stream, _ in work)), np.int32)
        for row, (stream, _) in enumerate(work):
            table[row, : len(stream.blocks)] = stream.blocks
        counts = [count for _, count in work]
        return Step(
            input_ids=np.asarray(ids, np.int32),
            position_ids=np.asarray(positions, np.int32),
            query_start=np.cumsum([0, *counts]).astype(np.int32),
            kv_len=np.asarray([stream.computed + count for stream, count in work], np.int32),
            block_table=table,
            slot_mapping=np.asarray(slots, np.int32),
            logits_index=np.arange(len(ids) if logits else 0, dtype=np.int32),
        )

    def _shift(self, tokens: Sequence[int]) -> int:
        """What a stream adds to its position_ids to read the RoPE table of its length."""
        return self._rope_switch if len(tokens) > self._rope_switch else 0

    def _grow(self, stream: Stream, tokens: int) -> None:
        while len(stream.blocks) * self._block_size < tokens:
            try:
                block = self._references.index(0)
            except ValueError:
                raise ValueError(
                    f"all {len(self._references)} blocks of {self._block_size} tokens are in use"
                ) from None
            self._references[block] = 1
            stream.blocks.append(block)
