"""When responses go out, how many, and that each request gets one last one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import fake_triton
import pytest
from fake_triton import Sender

from enginebay.triton_repo.backend.metrics import METRICS, Metrics
from enginebay.triton_repo.backend.responder import Responder
from enginebay.triton_repo.backend.surface import Wanted
from enginebay.triton_repo.runtime.request import Output
from enginebay.triton_repo.runtime.stats import Stats


def wanted(*, stream: bool = True, prefix: str = "") -> Wanted:
    return Wanted(stream, prefix, False, False, None, False, False, 3)


@pytest.fixture
def responder() -> Iterator[Callable[..., Responder]]:
    """responder(responses=…, polls=…, patience=…); `cancelled` and `logged` hold what it called."""
    made: list[Responder] = []

    def make(responses: float = 1e6, polls: float = 1e6, patience: float = 100.0) -> Responder:
        cancelled: list[str] = []
        logged: list[str] = []
        one = Responder(
            fake_triton,
            None,  # type: ignore[arg-type]
            responses=responses,
            polls=polls,
            patience=patience,
            cancel=cancelled.append,
            tick=lambda _: None,
            log=logged.append,
        )
        one.cancelled, one.logged = cancelled, logged  # type: ignore[attr-defined]
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


def text(id: str, value: str, reason: Any = None) -> Output:
    return Output(id, value, finish_reason=reason)


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def test_first_and_last_never_wait_and_the_rest_is_merged(responder: Callable[..., Responder]) -> None:
    one, sender = responder(responses=0.01), Sender()  # a turn every 100 steps
    one.open("a", sender, wanted())
    one.deliver([text("a", "1")])
    assert soon(lambda: len(sender.sent) == 1)
    for piece in "2345":
        one.deliver([text("a", piece)])
        time.sleep(0.01)
    assert len(sender.sent) == 1
    one.deliver([text("a", "6", "stop")])
    assert sender.ended.wait(5)
    assert [(sent.text, sent.final) for sent in sender.sent] == [("1", False), ("23456", True)]


def test_all_streams_together_keep_to_the_budget(responder: Callable[..., Responder]) -> None:
    one = responder(responses=4)
    senders = [Sender() for _ in range(16)]
    for index, sender in enumerate(senders):
        one.open(str(index), sender, wanted())
    steps = 41
    for _ in range(steps):
        one.deliver([text(str(index), ".") for index in range(16)])
        time.sleep(0.01)
    one.deliver([text(str(index), "!", "length") for index in range(16)])
    assert all(sender.ended.wait(5) for sender in senders)
    for sender in senders:
        assert "".join(sent.text for sent in sender.sent) == "." * steps + "!"
        assert [sent.final for sent in sender.sent] == [False] * (len(sender.sent) - 1) + [True]
        # A turn every 4 steps, beside the first and the last.
        assert 5 <= len(sender.sent) <= steps // 4 + 3


def test_outputs_wait_half_a_second_at_most(responder: Callable[..., Responder]) -> None:
    one, sender = responder(responses=0.01), Sender()
    one.open("a", sender, wanted())
    one.deliver([text("a", "1")])
    assert soon(lambda: len(sender.sent) == 1)
    one.deliver([text("a", "2")])
    assert soon(lambda: len(sender.sent) == 2)
    one.deliver([text("a", "3")])
    began = time.monotonic()
    assert soon(lambda: len(sender.sent) == 3)
    assert time.monotonic() - began < 1.5  # the wait before it, and its own
    one.deliver([text("a", "", "stop")])


def test_few_streams_get_every_step(responder: Callable[..., Responder]) -> None:
    one = responder(responses=4)
    senders = [Sender() for _ in range(4)]
    for index, sender in enumerate(senders):
        one.open(str(index), sender, wanted())
    for step in range(20):
        one.deliver([text(str(index), ".", "stop" if step == 19 else None) for index in range(4)])
        time.sleep(0.02)
    assert all(sender.ended.wait(5) for sender in senders)
    assert all(len(sender.sent) >= 17 for sender in senders)  # a late thread may merge some


def test_without_streaming_there_is_one_response(responder: Callable[..., Responder]) -> None:
    one, sender = responder(), Sender()
    one.open("a", sender, wanted(stream=False, prefix="prompt:"))
    for piece in ("x", "y"):
        one.deliver([text("a", piece)])
        time.sleep(0.02)
    assert sender.sent == []
    one.deliver([text("a", "z", "stop")])
    assert sender.ended.wait(5)
    assert [(sent.text, sent.final) for sent in sender.sent] == [("prompt:xyz", True)]


def test_errors_carry_the_final_flag(responder: Callable[..., Responder]) -> None:
    one = responder()
    failed, ended, refused = Sender(), Sender(), Sender()
    one.open("a", failed, wanted())
    one.open("b", ended, wanted())
    one.open("c", refused, wanted())
    one.refuse(refused, "too long", fake_triton.TritonError.INVALID_ARG, "c")
    one.deliver([text("a", "x"), Output("a", "", finish_reason="error", error="boom")])
    one.deliver([text("b", "", "cancelled")])
    one.drain()
    for sender, message, code in (
        (failed, "boom", 0),
        (ended, "the request was cancelled", 3),
        (refused, "too long", 1),
    ):
        last = sender.sent[-1]
        assert last.final
        assert last.error is not None
        assert (str(last.error), last.error.code) == (message, code)
        assert sum(sent.final for sent in sender.sent) == 1


def test_clients_that_go_are_cancelled_once(responder: Callable[..., Responder]) -> None:
    one = responder(polls=400)
    leaving, staying = Sender(), Sender()
    one.open("a", leaving, wanted())
    one.open("b", staying, wanted())
    time.sleep(0.05)
    leaving.gone = True
    assert soon(lambda: one.cancelled == ["a"])  # type: ignore[attr-defined]
    asked = leaving.asked
    time.sleep(0.1)
    assert (one.cancelled, leaving.asked) == (["a"], asked)  # type: ignore[attr-defined]
    assert 10 < staying.asked < 200
    one.deliver([text("a", "", "cancelled"), text("b", "x", "stop")])
    one.drain()
    assert staying.sent[-1].error is None


def test_patience_is_for_requests_without_streaming(responder: Callable[..., Responder]) -> None:
    one = responder(patience=0.1)
    unary, streaming = Sender(), Sender()
    one.open("a", unary, wanted(stream=False))
    one.open("b", streaming, wanted())
    assert soon(lambda: one.cancelled == ["a"])  # type: ignore[attr-defined]
    one.deliver([text("a", "", "cancelled"), text("b", "", "stop")])
    one.drain()
    assert str(unary.sent[-1].error) == "no answer within 0.1 s"


def test_a_send_that_fails_harms_nobody_else(responder: Callable[..., Responder]) -> None:
    one = responder()
    broken, fine = Sender(fails=True), Sender()
    one.open("a", broken, wanted())
    one.open("b", fine, wanted())
    for piece in "xyz":
        one.deliver([text("a", piece), text("b", piece)])
        time.sleep(0.02)
    one.deliver([text("a", "", "stop"), text("b", "", "stop")])
    one.drain()
    assert "".join(sent.text for sent in fine.sent) == "xyz"
    assert all("the server is gone" in line for line in one.logged)  # type: ignore[attr-defined]
    assert one.logged  # type: ignore[attr-defined]


def test_outputs_of_unknown_requests_are_dropped(responder: Callable[..., Responder]) -> None:
    one, sender = responder(), Sender()
    one.deliver([text("ghost", "x"), text("ghost", "", "stop")])
    one.open("a", sender, wanted())
    one.deliver([text("a", "y", "stop")])
    assert sender.ended.wait(5)


def test_metrics_are_differences_published_once() -> None:
    fake_triton.MetricFamily.made = []
    warm = Stats(ok=5, steps=10, step_seconds=1.5)
    metrics = Metrics(fake_triton, "llm", "1", warm)
    made = fake_triton.MetricFamily.made
    assert len(made) == len(METRICS)
    stats = Stats(ok=7, refused=1, running=2, steps=30, step_seconds=2.0, cache_blocks=8, cache_blocks_used=2)
    metrics.publish(stats, refused=3)
    metrics.publish(stats, refused=3)
    values = {(name, metric.labels.get("outcome", "")): metric for name, metric in made}
    assert values["enginebay_requests_total", "ok"].value == 2
    assert values["enginebay_requests_total", "refused"].value == 4
    assert values["enginebay_requests_total", "failed"].calls == 0
    assert values["enginebay_steps_total", ""].value == 20
    assert values["enginebay_step_seconds_total", ""].value == pytest.approx(0.5)
    assert values["enginebay_cache_usage_ratio", ""].value == 0.25
    assert all(metric.calls <= 1 for _, metric in made)
    assert all(metric.labels["model"] == "llm" for _, metric in made)


def test_a_message_that_utf8_cannot_hold_is_sent_escaped(responder: Callable[..., Responder]) -> None:
    sender = Sender()
    responder().refuse(sender, "\ud800é: unknown parameter", fake_triton.TritonError.INVALID_ARG)
    (sent,) = sender.sent
    assert sent.final
    assert str(sent.error) == "\\ud800é: unknown parameter"
