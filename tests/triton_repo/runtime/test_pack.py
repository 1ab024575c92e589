"""Plans as arrays, against a plain loop."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from fakes import LIMITS
from hypothesis import given, settings
from hypothesis import strategies as st

from enginebay.triton_repo.runtime.kv_manager import Namespace
from enginebay.triton_repo.runtime.pack import Packer
from enginebay.triton_repo.runtime.plan import Chunk, StepPlan
from enginebay.triton_repo.runtime.request import Request
from enginebay.triton_repo.runtime.sequence import Sequence

SEQUENCE = Sequence(
    Request("r", (1,)),
    max_new_tokens=1,
    arrival=0,
    rank=0,
    stop_ids=frozenset(),
    namespace=Namespace(),
    limits=LIMITS,
)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), batch=st.integers(1, 8), size=st.sampled_from([1, 4, 16]))
def test_arrays_equal_a_plain_loop(data: st.DataObject, batch: int, size: int) -> None:
    packer = Packer(replace(LIMITS, block_size=size))
    for _ in range(2):  # the buffers are used again
        chunks = []
        for _ in range(batch):
            start, count = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 8))
            blocks = -(-(start + count) // size) + data.draw(st.integers(0, 2))
            chunks.append(
                Chunk(
                    SEQUENCE,
                    start,
                    np.array(
                        data.draw(st.lists(st.integers(0, 127), min_size=count, max_size=count)), np.int32
                    ),
                    np.array(
                        data.draw(st.lists(st.integers(0, 63), min_size=blocks, max_size=blocks)), np.int32
                    ),
                    data.draw(st.integers(0, count)),
                )
            )
        inputs = packer.pack(StepPlan(tuple(chunks)))
        row = 0
        ids, positions, slots, wanted = [], [], [], []
        for index, chunk in enumerate(chunks):
            assert inputs.query_start[index] == row
            assert inputs.kv_len[index] == chunk.end
            assert inputs.block_table[index, : len(chunk.blocks)].tolist() == chunk.blocks.tolist()
            assert not inputs.block_table[index, len(chunk.blocks) :].any()
            for offset, token in enumerate(chunk.tokens):
                position = chunk.start + offset
                ids.append(token)
                positions.append(position)
                slots.append(chunk.blocks[position // size] * size + position % size)
                if offset >= len(chunk.tokens) - chunk.samples:
                    wanted.append(row)
                row += 1
        assert inputs.query_start[-1] == row
        assert inputs.input_ids.tolist() == ids
        assert inputs.position_ids.tolist() == positions
        assert inputs.slot_mapping.tolist() == slots
        assert inputs.logits_index.tolist() == wanted
        assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in vars(inputs).values())
