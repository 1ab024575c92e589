"""A loop to drive in tests: scripted engines, a decoder of letters, and what must hold when it closes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from fakes import LIMITS, Collector, HashEngine

from enginebay.triton_repo.runtime.detokenize import TokenStream
from enginebay.triton_repo.runtime.engine import StepInputs
from enginebay.triton_repo.runtime.loop import EngineLoop, LoopConfig
from enginebay.triton_repo.runtime.request import (
    Output,
    Request,
    SamplingParams,
)


class Letters:
    """A decoder whose token t is the character with that code, and `eos_ids` end a sequence."""

    def __init__(self, eos_ids: Sequence[int] = ()) -> None:
        self.eos_ids = frozenset(eos_ids)

    def stream(self) -> TokenStream:
        return LetterStream()


class LetterStream:
    def push(self, token: int) -> str:
        return chr(token)

    def flush(self) -> str:
        return ""


class Script:
    """An engine that says given tokens, the n-th after n known ones, whatever the prompt."""

    def __init__(self, tokens: Sequence[int], prompt: int = 1) -> None:
        self.limits = LIMITS
        self._tokens, self._prompt = tokens, prompt

    def run(self, inputs: StepInputs) -> np.ndarray:
        logits = np.zeros((len(inputs.logits_index), LIMITS.vocab_size), np.float32)
        for row, index in enumerate(inputs.logits_index):
            logits[row, self._tokens[inputs.position_ids[index] + 1 - self._prompt]] = 1
        return logits


def make(name: str, prompt: Sequence[int] = (1,), tokens: int = 8, **fields: object) -> Request:
    return Request(name, tuple(prompt), SamplingParams(max_tokens=tokens, **fields))


class Served:
    """A loop with a collector, closed at the end of the block, which must leave nothing behind."""

    def __init__(
        self, engine: object = None, decoder: object = None, config: LoopConfig | None = None
    ) -> None:
        self.engine = engine or HashEngine()
        self.sink = Collector()
        self.loop = EngineLoop(self.engine, decoder, self.sink, config)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.close()
        assert self.loop._batcher.scheduler.pool.held == 0
        assert not self.loop._batcher._active
        stats = self.loop.stats()
        assert (stats.running, stats.waiting, stats.cache_blocks_used) == (0, 0, 0)


def say(script: str, request: Request, **decoder: Sequence[int]) -> tuple[str, Output, Collector]:
    """The text and the final output of a request whose model says `script`."""
    with Served(Script([ord(c) for c in script]), Letters(**decoder)) as served:
        served.loop.submit(request)
        final = served.sink.final(request.id)
        return served.sink.text(request.id), final, served.sink
