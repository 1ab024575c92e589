"""A model small enough to reason about: the next token is a hash of what the paged cache shows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from enginebay.triton_repo.runtime.engine import EngineLimits, Move, StepInputs
from enginebay.triton_repo.runtime.request import Output

LIMITS = EngineLimits(
    vocab_size=128, max_sequence=128, max_batch=8, max_step_tokens=64, block_size=16, num_blocks=64
)


class HashEngine:
    """Keeps (token, position) in cache slots, as an attention layer keeps keys and values.

    The logits of a row are a function of every (token, position) that its sequence's block table shows up to
    the row's own position, in order. A wrong block, slot, position or token anywhere changes every later
    logit. Slots that were never written hold poison.
    """

    def __init__(self, limits: EngineLimits = LIMITS) -> None:
        self.limits = limits
        self._blocks = limits.num_blocks + sum(tier.num_blocks for tier in limits.tiers)
        slots = self._blocks * limits.block_size
        self.cache = np.full((slots, 2), -7, np.int64)
        self.steps = self.moved = 0
        self.before_step: Callable[[StepInputs], None] = lambda inputs: None

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        self.before_step(inputs)
        self._validate(inputs)
        self.steps += 1
        written = inputs.slot_mapping
        self.cache[written, 0] = inputs.input_ids
        self.cache[written, 1] = inputs.position_ids
        logits = np.empty((len(inputs.logits_index), self.limits.vocab_size), np.float32)
        for index, row in enumerate(inputs.logits_index):
            logits[index] = self._row(inputs, int(row))
        return logits

    def move(self, moves: Sequence[Move]) -> None:
        blocks = self.cache.reshape(self._blocks, self.limits.block_size, 2)
        for source, destination in moves:
            assert self.limits.num_blocks <= destination
            assert source < destination
            blocks[destination] = blocks[source]
            self.moved += 1

    def _validate(self, inputs: StepInputs) -> None:
        limits = self.limits
        for array in vars(inputs).values():
            assert array.dtype == np.int32
        total, batch = len(inputs.input_ids), len(inputs.kv_len)
        assert 0 < total <= limits.max_step_tokens
        assert 0 < batch <= limits.max_batch
        assert len(inputs.query_start) == batch + 1
        assert inputs.query_start[0] == 0
        assert inputs.query_start[-1] == total
        assert np.all(np.diff(inputs.query_start) > 0)
        assert len(set(inputs.slot_mapping.tolist())) == total, "two tokens write one slot"
        assert inputs.block_table.min() >= 0
        assert inputs.block_table.max() < self._blocks
        assert inputs.slot_mapping.max() < limits.num_blocks * limits.block_size
        assert np.all(inputs.kv_len <= limits.max_sequence)
        if limits.rope_switch:  # a sequence computes all its tokens with one table, the one for its length
            long = inputs.position_ids[inputs.query_start[:-1]] >= limits.rope_switch
            assert np.all(long >= (inputs.kv_len > limits.rope_switch))

    def _row(self, inputs: StepInputs, row: int) -> NDArray[np.float32]:
        sequence = int(np.searchsorted(inputs.query_start, row, side="right")) - 1
        switch = self.limits.rope_switch
        shift = switch if switch and inputs.position_ids[row] >= switch else 0
        seen = int(inputs.position_ids[row]) + 1 - shift
        last = int(inputs.query_start[sequence + 1]) - 1
        assert inputs.kv_len[sequence] == inputs.position_ids[last] + 1 - shift
        positions = np.arange(seen)
        size = self.limits.block_size
        slots = inputs.block_table[sequence, positions // size].astype(np.int64) * size + positions % size
        tokens, places = self.cache[slots, 0], self.cache[slots, 1]
        assert np.array_equal(places, positions + shift), (
            "the cache holds other positions than the table says"
        )
        return logits_of(tokens.tolist(), self.limits.vocab_size)


def logits_of(tokens: Sequence[int], vocab_size: int) -> NDArray[np.float32]:
    """[V] logits after these tokens; a fresh random-looking row for each history."""
    state = 1469598103934665603
    for token in tokens:
        state = ((state ^ (token + 1)) * 1099511628211) % 2**64
    return np.random.default_rng(state).normal(0, 2, vocab_size).astype(np.float32)


def greedy_tokens(prompt: Sequence[int], count: int, vocab_size: int = LIMITS.vocab_size) -> list[int]:
    """What greedy decoding must give, computed without any cache."""
    known = list(prompt)
    for _ in range(count):
        known.append(int(logits_of(known, vocab_size).argmax()))
    return known[len(prompt) :]


class Collector:
    """A sink that keeps everything and can be waited on."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.outputs: list[Output] = []
        self.deliveries: list[list[Output]] = []

    def __call__(self, outputs: Sequence[Output]) -> None:
        with self._changed:
            self.deliveries.append(list(outputs))
            self.outputs.extend(outputs)
            self._changed.notify_all()

    def of(self, request_id: str) -> list[Output]:
        return [output for output in self.outputs if output.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.of(request_id) for token in output.token_ids]

    def text(self, request_id: str) -> str:
        return "".join(output.text for output in self.of(request_id))

    def final(self, request_id: str, timeout: float = 20.0) -> Output:
        with self._changed:
            done = self._changed.wait_for(lambda: any(o.final for o in self.of(request_id)), timeout)
        assert done, f"no final output of {request_id} within {timeout} s"
        finals = [output for output in self.of(request_id) if output.final]
        assert len(finals) == 1
        assert self.of(request_id)[-1] is finals[0], "something came after the final output"
        return finals[0]
