"""As much of Triton's `pb_utils` as the backend uses, with everything that was sent kept."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


@dataclass
class Tensor:
    name: str
    array: Any


class TritonError(Exception):
    INTERNAL, INVALID_ARG, UNAVAILABLE, CANCELLED = range(4)

    def __init__(self, message: str, code: int) -> None:
        message.encode()  # as the binding does
        super().__init__(message)
        self.code = code


@dataclass
class InferenceResponse:
    output_tensors: list[Tensor] = field(default_factory=list)
    error: TritonError | None = None


@dataclass
class Sent:
    at: float
    text: str
    final: bool
    error: TritonError | None


class Sender:
    """A response sender. `fails` makes every send raise."""

    def __init__(self, fails: bool = False) -> None:
        self.sent: list[Sent] = []
        self.gone = False
        self.asked = 0
        self.fails = fails
        self.ended = threading.Event()

    def send(self, response: InferenceResponse, flags: int = 0) -> None:
        final = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
        text = "".join(t.array[0].decode() for t in response.output_tensors if t.name == "text_output")
        self.sent.append(Sent(time.monotonic(), text, final, response.error))
        if final:
            self.ended.set()
        if self.fails:
            raise RuntimeError("the server is gone")

    def is_cancelled(self) -> bool:
        self.asked += 1
        return self.gone


class Metric:
    def __init__(self, labels: dict[str, str]) -> None:
        self.labels = labels
        self.value = 0.0
        self.calls = 0

    def increment(self, value: float) -> None:
        assert value >= 0
        self.value += value
        self.calls += 1

    def set(self, value: float) -> None:
        self.value = value
        self.calls += 1


class MetricFamily:
    COUNTER, GAUGE = range(2)
    made: list[tuple[str, Metric]]

    def __init__(self, name: str, description: str, kind: int) -> None:
        assert description
        self.name = name

    def Metric(self, labels: dict[str, str]) -> Metric:  # noqa: N802 (Triton's name)
        metric = Metric(labels)
        type(self).made.append((self.name, metric))
        return metric
