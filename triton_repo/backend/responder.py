"""Responses out: one thread sends what the engine loop produced, in as few responses as may be.

Sending a response costs the server and this process 100 to 300 µs of CPU, mostly in waking threads and cold
caches, however few bytes it carries. So there is a budget of `responses` for each step of the engine, all
streams together: up to that many streams get every step as it comes, n times as many get n steps at once.
First and last outputs never wait. Asking whether a client has gone wakes as many threads: `polls` a second,
in all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from enginebay.triton_repo.backend.surface import Wanted, response_tensors
from enginebay.triton_repo.runtime.request import Output
from enginebay.triton_repo.runtime.text import TextTokenizer

_IDLE = 0.5  # seconds between two looks at anything when nothing happens
_LONGEST = 0.5  # seconds that an output waits at most


@dataclass
class _Stream:
    """A request in flight. Only the responder's thread touches anything but `pending`."""

    sender: Any
    wanted: Wanted
    pending: list[Output] = field(default_factory=list)
    sent_at: float = 0.0  # 0: nothing yet
    opened_at: float = field(default_factory=time.monotonic)
    cumulative: float = 0.0
    excuse: str = "the request was cancelled"  # if it will be


class Responder:
    """Owns the response senders. `deliver` is the engine loop's sink and returns at once.

    `patience` is the seconds that requests without streaming get: over HTTP the server does not see their
    clients go. `cancel` is called once with the id of each request whose client has gone. `tick` is called
    between sends, at least twice a second.
    """

    def __init__(
        self,
        pb_utils: Any,
        tokenizer: TextTokenizer,
        *,
        responses: float,
        polls: float,
        patience: float,
        cancel: Callable[[str], None],
        tick: Callable[[bool], None],
        log: Callable[[str], None],
    ) -> None:
        self._pb = pb_utils
        self._tokenizer = tokenizer
        self._responses = responses
        self._polls = polls
        self._patience = patience
        self._cancel = cancel
        self._tick = tick
        self._log = log
        self._final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._streams: dict[str, _Stream] = {}
        self._cancelled: set[str] = set()
        self._ready: set[str] = set()  # ids with something to send
        self._urgent = False  # a first or last output is among it
        self._closing = False
        self._flushed = self._polled = 0.0
        self._steps = 0  # since the last turn of all
        self._thread = threading.Thread(target=self._run, name="enginebay-responder", daemon=True)
        self._thread.start()

    def open(self, id: str, sender: Any, wanted: Wanted) -> None:
        """Before the request is submitted."""
        with self._lock:
            self._streams[id] = _Stream(sender, wanted)
            self._wake.notify()

    def refuse(self, sender: Any, message: str, code: int, id: str | None = None) -> None:
        """Answers a request that never ran."""
        if id is not None:
            with self._lock:
                self._streams.pop(id, None)
                self._idle.notify_all()
        self._send(sender, self._error(message, code), final=True)

    def deliver(self, outputs: Sequence[Output]) -> None:
        """Takes the outputs of one step. Outputs of ids that were never opened are dropped."""
        with self._lock:
            for output in outputs:
                stream = self._streams.get(output.request_id)
                if stream is None:
                    continue
                stream.pending.append(output)
                if output.final or stream.wanted.stream:
                    self._ready.add(output.request_id)
                if output.final or (stream.wanted.stream and not stream.sent_at):
                    self._urgent = True
            self._steps += 1
            if self._urgent or self._turn_has_come():
                self._wake.notify()

    def give_up(self, message: str) -> None:
        """Cancels every stream and tells its client why."""
        with self._lock:
            streams = list(self._streams.items())
        for id, stream in streams:
            stream.excuse = message
            self._cancel(id)

    def drain(self) -> None:
        """Waits until every stream has had its last response."""
        with self._lock:
            self._idle.wait_for(lambda: not self._streams)

    def close(self) -> None:
        """Ends the thread once every stream has had its last response."""
        with self._lock:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    # What follows runs on the responder's thread.

    def _run(self) -> None:
        while True:
            try:
                if not self._turn():
                    return
            except Exception as error:  # without this thread every stream would hang
                self._log(f"{type(error).__name__} between responses: {error}")
                time.sleep(_IDLE)

    def _turn(self) -> bool:
        """Waits for something to do and does it. False once all is done.

        No reference to a sender outlives the call: the server cannot unload the model while there is one.
        """
        with self._lock:
            now = time.monotonic()
            live = len(self._streams)
            if self._closing and not live:
                return False
            poll_at = self._polled + live / self._polls
            wake_at = min(
                self._flushed + _LONGEST if self._ready else now + _IDLE, poll_at if live else now + _IDLE
            )
            if not (self._urgent or self._turn_has_come()) and wake_at > now:
                self._wake.wait(wake_at - now)
                now = time.monotonic()
            everything = self._turn_has_come() or now >= self._flushed + _LONGEST
            batch = self._take(everything=everything)
            if everything:
                self._flushed = now
                self._steps = 0
        for id, stream, outputs in batch:
            self._respond(id, stream, outputs)
        if now >= poll_at:
            self._polled = now
            self._poll()
        self._tick(live > 0)
        return True

    def _turn_has_come(self) -> bool:
        """Whether the budget of the steps since the last turn covers every stream. The lock is held."""
        return bool(self._ready) and self._steps * self._responses >= len(self._streams)

    def _take(self, *, everything: bool) -> list[tuple[str, _Stream, list[Output]]]:
        """What to send now. The lock is held."""
        batch = []
        for id in list(self._ready):
            stream = self._streams[id]
            if everything or not stream.sent_at or stream.pending[-1].final:
                batch.append((id, stream, stream.pending))
                stream.pending = []
                self._ready.discard(id)
        self._urgent = False
        return batch

    def _respond(self, id: str, stream: _Stream, outputs: list[Output]) -> None:
        final = outputs[-1].final
        try:
            response = self._response(stream, outputs)
        except Exception as error:  # must not take the other streams down
            self._log(f"a response could not be made: {type(error).__name__}: {error}")
            response = self._error(f"{type(error).__name__}: {error}", self._pb.TritonError.INTERNAL)
            final = True
            self._cancel(id)
        self._send(stream.sender, response, final=final)
        stream.sent_at = time.monotonic()
        if final:
            with self._lock:
                del self._streams[id]
                self._cancelled.discard(id)
                self._ready.discard(id)
                self._idle.notify_all()

    def _response(self, stream: _Stream, outputs: list[Output]) -> Any:
        last = outputs[-1]
        if last.finish_reason == "error":
            return self._error(last.error or "unknown error", self._pb.TritonError.INTERNAL)
        if last.finish_reason == "cancelled":
            return self._error(stream.excuse, self._pb.TritonError.CANCELLED)
        stream.cumulative += sum(entry.logprob for output in outputs for entry in output.logprobs)
        tensors = response_tensors(
            outputs, stream.wanted, stream.cumulative, self._tokenizer, first=not stream.sent_at
        )
        return self._pb.InferenceResponse([self._pb.Tensor(name, array) for name, array in tensors])

    def _send(self, sender: Any, response: Any, *, final: bool) -> None:
        try:
            sender.send(response, flags=self._final if final else 0)
        except Exception as error:  # the client is gone, or the server: others must not suffer
            self._log(f"a response could not be sent: {error}")

    def _error(self, message: str, code: int) -> Any:
        # What a client sent may be quoted in it, and JSON may spell what UTF-8 cannot hold.
        encodable = message.encode(errors="backslashreplace").decode()
        return self._pb.InferenceResponse(error=self._pb.TritonError(encodable, code))

    def _poll(self) -> None:
        """Asks the server which clients have gone. A question costs about what a small response does."""
        with self._lock:
            streams = [(id, stream) for id, stream in self._streams.items() if id not in self._cancelled]
        overdue = time.monotonic() - self._patience
        for id, stream in streams:
            late = not stream.wanted.stream and stream.opened_at < overdue
            if late or stream.sender.is_cancelled():
                if late:
                    stream.excuse = f"no answer within {self._patience:g} s"
                with self._lock:
                    if id in self._streams:
                        self._cancelled.add(id)
                self._cancel(id)
