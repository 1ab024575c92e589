"""EngineLoop: failures of requests, engine and sink, draining, and what is counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from fakes import LIMITS, HashEngine, greedy_tokens
from serving_loop import Letters, Served, make

from enginebay.triton_repo.runtime.detokenize import TokenStream
from enginebay.triton_repo.runtime.engine import StepInputs
from enginebay.triton_repo.runtime.loop import EngineLoop, LoopConfig
from enginebay.triton_repo.runtime.request import (
    Output,
    Request,
    RequestError,
    SamplingParams,
    UnavailableError,
)
from enginebay.triton_repo.runtime.scheduler import SchedulerConfig


def test_nan_logits_fail_their_request_alone() -> None:
    class Poisoned(HashEngine):
        def _row(self, inputs: StepInputs, row: int) -> np.ndarray:
            logits = super()._row(inputs, row)
            sequence = int(np.searchsorted(inputs.query_start, row, side="right")) - 1
            first = self.cache[inputs.block_table[sequence, 0] * self.limits.block_size, 0]
            return np.full_like(logits, np.nan) if first == 99 and inputs.position_ids[row] > 20 else logits

    with Served(Poisoned()) as served:
        served.loop.submit(make("bad", [99], 40))
        served.loop.submit(make("good", [1], 40))
        final = served.sink.final("bad")
        assert final.finish_reason == "error"
        assert "no usable logits" in (final.error or "")
        assert served.sink.tokens("bad") == greedy_tokens([99], 21)
        served.sink.final("good")
        assert served.sink.tokens("good") == greedy_tokens([1], 40)
        # The blocks that gave NaN are not offered to the next request with the same prefix.
        assert (
            served.loop._batcher.scheduler.kv.match(
                served.loop._batcher.scheduler.add(make("probe", [99, *greedy_tokens([99], 21)])).table,
                np.array([99, *greedy_tokens([99], 21)], np.int32),
            )
            == []
        )
        served.loop._batcher.scheduler.finish(served.loop._batcher.scheduler._live["probe"])


def test_an_engine_error_fails_the_culprit_alone() -> None:
    engine = HashEngine()

    def before(inputs: StepInputs) -> None:
        if 77 in inputs.input_ids:
            raise MemoryError("out of arena")

    engine.before_step = before
    with Served(engine) as served:
        for index in range(6):
            served.loop.submit(make(f"r{index}", [index, 77 if index == 3 else 5], 20))
        for index in range(6):
            final = served.sink.final(f"r{index}")
            if index == 3:
                assert final.finish_reason == "error"
                assert "MemoryError: out of arena" in (final.error or "")
            elif 77 not in greedy_tokens([index, 5], 20):
                assert served.sink.tokens(f"r{index}") == greedy_tokens([index, 5], 20)
        assert served.loop.failure is None
        served.loop.submit(make("later", [9], 3))
        served.sink.final("later")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"salt": "\ud800"}, "cache_salt"),
        ({"salt": 5}, "cache_salt"),
        ({"id": "\ud800"}, "id"),
        ({"id": 5}, "id"),
        ({"priority": "high"}, "priority"),
        ({"priority": 10**30}, "priority"),
        ({"sampling": SamplingParams(stop=("\ud800",))}, "stop"),
    ],
)
def test_odd_fields_are_refused_before_they_reach_the_loop(fields: dict[str, object], name: str) -> None:
    with Served() as served:
        with pytest.raises(RequestError, match=f"^{name}: "):
            served.loop.submit(replace(make("odd"), **fields))
        served.loop.submit(make("good", [1], 5))
        assert served.sink.final("good").finish_reason == "length"


@pytest.mark.parametrize("part", ["scheduler", "decoder"])
def test_a_request_that_cannot_be_taken_fails_alone(part: str) -> None:
    class Fussy(Letters):
        def stream(self) -> TokenStream:
            if part == "decoder" and threading.current_thread().name == "enginebay-loop" and odd.pop():
                raise MemoryError("no room")
            return super().stream()

    odd = [False, True, False]
    with Served(decoder=Fussy()) as served:
        batcher = served.loop._batcher
        real = batcher.scheduler.add

        def add(request: Request) -> object:
            if part == "scheduler" and odd.pop():
                raise MemoryError("no room")
            return real(request)

        batcher.scheduler.add = add
        for name in ("first", "odd", "last"):
            served.loop.submit(make(name, [1], 5))
        final = served.sink.final("odd")
        assert (final.finish_reason, final.error) == ("error", "MemoryError: no room")
        for name in ("first", "last"):
            served.sink.final(name)
            assert served.sink.tokens(name) == greedy_tokens([1], 5)
        stats = served.loop.stats()
        assert (stats.ok, stats.failed) == (2, 1)
        assert served.loop.failure is None


def test_an_engine_that_keeps_failing_makes_the_loop_unhealthy() -> None:
    engine = HashEngine()

    def before(inputs: StepInputs) -> None:
        raise RuntimeError("device lost")

    engine.before_step = before
    with Served(engine, config=LoopConfig(scheduler=SchedulerConfig(max_batch=1))) as served:
        refused = 0
        for index in range(8):
            try:
                served.loop.submit(make(f"r{index}"))
            except UnavailableError:
                refused += 1
        for index in range(8 - refused):
            final = served.sink.final(f"r{index}")
            assert final.finish_reason == "error"
            assert "device lost" in (final.error or "")
        deadline = time.monotonic() + 5
        while served.loop.failure is None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert "device lost" in (served.loop.failure or "")
        with pytest.raises(UnavailableError, match="device lost"):
            served.loop.submit(make("late"))
        assert served.loop.drain(1)


def test_a_failing_sink_makes_the_loop_unhealthy() -> None:
    def sink(outputs: Sequence[Output]) -> None:
        raise OSError("pipe closed")

    loop = EngineLoop(HashEngine(), None, sink)
    loop.submit(make("r"))
    assert loop.drain(10)
    deadline = time.monotonic() + 5
    while loop.failure is None and time.monotonic() < deadline:
        time.sleep(0.001)
    with pytest.raises(UnavailableError, match="pipe closed"):
        loop.submit(make("s"))
    loop.close()


def test_draining_serves_what_was_accepted_and_refuses_the_rest() -> None:
    engine = HashEngine()
    engine.before_step = lambda _: time.sleep(0.002)
    with Served(engine) as served:
        for index in range(4):
            served.loop.submit(make(f"r{index}", [index], 20))
        assert not served.loop.drain(0.001)
        with pytest.raises(UnavailableError, match="draining"):
            served.loop.submit(make("late"))
        assert served.loop.drain(20)
        assert [served.sink.final(f"r{i}").finish_reason for i in range(4)] == ["length"] * 4


def test_closing_cancels_what_is_left_and_is_idempotent() -> None:
    engine = HashEngine()
    engine.before_step = lambda _: time.sleep(0.001)
    served = Served(engine)
    for index in range(20):
        served.loop.submit(make(f"r{index}", [index], 100))
    served.loop.close()
    served.loop.close()
    assert [served.sink.final(f"r{i}").finish_reason for i in range(20)] == ["cancelled"] * 20
    assert not any(thread is served.loop._thread for thread in threading.enumerate())


def test_o03_outcomes_are_counted_once() -> None:
    """Five of each outcome, with preemptions on the way; the first token is timed once per request."""
    engine = HashEngine(replace(LIMITS, num_blocks=8))
    gate = threading.Event()

    def before(inputs: StepInputs) -> None:
        gate.wait()
        time.sleep(0.0005)
        if 77 in inputs.input_ids:
            raise RuntimeError("boom")

    engine.before_step = before
    with Served(engine) as served:
        clean = [p for p in range(40) if 77 not in greedy_tokens([p], 40)][:5]
        for index, prompt in enumerate(clean):
            served.loop.submit(make(f"ok{index}", [prompt], 40))
            served.loop.submit(make(f"bad{index}", [77, prompt], 40))
            served.loop.submit(make(f"gone{index}", [50, prompt], 100))
        for index in range(5):
            served.loop.cancel(f"gone{index}")
        with pytest.raises(RequestError):
            served.loop.submit(make("refused", []))
        gate.set()
        assert served.loop.drain(20)
        stats = served.loop.stats()
        assert (stats.ok, stats.cancelled, stats.failed, stats.refused) == (5, 5, 5, 1)
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.first_tokens == 5
        assert stats.preemptions > 0
        assert stats.generated_tokens == 5 * 40
        assert stats.first_token_seconds > 0
        assert 0 < stats.engine_seconds < stats.step_seconds
        assert 0 < stats.block_waste < 1


def test_gauges_are_never_negative_and_add_up() -> None:
    engine = HashEngine()
    engine.before_step = lambda _: time.sleep(0.0005)
    with Served(engine) as served:
        for submitted in range(1, 61):
            served.loop.submit(make(f"r{submitted}", [submitted], 10))
            stats = served.loop.stats()
            assert min(stats.running, stats.waiting, stats.cache_blocks_used) >= 0
            assert stats.running + stats.waiting + stats.ok == submitted
        assert served.loop.drain(20)


def test_unseeded_requests_differ_and_seeded_ones_do_not() -> None:
    with Served() as served:
        for index in range(6):
            seed = 5 if index < 3 else None
            served.loop.submit(make(f"r{index}", [1], 30, temperature=1.5, seed=seed))
        tokens = []
        for index in range(6):
            served.sink.final(f"r{index}")
            tokens.append(tuple(served.sink.tokens(f"r{index}")))
        assert len(set(tokens[:3])) == 1
        assert len(set(tokens[2:])) == 4


def test_prefix_hits_are_reported_in_usage_and_counters() -> None:
    with Served() as served:
        served.loop.submit(make("first", range(40)))
        served.sink.final("first")
        served.loop.submit(make("second", range(40)))
        usage = served.sink.final("second").usage
        assert usage is not None
        assert usage.cached_tokens == 32
        stats = served.loop.stats()
        assert (stats.prefix_lookup_tokens, stats.prefix_hit_tokens) == (80, 32)
        assert stats.prefix_hit_rate == pytest.approx(0.4)
