"""A step plan as the arrays that the engine takes."""

from __future__ import annotations

import numpy as np

from enginebay.triton_repo.runtime.engine import EngineLimits, Int32, StepInputs
from enginebay.triton_repo.runtime.plan import StepPlan


class Packer:
    """Fills the same buffers step after step. The arrays of one call are valid until the next."""

    def __init__(self, limits: EngineLimits) -> None:
        self._block_size = limits.block_size
        tokens, batch = limits.max_step_tokens, limits.max_batch
        self._input_ids: Int32 = np.zeros(tokens, np.int32)
        self._query_start: Int32 = np.zeros(batch + 1, np.int32)
        self._arange: Int32 = np.arange(tokens, dtype=np.int32)

    def pack(self, plan: StepPlan) -> StepInputs:
        """The arrays of a plan with at least one chunk, as docs/ARCHITECTURE.md lists them."""
        chunks = plan.chunks
        batch = len(chunks)
        counts = np.fromiter((len(chunk.tokens) for chunk in chunks), np.int32, batch)
        starts = np.fromiter((chunk.start for chunk in chunks), np.int32, batch)
        samples = np.fromiter((chunk.samples for chunk in chunks), np.int32, batch)
        query_start = self._query_start[: batch + 1]
        np.cumsum(counts, out=query_start[1:])
        total = int(query_start[batch])

        input_ids = self._input_ids[:total]
        np.concatenate([chunk.tokens for chunk in chunks], out=input_ids)
        block_table: Int32 = np.zeros((batch, max(len(chunk.blocks) for chunk in chunks)), np.int32)
        for row, chunk in zip(block_table, chunks, strict=True):
            row[: len(chunk.blocks)] = chunk.blocks

        token = self._arange[:total]
        rows = np.repeat(self._arange[:batch], counts)  # [T] which sequence a token belongs to
        position_ids: Int32 = token + (starts - query_start[:-1])[rows]
        block, offset = np.divmod(position_ids, np.int32(self._block_size))
        slot_mapping: Int32 = block_table[rows, block] * np.int32(self._block_size) + offset
        if any(chunk.position_shift for chunk in chunks):
            position_ids += np.array([chunk.position_shift for chunk in chunks], np.int32)[rows]

        # A token's row is wanted where it is among the last `samples` of its chunk.
        wanted = token >= (query_start[1:] - samples)[rows]
        return StepInputs(
            input_ids=input_ids,
            position_ids=position_ids,
            query_start=query_start,
            kv_len=starts + counts,
            block_table=block_table,
            slot_mapping=slot_mapping,
            logits_index=token[wanted],
        )
