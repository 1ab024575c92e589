"""What a step computes, decided by the scheduler and read by everything after it."""

from __future__ import annotations

from dataclasses import dataclass

from enginebay.triton_repo.runtime.engine import Int32, Move
from enginebay.triton_repo.runtime.sequence import Sequence


@dataclass(frozen=True, eq=False)
class Chunk:
    """The tokens one sequence computes in one step.

    The last `samples` rows want logits: 0 while tokens remain to be computed after the chunk, 1 for plain
    decoding, 1 + k where k of the tokens are drafts to verify.
    """

    sequence: Sequence
    start: int  # position of the first token
    tokens: Int32  # [count]
    blocks: Int32  # [n] block ids that hold the positions up to start + count
    samples: int
    position_shift: int = 0  # added to the position ids, not to the slots

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class StepPlan:
    """One step: at most one chunk of each sequence, and the cache blocks to convert before it runs."""

    chunks: tuple[Chunk, ...]
    moves: tuple[Move, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def samples(self) -> int:
        return sum(chunk.samples for chunk in self.chunks)
