"""Scheduler: who computes what when, and that no schedule changes anybody's tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from driving import Driver, alone, request
from fakes import LIMITS, greedy_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from enginebay.triton_repo.runtime.request import Request, RequestError
from enginebay.triton_repo.runtime.scheduler import Scheduler, SchedulerConfig
from enginebay.triton_repo.runtime.sequence import Status

LONG = replace(
    LIMITS, num_blocks=14, block_size=4, max_batch=4, max_step_tokens=10, max_sequence=40, rope_switch=20
)
SMALL = replace(LIMITS, num_blocks=12, block_size=4, max_batch=4, max_step_tokens=10, max_sequence=40)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests of few distinct prompts come, run, are preempted, hit the prefix cache and are cancelled."""

    limits = SMALL

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(self.limits)
        self.requests: dict[str, Request] = {}
        self.cancelled: set[str] = set()

    @rule(
        family=st.integers(0, 1),
        length=st.integers(1, 30),
        tokens=st.integers(1, 20),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, "s"]),
    )
    def add(self, family: int, length: int, tokens: int, priority: int, salt: str | None) -> None:
        wanted = request(
            f"r{len(self.requests)}",
            [(family * 50 + i) % 128 for i in range(length)],
            tokens,
            priority=priority,
            salt=salt,
        )
        self.requests[wanted.id] = wanted
        self.driver.add(wanted)

    @rule(turns=st.integers(1, 6))
    def run_some(self, turns: int) -> None:
        for _ in range(turns):
            if self.driver.scheduler.live:
                assert self.driver.turn().chunks

    @precondition(lambda self: self.driver.scheduler.live)
    @rule(data=st.data(), forget=st.booleans())
    def cancel(self, data: st.DataObject, forget: bool) -> None:
        live = [s for s in self.driver.rows if s.status is not Status.FINISHED]
        sequence = data.draw(st.sampled_from(live))
        self.driver.scheduler.finish(sequence, forget=forget)
        self.driver.scheduler.finish(sequence)
        self.cancelled.add(sequence.id)

    @invariant()
    def consistent(self) -> None:
        self.driver.scheduler.check()

    def teardown(self) -> None:
        self.driver.run()
        for name, wanted in self.requests.items():
            room = min(wanted.sampling.max_tokens, SMALL.max_sequence - len(wanted.prompt_ids))
            expected = greedy_tokens(wanted.prompt_ids, room)
            output = self.driver.output[name]
            if name in self.cancelled:
                assert output == expected[: len(output)]
            else:
                assert output == expected
                assert self.driver.reasons[name] == "length"


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


class TwoTablesMachine(SchedulerMachine):
    """The same for a model with two RoPE tables."""

    limits = LONG


TwoTablesMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestTwoTablesMachine = TwoTablesMachine.TestCase


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    budget=st.integers(3, 64),
    blocks=st.integers(8, 40),
    batch=st.integers(1, 8),
    caching=st.booleans(),
)
def test_the_schedule_never_changes_sampled_tokens(
    data: st.DataObject, budget: int, blocks: int, batch: int, caching: bool
) -> None:
    """Seeds, penalties and filters on; every request equals its run alone in a roomy engine."""
    limits = replace(LIMITS, num_blocks=blocks, block_size=4, max_sequence=32)
    driver = Driver(limits, SchedulerConfig(max_batch=batch, max_step_tokens=budget, prefix_caching=caching))
    wanted = [
        request(
            f"r{index}",
            data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=20)),
            data.draw(st.integers(1, 12)),
            temperature=data.draw(st.sampled_from([0.0, 1.0])),
            top_k=data.draw(st.sampled_from([0, 5])),
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.5])),
            frequency_penalty=data.draw(st.sampled_from([0.0, 0.5])),
            seed=index,
        )
        for index in range(data.draw(st.integers(1, 6)))
    ]
    for item in wanted:
        driver.add(item)
    driver.run()
    roomy = replace(limits, num_blocks=64)
    for item in wanted:
        assert driver.output[item.id] == alone(item, roomy)


def test_c01_full_prefix_hits() -> None:
    for length, cached in ((15, 0), (16, 0), (17, 16), (32, 16)):
        for budget in (64, 5):  # whole and chunked
            driver = Driver(LIMITS, SchedulerConfig(max_step_tokens=budget))
            first = driver.add(request("first", range(length)))
            driver.run()
            second = driver.add(request("second", range(length)))
            driver.run()
            assert (first.cached_tokens, second.cached_tokens) == (0, cached)
            assert driver.output["first"] == driver.output["second"] == greedy_tokens(range(length), 8)


def test_shared_blocks_are_never_rewritten() -> None:
    driver = Driver(LIMITS)
    driver.add(request("first", range(40)))
    driver.run()
    shared = driver.scheduler.kv.match(driver.add(request("second", range(40))).table, np.arange(40))
    assert len(shared) == 2
    slots = {block * 16 + offset for block in shared for offset in range(16)}
    written: list[int] = []
    driver.engine.before_step = lambda inputs: written.extend(inputs.slot_mapping.tolist())
    driver.run()
    assert slots.isdisjoint(written)


def test_c03_salts_share_nothing() -> None:
    driver = Driver(LIMITS)
    for index, salt in enumerate([None, "A", "B"]):
        sequence = driver.add(request(f"r{index}", range(48), salt=salt))
        driver.run()
        assert sequence.cached_tokens == 0
    again = driver.add(request("again", range(48), salt="A"))
    driver.run()
    assert again.cached_tokens == 32


def test_c04_a_request_that_never_fits_is_refused_at_once() -> None:
    limits = replace(LIMITS, num_blocks=4, max_sequence=128)
    driver = Driver(limits, SchedulerConfig(reserved_blocks=1))
    with pytest.raises(RequestError, match=r"49 tokens.*48"):
        driver.add(request("long", range(49)))
    driver.add(request("short", range(5)))
    driver.run()
    assert driver.output["short"] == greedy_tokens(range(5), 8)


def test_a_prompt_that_fills_the_cache_gets_its_one_token() -> None:
    limits = replace(LIMITS, num_blocks=3)
    driver = Driver(limits)
    driver.add(request("full", range(48), tokens=30))
    driver.run()
    assert driver.output["full"] == greedy_tokens(range(48), 1)
    assert driver.reasons["full"] == "length"


def test_max_tokens_is_clamped_to_the_room() -> None:
    driver = Driver(LIMITS)
    driver.add(request("long", range(100), tokens=1000))
    driver.run()
    assert driver.output["long"] == greedy_tokens(range(100), 28)
    with pytest.raises(RequestError, match=r"128 tokens.*128"):
        driver.add(request("longer", [i % 128 for i in range(128)]))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_c05_preemption_loses_and_doubles_nothing(temperature: float, caching: bool) -> None:
    limits = replace(LIMITS, num_blocks=6)
    driver = Driver(limits, SchedulerConfig(prefix_caching=caching))
    wanted = [
        request(
            name,
            [start, start + 1, start + 2],
            60,
            temperature=temperature,
            seed=start,
            repetition_penalty=1.2,
            presence_penalty=0.5,
            logprobs=2,
        )
        for name, start in (("a", 1), ("b", 60))
    ]
    for item in wanted:
        driver.add(item)
    driver.run()
    assert driver.scheduler.counters.preemptions > 0
    for item in wanted:
        assert driver.output[item.id] == alone(item, replace(limits, num_blocks=64))
    again = [c for plan in driver.plans for c in plan.chunks if len(c.tokens) > 1 and c.end > 3]
    assert again, "the prefill after a preemption covers prompt and output"
    assert all(c.start % 16 == 0 if caching else c.start == 0 for c in again)
    assert driver.scheduler.counters.generated_tokens == 120
    assert driver.scheduler.counters.prompt_tokens == 6


def test_the_lowest_priority_is_preempted_and_among_equals_the_newest() -> None:
    limits = replace(LIMITS, num_blocks=4)
    driver = Driver(limits, SchedulerConfig(prefix_caching=False))
    driver.add(request("old", range(20), 40))
    driver.add(request("urgent", range(20, 40), 40, priority=-1))
    driver.run()
    finished = list(driver.reasons)
    assert finished == ["urgent", "old"]
    driver = Driver(limits, SchedulerConfig(prefix_caching=False))
    driver.add(request("old", range(20), 40))
    driver.add(request("new", range(20, 40), 40))
    driver.run()
    assert list(driver.reasons) == ["old", "new"]


def test_priorities_go_first_and_overtake_a_bounded_number() -> None:
    config = SchedulerConfig(max_batch=1, priority_stride=3)
    driver = Driver(LIMITS, config)
    driver.add(request("runs", [1], 1))
    driver.add(request("low", [2], 1, priority=1))
    for index in range(6):
        driver.add(request(f"high{index}", [3 + index], 1))
    driver.run()
    order = list(driver.reasons)
    # "low" is the second arrival and ranks as the fifth, before the fifth itself.
    assert order == ["runs", "high0", "high1", "low", "high2", "high3", "high4", "high5"]


def test_a_long_prefill_does_not_delay_decoding() -> None:
    driver = Driver(LIMITS, SchedulerConfig(max_step_tokens=8))
    short = driver.add(request("short", [1], 20))
    driver.turn()
    driver.add(request("long", range(100), 1))
    while driver.scheduler.live > 1 or short.status is not Status.FINISHED:
        before = short.generated
        plan = driver.turn()
        if short.status is Status.RUNNING:
            assert short.generated == before + 1, "a decode waits for a prefill"
        assert len(plan.chunks) <= 2
        if not driver.scheduler.live:
            break
    assert driver.output["short"] == greedy_tokens([1], 20)
    assert driver.output["long"] == greedy_tokens(range(100), 1)


def test_steps_mix_prefill_chunks_and_decodes_within_the_budget() -> None:
    driver = Driver(LIMITS, SchedulerConfig(max_step_tokens=16))
    for index in range(4):
        driver.add(request(f"r{index}", range(index, index + 30), 6))
    driver.run()
    mixed = [
        plan
        for plan in driver.plans
        if any(len(c.tokens) > 1 for c in plan.chunks) and any(len(c.tokens) == 1 for c in plan.chunks)
    ]
    assert mixed
    assert all(plan.tokens <= 16 for plan in driver.plans)


def test_nobody_starves_under_a_stream_of_short_requests() -> None:
    driver = Driver(SMALL)
    driver.add(request("long", range(30), 8))
    for index in range(60):
        driver.add(request(f"s{index}", [index], 3))
        driver.turn()
        driver.turn()
        if "long" in driver.reasons:
            break
    assert "long" in driver.reasons


def test_a_blocked_head_is_not_overtaken_forever() -> None:
    """The head of the queue needs nearly the whole pool; small ones behind it wait until it has run."""
    limits = replace(SMALL, max_sequence=48)
    driver = Driver(limits)
    driver.add(request("small", [1], 8))
    driver.turn()
    driver.add(request("big", range(45), 3))
    for index in range(10):
        driver.add(request(f"s{index}", [index + 50], 8))
    driver.run()
    assert list(driver.reasons)[:2] == ["small", "big"]


def test_s04_any_of_several_end_tokens_stops() -> None:
    expected = greedy_tokens([5], 40)
    eos = frozenset({expected[10], expected[20]})
    first = min(index for index, token in enumerate(expected) if token in eos)
    driver = Driver(LIMITS, eos=eos)
    driver.add(request("stops", [5], 40))
    driver.add(request("ignores", [5], 40, ignore_eos=True))
    driver.add(request("own", [5], 40, ignore_eos=True, stop_token_ids=(expected[3],)))
    driver.run()
    assert driver.output["stops"] == expected[: first + 1]
    assert driver.output["ignores"] == expected
    assert driver.output["own"] == expected[: expected.index(expected[3]) + 1]
    assert driver.reasons == {"own": "stop", "stops": "stop", "ignores": "length"}


def test_min_tokens_bars_end_tokens() -> None:
    expected = greedy_tokens([5], 4)
    driver = Driver(LIMITS, eos=frozenset(expected))
    driver.add(request("r", [5], 40, min_tokens=6))
    driver.run()
    output = driver.output["r"]
    assert len(output) > 6
    assert set(output[:6]).isdisjoint(expected)


def test_several_accepted_tokens_are_cut_at_the_end_token() -> None:
    """What verification of drafts hands in: [a, b, EOS, d, e] for a chunk of five rows (P01)."""
    from enginebay.triton_repo.runtime.plan import Chunk, StepPlan

    scheduler = Scheduler(LIMITS, SchedulerConfig(), frozenset({9}))
    sequence = scheduler.add(request("r", range(20), 30))
    plan = scheduler.schedule()
    scheduler.commit(plan, [[7]])
    plan = scheduler.schedule()
    assert scheduler.kv.grow(sequence.table, sequence.computed + 5)
    drafts = np.array([7, 1, 2, 9, 4], np.int32)
    chunk = Chunk(sequence, plan.chunks[0].start, drafts, sequence.table.blocks, samples=5)
    (event,) = scheduler.commit(StepPlan((chunk,)), [[1, 2, 9, 4, 5]])
    assert event.tokens == (1, 2, 9)
    assert event.finish_reason == "stop"
    assert scheduler.counters.generated_tokens == 4


def test_rejected_drafts_leave_no_trace() -> None:
    from enginebay.triton_repo.runtime.plan import Chunk, StepPlan

    scheduler = Scheduler(LIMITS, SchedulerConfig())
    sequence = scheduler.add(request("r", range(13), 30))
    scheduler.commit(scheduler.schedule(), [[7]])
    plan = scheduler.schedule()
    assert scheduler.kv.grow(sequence.table, sequence.computed + 5)
    chunk = Chunk(
        sequence, plan.chunks[0].start, np.array([7, 1, 2, 3, 4], np.int32), sequence.table.blocks, 5
    )
    (event,) = scheduler.commit(StepPlan((chunk,)), [[1, 55]])
    assert event.tokens == (1, 55)
    assert (sequence.known, sequence.computed) == (16, 15)  # 13 + 7 + 1 are computed, 55 is not
    assert sequence.table.published == 0, "position 15 held a rejected draft"
    scheduler.check()


@pytest.mark.parametrize("budget", [64, 5])
def test_e08_crossing_the_rope_switch_recomputes_the_whole_cache(budget: int) -> None:
    """Up to 32 tokens the first table, from the 33rd the second, each sequence by its own length."""
    limits = replace(LIMITS, rope_switch=32, block_size=4)
    driver = Driver(limits, SchedulerConfig(max_step_tokens=budget))
    prompts = {
        "crosses": range(30),
        "short": range(5),
        "long": range(40),
        "edge": range(32),
        "hit": range(30),
    }
    for name, prompt in prompts.items():
        driver.add(request(name, prompt, 6))
    driver.run()
    driver.add(request("again", range(30), 6))
    driver.run()
    for name, prompt in {**prompts, "again": range(30)}.items():
        assert driver.output[name] == greedy_tokens(prompt, 6)
    shifts = {
        name: {
            chunk.position_shift
            for plan in driver.plans
            for chunk in plan.chunks
            if chunk.sequence.id == name
        }
        for name in prompts
    }
    assert shifts == {"crosses": {0, 32}, "short": {0}, "long": {32}, "edge": {0, 32}, "hit": {0, 32}}
    assert driver.scheduler.counters.preemptions == 0


def test_slots_count_shared_blocks_once() -> None:
    driver = Driver(LIMITS)
    driver.add(request("a", range(40), 2))
    driver.run()
    driver.add(request("b", range(40), 20))
    driver.add(request("c", range(40), 20))
    driver.turn()
    driver.turn()
    # 32 shared tokens; each has 9 more of its own in a block of 16.
    assert driver.scheduler.slots() == (32 + 2 * 16, 32 + 2 * 9)


def test_too_small_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="room for 0"):
        Scheduler(replace(LIMITS, max_batch=0), SchedulerConfig())
