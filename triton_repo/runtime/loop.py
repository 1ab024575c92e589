"""The thread that owns the scheduler and the engine: requests in, outputs out."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from enginebay.triton_repo.runtime.admission import check_request
from enginebay.triton_repo.runtime.detokenize import TokenStream
from enginebay.triton_repo.runtime.engine import Engine
from enginebay.triton_repo.runtime.pack import Packer
from enginebay.triton_repo.runtime.plan import Chunk, StepPlan
from enginebay.triton_repo.runtime.request import (
    Output,
    OverloadedError,
    Request,
    RequestError,
    UnavailableError,
)
from enginebay.triton_repo.runtime.sampler import Choice, RowState, sample
from enginebay.triton_repo.runtime.scheduler import Scheduler, SchedulerConfig
from enginebay.triton_repo.runtime.sequence import Sequence as TokenSequence
from enginebay.triton_repo.runtime.stats import Stats
from enginebay.triton_repo.runtime.stream import OutputStream

_log = logging.getLogger(__name__)

Sink = Callable[[Sequence[Output]], None]


class TextDecoder(Protocol):
    """What the loop needs of a tokenizer (`text.TextTokenizer` is one)."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def stream(self) -> TokenStream: ...


@dataclass(frozen=True)
class LoopConfig:
    """`max_waiting` requests may wait beside those that run; more are refused with `OverloadedError`.

    After `max_failed_steps` steps in a row in which every request failed, the loop declares itself unhealthy.
    """

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    max_waiting: int = 1024
    max_failed_steps: int = 3


@dataclass(frozen=True)
class _Submit:
    request: Request
    at: float  # time.perf_counter() of the submission


@dataclass(frozen=True)
class _Cancel:
    request_id: str


_Result = list[Choice] | str  # of one chunk: its choices, or why there are none


@dataclass(frozen=True)
class _Active:
    """A request between its arrival at the loop and its end."""

    sequence: TokenSequence
    stream: OutputStream

    @property
    def cached_tokens(self) -> int:
        return self.sequence.cached_tokens or 0


class EngineLoop:
    """Serves requests until closed. All methods may be called from any thread, `sink` included.

    `sink` receives the outputs of one step together, on the loop's own thread: it must not block. Every
    request that `submit` accepted gets exactly one final Output. If `sink` raises, the loop is unhealthy.
    """

    def __init__(
        self, engine: Engine, decoder: TextDecoder | None, sink: Sink, config: LoopConfig | None = None
    ) -> None:
        self._config = config or LoopConfig()
        self._engine = engine
        self._decoder = decoder
        self._sink = sink
        eos_ids = decoder.eos_ids if decoder is not None else frozenset[int]()
        self._scheduler = Scheduler(engine.limits, self._config.scheduler, eos_ids)
        self._packer = Packer(engine.limits)
        self._active: dict[str, _Active] = {}
        self._failed_steps = 0
        self._totals = Stats(cache_blocks=self._scheduler.pool.usable)  # becomes visible step by step

        self._lock = threading.Lock()  # guards everything below
        self._wake = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._inbox: deque[_Submit | _Cancel] = deque()
        self._live: set[str] = set()  # accepted, final output not yet on its way
        self._delivering = False
        self._stats = self._totals
        self._refused = 0
        self._accepting = True
        self._closing = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="enginebay-loop", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why the loop is unhealthy; None while it serves."""
        return self._failure

    def submit(self, request: Request) -> None:
        """Queues a request; its outputs go to the sink.

        RequestError: it can never be served as asked, or its id is in use. OverloadedError: the waiting queue
        is full. UnavailableError: draining, closed or unhealthy. Where this raises, the sink hears nothing.
        """
        try:
            check_request(request, self._engine.limits, self._scheduler.capacity)
            if request.sampling.stop and self._decoder is None:
                raise RequestError(
                    "stop: this engine has no tokenizer, so it can only stop at stop_token_ids"
                )
            with self._lock:
                self._admit(request)
        except (RequestError, OverloadedError, UnavailableError):
            with self._lock:
                self._refused += 1
            raise

    def cancel(self, request_id: str) -> None:
        """Ends a request soon, with a final Output "cancelled" unless it ends by itself before that.

        Harmless at any time, any number of times, also for ids that are unknown or over.
        """
        with self._lock:
            if request_id in self._live:
                self._inbox.append(_Cancel(request_id))
                self._wake.notify()

    def drain(self, timeout: float | None = None) -> bool:
        """Takes no more requests and waits for those accepted. False if some are left after `timeout` s."""
        with self._lock:
            self._accepting = False
            return self._idle.wait_for(lambda: not self._live and not self._delivering, timeout)

    def close(self) -> None:
        """Cancels what is left and ends the thread. Idempotent. Not to be called from the sink."""
        with self._lock:
            self._accepting = False
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def stats(self) -> Stats:
        """A consistent snapshot, as of the last step."""
        with self._lock:
            stats = self._stats
            return replace(stats, refused=self._refused, waiting=len(self._live) - stats.running)

    def _admit(self, request: Request) -> None:
        """Takes a checked request in. The lock is held."""
        if self._failure is not None:
            raise UnavailableError(f"the engine loop is unhealthy: {self._failure}")
        if not self._accepting:
            raise UnavailableError("the engine loop is draining: it takes no more requests")
        if request.id in self._live:
            raise RequestError(f"id: '{request.id}' is already being served; ids must be unique while in use")
        most = self._scheduler.max_batch + self._config.max_waiting
        if len(self._live) >= most:
            raise OverloadedError(
                f"{len(self._live)} requests are being served or waiting; at most {most} may "
                f"({self._scheduler.max_batch} running, {self._config.max_waiting} waiting): try again later"
            )
        self._live.add(request.id)
        self._inbox.append(_Submit(request, time.perf_counter()))
        self._wake.notify()

    # What follows runs on the loop's thread alone.

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            _log.exception("the engine loop failed")
            self._fail(f"{type(error).__name__}: {error}")

    def _serve(self) -> None:
        while True:
            with self._lock:
                while not (self._inbox or self._closing or self._scheduler.live):
                    self._wake.wait()
                commands = list(self._inbox)
                self._inbox.clear()
                closing = self._closing
            outputs = [output for command in commands for output in self._obey(command)]
            if closing:
                outputs += [self._cancel(active) for active in list(self._active.values())]
                self._deliver(outputs)
                return
            if self._scheduler.live:
                outputs += self._step()
            self._deliver(outputs)
            if self._failed_steps >= self._config.max_failed_steps:
                last = next((output.error for output in reversed(outputs) if output.error), "")
                self._fail(f"every request failed in {self._failed_steps} steps in a row, last with: {last}")
                return

    def _obey(self, command: _Submit | _Cancel) -> list[Output]:
        if isinstance(command, _Cancel):
            active = self._active.get(command.request_id)
            return [self._cancel(active)] if active is not None else []
        request = command.request
        sequence = self._scheduler.add(request)
        seed = request.sampling.seed
        stream = OutputStream(
            request,
            self._decoder.stream() if self._decoder is not None else None,
            sequence.stop_ids,
            secrets.randbits(64) if seed is None else seed,
            command.at,
        )
        self._active[request.id] = _Active(sequence, stream)
        return []

    def _step(self) -> list[Output]:
        began = time.perf_counter()
        plan = self._scheduler.schedule()
        assert plan.chunks, "requests are live but nothing can be computed"
        results = self._compute(plan)
        ended = time.perf_counter()
        outputs = self._commit(plan, results, ended)
        self._failed_steps = self._failed_steps + 1 if all(isinstance(r, str) for r in results) else 0
        self._account(began)
        return outputs

    def _compute(self, plan: StepPlan) -> list[_Result]:
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

    def _run_engine(self, plan: StepPlan) -> list[_Result]:
        inputs = self._packer.pack(plan)
        began = time.perf_counter()
        logits = self._engine.run(inputs)
        self._totals = replace(
            self._totals, engine_seconds=self._totals.engine_seconds + time.perf_counter() - began
        )
        rows = [self._row(chunk) for chunk in plan.chunks for _ in range(chunk.samples)]
        choices = iter(sample(logits, rows))
        return [[next(choices) for _ in range(chunk.samples)] for chunk in plan.chunks]

    def _row(self, chunk: Chunk) -> RowState:
        return self._active[chunk.sequence.id].stream.row

    def _commit(self, plan: StepPlan, results: list[_Result], now: float) -> list[Output]:
        outputs = []
        for chunk, result in zip(plan.chunks, results, strict=True):
            error = _error_of(result)
            if error is not None:
                # What it computed may be what is wrong, so nobody else is to find it in the prefix cache.
                self._scheduler.finish(chunk.sequence, forget=True)
                active = self._active.pop(chunk.sequence.id)
                outputs.append(active.stream.end("error", cached_tokens=active.cached_tokens, error=error))
        sampled = [[c.token for c in result] if isinstance(result, list) else [] for result in results]
        chosen = {
            chunk.sequence.id: result
            for chunk, result in zip(plan.chunks, results, strict=True)
            if isinstance(result, list)
        }
        for event in self._scheduler.commit(plan, sampled):
            active = self._active[event.sequence.id]
            if not active.stream.started:
                active.stream.started = True
                self._totals = replace(
                    self._totals,
                    first_tokens=self._totals.first_tokens + 1,
                    first_token_seconds=self._totals.first_token_seconds + now - active.stream.submitted,
                )
            output = active.stream.take(
                chosen[event.sequence.id][: len(event.tokens)],
                event.finish_reason,
                stopped_by_token=event.stopped_by_token,
                cached_tokens=active.cached_tokens,
            )
            if output is None:
                continue
            outputs.append(output)
            if output.final:
                self._scheduler.finish(event.sequence)  # a stop string ended it, unless the scheduler did
                del self._active[event.sequence.id]
        return outputs

    def _cancel(self, active: _Active) -> Output:
        self._scheduler.finish(active.sequence)
        del self._active[active.sequence.id]
        return active.stream.end("cancelled", cached_tokens=active.cached_tokens)

    def _account(self, began: float) -> None:
        totals, counters = self._totals, self._scheduler.counters
        allocated, used = self._scheduler.slots()
        self._totals = replace(
            totals,
            prefix_lookup_tokens=counters.prefix_lookup_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=counters.preemptions,
            steps=totals.steps + 1,
            step_seconds=totals.step_seconds + time.perf_counter() - began,
            allocated_slots=totals.allocated_slots + allocated,
            used_slots=totals.used_slots + used,
        )

    def _deliver(self, outputs: list[Output]) -> None:
        """Publishes the counters and hands outputs over. A final output's id may be used again at once."""
        reasons = [output.finish_reason for output in outputs if output.final]
        self._totals = replace(
            self._totals,
            ok=self._totals.ok + reasons.count("stop") + reasons.count("length"),
            cancelled=self._totals.cancelled + reasons.count("cancelled"),
            failed=self._totals.failed + reasons.count("error"),
            running=len(self._scheduler.running),
            cache_blocks_used=self._scheduler.pool.held,
        )
        with self._lock:
            self._live.difference_update(output.request_id for output in outputs if output.final)
            self._stats = self._totals
            self._delivering = True
        try:
            if outputs:
                self._sink(outputs)
        finally:
            with self._lock:
                self._delivering = False
                self._idle.notify_all()

    def _fail(self, failure: str) -> None:
        """Declares the loop unhealthy and ends every request with an error."""
        with self._lock:
            self._failure = failure
            self._accepting = False
            self._inbox.clear()
            left = sorted(self._live)
        error = f"the engine loop is unhealthy: {failure}"
        for active in self._active.values():
            self._scheduler.finish(active.sequence, forget=True)
        self._active.clear()
        try:
            self._deliver(
                [Output(request_id=id_, text="", finish_reason="error", error=error) for id_ in left]
            )
        except Exception:
            _log.exception("the sink failed too: the last outputs are lost")


def _error_of(result: _Result) -> str | None:
    if isinstance(result, str):
        return result
    return next((choice.error for choice in result if choice.error is not None), None)
