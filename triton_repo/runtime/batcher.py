"""The in-flight batcher without threads: requests in, one step at a time, outputs out."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from enginebay.triton_repo.runtime.admission import check_request
from enginebay.triton_repo.runtime.detokenize import TokenStream
from enginebay.triton_repo.runtime.engine import Engine
from enginebay.triton_repo.runtime.pack import Packer
from enginebay.triton_repo.runtime.plan import StepPlan
from enginebay.triton_repo.runtime.request import Output, Request, RequestError
from enginebay.triton_repo.runtime.sampler import Choice, sample
from enginebay.triton_repo.runtime.scheduler import Scheduler, SchedulerConfig, TokenEvent
from enginebay.triton_repo.runtime.sequence import Sequence as TokenSequence
from enginebay.triton_repo.runtime.stats import Stats
from enginebay.triton_repo.runtime.stream import OutputStream

_log = logging.getLogger(__name__)


class TextDecoder(Protocol):
    """What the batcher needs of a tokenizer (`text.TextTokenizer` is one)."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def stream(self) -> TokenStream: ...


@dataclass
class BatcherCounters:
    """Running sums; see `Stats`."""

    ok: int = 0
    cancelled: int = 0
    failed: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    engine_seconds: float = 0.0
    first_tokens: int = 0
    first_token_seconds: float = 0.0
    allocated_slots: int = 0
    used_slots: int = 0


@dataclass(frozen=True)
class _Active:
    """A request between its arrival and its end."""

    sequence: TokenSequence
    stream: OutputStream

    @property
    def cached_tokens(self) -> int:
        return self.sequence.cached_tokens or 0


_Choices = list[Choice] | str  # of one chunk; or why there are none


class Batcher:
    """Scheduler, engine, sampler and output streams put together. Not thread-safe.

    Every request that was added ends in exactly one final Output, of `step` or of `cancel`.
    """

    def __init__(self, engine: Engine, decoder: TextDecoder | None, config: SchedulerConfig) -> None:
        self._engine = engine
        self._decoder = decoder
        eos_ids = decoder.eos_ids if decoder is not None else frozenset[int]()
        self.scheduler = Scheduler(engine.limits, config, eos_ids)
        self._packer = Packer(engine.limits)
        self._active: dict[str, _Active] = {}
        self._counters = BatcherCounters()
        self.engine_failures = 0  # steps in a row in which the engine failed for every sequence

    @property
    def live(self) -> int:
        """Requests that are running or waiting."""
        return len(self._active)

    def check(self, request: Request) -> None:
        """RequestError where the request can never be served. Reads nothing that changes: any thread may."""
        check_request(request, self._engine.limits, self.scheduler.capacity)
        if request.sampling.stop and self._decoder is None:
            raise RequestError("stop: this engine has no tokenizer, so it can only stop at stop_token_ids")

    def add(self, request: Request, submitted: float) -> None:
        """Queues a checked request; `submitted` is when it came, by `time.perf_counter`.

        Where this raises, nothing of the request is kept: `refuse` then gives its final output.
        """
        sequence = self.scheduler.add(request)
        seed = request.sampling.seed
        try:
            stream = OutputStream(
                request,
                self._decoder.stream() if self._decoder is not None else None,
                sequence.stop_ids,
                secrets.randbits(64) if seed is None else seed,
                submitted,
            )
        except BaseException:
            self.scheduler.finish(sequence)
            raise
        self._active[request.id] = _Active(sequence, stream)

    def refuse(self, request: Request, error: str) -> Output:
        """The final output of a request that `add` could not take."""
        self._counters.failed += 1
        return Output(request_id=request.id, text="", finish_reason="error", error=error)

    def cancel(self, request_id: str) -> Output | None:
        """Ends a request now. None where it is unknown or over."""
        active = self._active.get(request_id)
        if active is None:
            return None
        self._counters.cancelled += 1
        return self._end(active, active.stream.end("cancelled", cached_tokens=active.cached_tokens))

    def cancel_all(self) -> list[Output]:
        return [output for name in list(self._active) if (output := self.cancel(name)) is not None]

    def fail_all(self, error: str) -> list[Output]:
        """Ends every request with an error."""
        return [self._fail(active, error) for active in list(self._active.values())]

    def step(self) -> list[Output]:
        """Computes one step for the requests that are live, at least one. At most one Output of each."""
        began = time.perf_counter()
        plan = self.scheduler.schedule()
        assert plan.chunks, "requests are live but nothing can be computed"
        if plan.moves:
            self._engine.move(plan.moves)
        results = self._compute(plan)
        outputs = self._commit(plan, results, time.perf_counter())
        failed = all(isinstance(result, str) for result in results)
        self.engine_failures = self.engine_failures + 1 if failed else 0
        allocated, used = self.scheduler.slots()
        counters = self._counters
        counters.allocated_slots += allocated
        counters.used_slots += used
        counters.steps += 1
        counters.step_seconds += time.perf_counter() - began
        return outputs

    def stats(self) -> Stats:
        """The counters now. `refused` is the caller's to know."""
        running = len(self.scheduler.running)
        return Stats(
            **vars(self._counters),
            **vars(self.scheduler.counters),
            running=running,
            waiting=self.live - running,
            cache_blocks=self.scheduler.pool.total,
            cache_blocks_used=self.scheduler.pool.held,
        )

    def _compute(self, plan: StepPlan) -> list[_Choices]:
        """The choices of each chunk. Where the engine fails, each is tried alone, to fail only the culprit.

        Trying again is safe: a step writes the same keys and values into the same slots.
        """
        try:
            return self._run_engine(plan)
        except Exception as error:
            _log.exception("a step of %d sequences failed", len(plan.chunks))
            if len(plan.chunks) == 1:
                return [f"the engine failed: {type(error).__name__}: {error}"]
            return [result for chunk in plan.chunks for result in self._compute(StepPlan((chunk,)))]

    def _run_engine(self, plan: StepPlan) -> list[_Choices]:
        inputs = self._packer.pack(plan)
        began = time.perf_counter()
        logits = self._engine.run(inputs)
        self._counters.engine_seconds += time.perf_counter() - began
        rows = [
            self._active[chunk.sequence.id].stream.row for chunk in plan.chunks for _ in range(chunk.samples)
        ]
        choices = iter(sample(logits, rows))
        return [[next(choices) for _ in range(chunk.samples)] for chunk in plan.chunks]

    def _commit(self, plan: StepPlan, results: Sequence[_Choices], now: float) -> list[Output]:
        outputs = []
        tokens: list[list[int]] = []
        chosen: dict[str, list[Choice]] = {}
        for chunk, result in zip(plan.chunks, results, strict=True):
            error = _error_of(result)
            if error is not None:
                outputs.append(self._fail(self._active[chunk.sequence.id], error))
            choices = [] if isinstance(result, str) else result
            tokens.append([choice.token for choice in choices])
            chosen[chunk.sequence.id] = choices
        for event in self.scheduler.commit(plan, tokens):
            output = self._take(event, chosen[event.sequence.id][: len(event.tokens)], now)
            if output is not None:
                outputs.append(output)
        return outputs

    def _take(self, event: TokenEvent, choices: list[Choice], now: float) -> Output | None:
        active = self._active[event.sequence.id]
        if event.sequence.generated == len(event.tokens):
            self._counters.first_tokens += 1
            self._counters.first_token_seconds += now - active.stream.submitted
        output = active.stream.take(
            choices,
            event.finish_reason,
            stopped_by_token=event.stopped_by_token,
            cached_tokens=active.cached_tokens,
        )
        if output is not None and output.final:
            self._counters.ok += 1
            self._end(active, output)
        return output

    def _fail(self, active: _Active, error: str) -> Output:
        """What it computed may be what is wrong, so nobody else is to find it in the prefix cache."""
        self._counters.failed += 1
        self.scheduler.finish(active.sequence, forget=True)
        return self._end(active, active.stream.end("error", cached_tokens=active.cached_tokens, error=error))

    def _end(self, active: _Active, output: Output) -> Output:
        self.scheduler.finish(active.sequence)
        del self._active[active.sequence.id]
        return output


def _error_of(result: _Choices) -> str | None:
    if isinstance(result, str):
        return result
    return next((choice.error for choice in result if choice.error is not None), None)
