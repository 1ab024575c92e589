"""EngineLoop: outputs, stop conditions, cancellation and refusals."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from fakes import LIMITS, HashEngine, greedy_tokens
from serving_loop import Script, Served, make, say
from tokenizer_samples import byte_level

from enginebay.triton_repo.runtime.detokenize import StreamFactory, TokenStream
from enginebay.triton_repo.runtime.engine import StepInputs
from enginebay.triton_repo.runtime.loop import EngineLoop, LoopConfig
from enginebay.triton_repo.runtime.request import (
    Output,
    OverloadedError,
    RequestError,
)
from enginebay.triton_repo.runtime.scheduler import SchedulerConfig


def test_tokens_are_those_of_the_model_and_arrive_once() -> None:
    with Served() as served:
        for index in range(30):
            served.loop.submit(make(f"r{index}", range(index + 1), 20))
        for index in range(30):
            final = served.sink.final(f"r{index}")
            assert served.sink.tokens(f"r{index}") == greedy_tokens(range(index + 1), 20)
            assert final.finish_reason == "length"
            assert final.usage is not None
            assert (final.usage.prompt_tokens, final.usage.completion_tokens) == (index + 1, 20)


def test_outputs_of_one_step_are_delivered_together() -> None:
    gate = threading.Event()
    engine = HashEngine()
    engine.before_step = lambda _: gate.wait()
    with Served(engine) as served:
        for index in range(8):
            served.loop.submit(make(f"r{index}", [index], 5))
        gate.set()
        for index in range(8):
            served.sink.final(f"r{index}")
        assert max(map(len, served.sink.deliveries)) >= 7
        for delivery in served.sink.deliveries:
            names = [output.request_id for output in delivery]
            assert len(set(names)) == len(names)


def test_s03_stop_strings_end_to_end() -> None:
    text, final, sink = say("abcDEFGHIJxyz", make("r", tokens=20, stop=("DEFGHIJ",)))
    assert (text, final.finish_reason) == ("abc", "stop")
    assert sink.tokens("r") == [ord(c) for c in "abc"], "tokens that are cut off are not shown"
    assert final.usage is not None
    assert final.usage.completion_tokens == 10
    text, final, _ = say("abcDEFXyz", make("r", tokens=9, stop=("DEFGHIJ",)))
    assert (text, final.finish_reason) == ("abcDEFXyz", "length")
    text, final, sink = say("abcDE", make("r", tokens=5, stop=("DEFGHIJ",)))
    assert (text, final.finish_reason) == ("abcDE", "length"), "the held tail is not lost"
    assert len(sink.tokens("r")) == 5
    text, final, _ = say("abcDEF", make("r", tokens=6, stop=("DEF",), include_stop=True))
    assert (text, final.finish_reason) == ("abcDEF", "stop")


def test_s03_held_text_then_eos() -> None:
    text, final, sink = say("abDE\x02", make("r", tokens=9, stop=("DEFGHIJ",)), eos_ids=[2])
    assert (text, final.finish_reason) == ("abDE", "stop")
    assert sink.tokens("r") == [ord(c) for c in "abDE"]


def test_s04_end_tokens_are_not_in_the_text_and_nothing_follows() -> None:
    for end in (2, 11):
        text, final, sink = say(f"ab{chr(end)}cd", make("r", tokens=5), eos_ids=[2, 11])
        assert (text, final.finish_reason) == ("ab", "stop")
        assert sink.tokens("r") == [97, 98]
        assert final.usage is not None
        assert final.usage.completion_tokens == 3
    text, final, _ = say("a\x02b\x0bc", make("r", tokens=5, ignore_eos=True), eos_ids=[2, 11])
    assert (text, final.finish_reason) == ("a\x02b\x0bc", "length")


def test_stop_strings_wait_for_min_tokens() -> None:
    text, _, _ = say("xxxxabxx", make("r", tokens=8, stop=("x",), min_tokens=5))
    assert text == "xxxxab"


def test_h04_tokens_and_logprobs_match_one_to_one() -> None:
    text, _, sink = say("abcDEFG", make("r", tokens=7, stop=("EFG",), logprobs=2))
    assert text == "abcD"
    shown = [item for output in sink.of("r") for item in output.logprobs]
    assert [item.token_id for item in shown] == sink.tokens("r") == [ord(c) for c in "abcD"]
    assert all(len(item.top) == 2 and item.logprob <= 0 for item in shown)


def test_split_characters_are_sent_whole() -> None:
    tokenizer = byte_level()
    factory = StreamFactory(tokenizer)

    class Decoder:
        eos_ids = frozenset[int]()

        def stream(self) -> TokenStream:
            return factory.stream()

    ids = tokenizer.encode("a🙂b世", add_special_tokens=False).ids
    limits = replace(LIMITS, vocab_size=tokenizer.get_vocab_size())

    class Speaker(Script):
        def run(self, inputs: StepInputs) -> np.ndarray:
            logits = np.zeros((len(inputs.logits_index), limits.vocab_size), np.float32)
            for row, index in enumerate(inputs.logits_index):
                logits[row, ids[inputs.position_ids[index]]] = 1
            return logits

    speaker = Speaker([])
    speaker.limits = limits
    with Served(speaker, Decoder()) as served:
        served.loop.submit(make("r", tokens=len(ids)))
        served.sink.final("r")
        assert served.sink.text("r") == "a🙂b世"
        assert all("\ufffd" not in output.text for output in served.sink.outputs)


def test_c07_two_hundred_hard_cancels_leave_nothing_and_disturb_nobody() -> None:
    """Cancelled while queued, prefilling, decoding, right at registration, twice, from many threads."""
    rng = random.Random(3)
    engine = HashEngine(replace(LIMITS, num_blocks=20))
    engine.before_step = lambda _: time.sleep(0.0003)
    config = LoopConfig(scheduler=SchedulerConfig(max_step_tokens=24))
    with Served(engine, config=config) as served:
        plans = [(f"c{i}", rng.randrange(1, 90), rng.random() * 0.02) for i in range(200)]

        def client(batch: list[tuple[str, int, float]]) -> None:
            for name, length, delay in batch:
                served.loop.cancel(name)  # not yet known: harmless
                served.loop.submit(make(name, range(length), 60))
                if delay > 0.004:
                    time.sleep(delay)
                served.loop.cancel(name)
                served.loop.cancel(name)

        threads = [threading.Thread(target=client, args=(plans[i::5],)) for i in range(5)]
        for thread in threads:
            thread.start()
        for index in range(12):
            served.loop.submit(make(f"kept{index}", [index, index + 1], 40))
        for thread in threads:
            thread.join()
        for index in range(12):
            assert served.sink.final(f"kept{index}").finish_reason == "length"
            assert served.sink.tokens(f"kept{index}") == greedy_tokens([index, index + 1], 40)
        for name, length, _ in plans:
            final = served.sink.final(name)
            assert final.finish_reason in ("cancelled", "length")
            got = served.sink.tokens(name)
            room = min(60, LIMITS.max_sequence - length)
            assert got == greedy_tokens(range(length), room)[: len(got)]
            served.loop.cancel(name)
        assert served.loop.drain(10)
        stats = served.loop.stats()
        assert stats.ok + stats.cancelled == 212
        assert stats.cancelled > 100


def test_cancelling_frees_blocks_within_a_step() -> None:
    steps: list[int] = []
    proceed = threading.Semaphore(0)
    engine = HashEngine()

    def before(inputs: StepInputs) -> None:
        steps.append(len(inputs.kv_len))
        proceed.acquire()

    engine.before_step = before
    served = Served(engine)
    served.loop.submit(make("kept", [1], 6))
    served.loop.submit(make("gone", [2], 100))
    for _ in range(3):
        proceed.release()
    while len(steps) < 4:
        time.sleep(0.001)
    served.loop.cancel("gone")
    for _ in range(100):
        proceed.release()
    served.sink.final("kept")
    final = served.sink.final("gone")
    assert final.finish_reason == "cancelled"
    assert set(steps[4:]) == {1}, "the step after the cancellation computes the other one alone"
    served.loop.close()


def test_duplicate_ids_are_refused_while_in_use_and_free_afterwards() -> None:
    gate = threading.Event()
    engine = HashEngine()
    engine.before_step = lambda _: gate.wait()
    with Served(engine) as served:
        served.loop.submit(make("same"))
        with pytest.raises(RequestError, match="'same'"):
            served.loop.submit(make("same"))
        gate.set()
        served.sink.final("same")
        served.loop.submit(make("same", [2], 3))
        assert served.loop.drain(10)
        assert served.sink.tokens("same") == greedy_tokens([1], 8) + greedy_tokens([2], 3)


def test_an_id_may_be_reused_from_the_sink() -> None:
    loop: EngineLoop

    def sink(outputs: Sequence[Output]) -> None:
        seen.extend(outputs)
        if len([o for o in seen if o.final]) < 5 and outputs[-1].final:
            loop.submit(make("again", tokens=2))

    seen: list[Output] = []
    loop = EngineLoop(HashEngine(), None, sink)
    loop.submit(make("again", tokens=2))
    deadline = time.monotonic() + 10
    while len([o for o in seen if o.final]) < 5 and time.monotonic() < deadline:
        time.sleep(0.005)
    loop.close()
    assert [o.finish_reason for o in seen if o.final] == ["length"] * 5


def test_the_waiting_queue_is_limited() -> None:
    gate = threading.Event()
    engine = HashEngine()
    engine.before_step = lambda _: gate.wait()
    config = LoopConfig(scheduler=SchedulerConfig(max_batch=2), max_waiting=3)
    with Served(engine, config=config) as served:
        for index in range(5):
            served.loop.submit(make(f"r{index}"))
        with pytest.raises(OverloadedError, match=r"5 requests.*at most 5"):
            served.loop.submit(make("more"))
        assert served.loop.stats().refused == 1
        gate.set()
        assert served.loop.drain(10)
        assert served.loop.stats().ok == 5


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ()}, "prompt_ids.*no tokens"),
        ({"prompt": (-1,)}, "token id -1 at index 0.*128"),
        ({"prompt": (3, 128)}, "token id 128 at index 1.*128"),
        ({"prompt": (2**63,)}, "prompt_ids"),
        ({"prompt": (2**70,)}, "prompt_ids"),
        ({"prompt": (1.5,)}, "prompt_ids"),
        ({"prompt": (True,)}, "prompt_ids"),
        ({"prompt": ((1,), (2,))}, "prompt_ids"),
        ({"prompt": tuple([1] * 128)}, "128 tokens"),
        ({"max_tokens": 0}, "max_tokens: 0"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"min_tokens": 9}, "min_tokens: 9 is above max_tokens 8"),
        ({"temperature": -0.1}, "temperature: -0.1"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"temperature": float("inf")}, "temperature: inf"),
        ({"temperature": "hot"}, "temperature: 'hot'"),
        ({"top_k": -2}, "top_k: -2"),
        ({"top_p": 1.01}, "top_p: 1.01"),
        ({"top_p": -0.01}, "top_p"),
        ({"min_p": 2}, "min_p: 2"),
        ({"repetition_penalty": 0}, "repetition_penalty: 0"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty: 1e-300 .* 1e-10 and 1e[+]10"),
        ({"repetition_penalty": 1e300}, "repetition_penalty: 1e[+]300"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"logprobs": -1}, "logprobs"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("a",)}, "no tokenizer"),
        ({"stop_token_ids": (500,)}, "stop_token_ids: token id 500"),
    ],
)
def test_bad_requests_are_refused_and_others_go_on(fields: dict[str, object], words: str) -> None:
    prompt = fields.pop("prompt", (1,))
    tokens = fields.pop("max_tokens", 8)
    with Served() as served:
        served.loop.submit(make("good"))
        with pytest.raises(RequestError, match=words):
            served.loop.submit(make("bad", prompt, tokens, **fields))
        served.sink.final("good")
        assert served.sink.tokens("good") == greedy_tokens([1], 8)
        assert not served.sink.of("bad")
        assert served.loop.stats().refused == 1
