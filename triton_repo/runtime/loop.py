"""The thread that owns a batcher: requests come in from any thread, outputs go to one sink."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from enginebay.triton_repo.runtime.batcher import Batcher, TextDecoder
from enginebay.triton_repo.runtime.engine import Engine
from enginebay.triton_repo.runtime.request import (
    Output,
    OverloadedError,
    Request,
    RequestError,
    UnavailableError,
)
from enginebay.triton_repo.runtime.scheduler import SchedulerConfig
from enginebay.triton_repo.runtime.stats import Stats

_log = logging.getLogger(__name__)

Sink = Callable[[Sequence[Output]], None]


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


class EngineLoop:
    """Serves requests until closed. Any thread may call any method; `close` alone not from the sink.

    `sink` receives the outputs of one step together, on the loop's own thread: it must not block. Every
    request that `submit` accepted gets exactly one final Output. If `sink` raises, the loop is unhealthy.
    """

    def __init__(
        self, engine: Engine, decoder: TextDecoder | None, sink: Sink, config: LoopConfig | None = None
    ) -> None:
        self._config = config or LoopConfig()
        self._batcher = Batcher(engine, decoder, self._config.scheduler)
        self._sink = sink
        self._max_running = self._batcher.scheduler.max_batch

        self._lock = threading.Lock()  # guards everything below
        self._wake = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._inbox: deque[_Submit | _Cancel] = deque()
        self._live: set[str] = set()  # accepted, final output not yet on its way
        self._delivering = False
        self._stats = self._batcher.stats()
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
            self._batcher.check(request)
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
        """Cancels what is left and ends the thread. Idempotent."""
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
        most = self._max_running + self._config.max_waiting
        if len(self._live) >= most:
            raise OverloadedError(
                f"{len(self._live)} requests are being served or waiting; at most {most} may "
                f"({self._max_running} running, {self._config.max_waiting} waiting): try again later"
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
        batcher = self._batcher
        while True:
            with self._lock:
                while not (self._inbox or self._closing or batcher.live):
                    self._wake.wait()
                commands = list(self._inbox)
                self._inbox.clear()
                closing = self._closing
            outputs = self._obey(commands)
            if closing:
                self._deliver(outputs + batcher.cancel_all())
                return
            if batcher.live:
                outputs += batcher.step()
            self._deliver(outputs)
            if batcher.engine_failures >= self._config.max_failed_steps:
                last = next((output.error for output in reversed(outputs) if output.error), "")
                self._fail(
                    f"every request failed in {batcher.engine_failures} steps in a row, last with: {last}"
                )
                return

    def _obey(self, commands: Sequence[_Submit | _Cancel]) -> list[Output]:
        outputs = []
        for command in commands:
            if isinstance(command, _Submit):
                try:
                    self._batcher.add(command.request, command.at)
                except Exception as error:  # one odd request must not end the others
                    _log.exception("request %r could not be taken", command.request.id)
                    outputs.append(self._batcher.refuse(command.request, f"{type(error).__name__}: {error}"))
            elif (output := self._batcher.cancel(command.request_id)) is not None:
                outputs.append(output)
        return outputs

    def _deliver(self, outputs: Sequence[Output]) -> None:
        """Publishes the counters and hands outputs over. A final output's id may be used again at once."""
        with self._lock:
            self._live.difference_update(output.request_id for output in outputs if output.final)
            self._stats = self._batcher.stats()
            self._delivering = True
        try:
            if outputs:
                self._sink(outputs)
        finally:
            with self._lock:
                self._delivering = False
                if not self._live:
                    self._idle.notify_all()

    def _fail(self, failure: str) -> None:
        """Declares the loop unhealthy and ends every request with an error."""
        with self._lock:
            self._failure = failure
            self._accepting = False
            self._inbox.clear()
            left = set(self._live)
        error = f"the engine loop is unhealthy: {failure}"
        try:
            outputs = self._batcher.fail_all(error)
            left.difference_update(output.request_id for output in outputs)
            outputs += [
                Output(request_id=name, text="", finish_reason="error", error=error) for name in sorted(left)
            ]
            self._deliver(outputs)
        except Exception:
            _log.exception("the last outputs are lost: %s", sorted(left))
