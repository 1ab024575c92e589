"""Cache tiers: blocks move by age, every pool stays consistent, and nobody loses a token over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from driving import Driver, request
from fakes import LIMITS, Collector, greedy_tokens
from hypothesis import settings
from test_scheduler import SMALL, SchedulerMachine
from tiny_engine import VOCAB

from enginebay.triton_repo.runtime.engine import Tier
from enginebay.triton_repo.runtime.loop import EngineLoop, LoopConfig
from enginebay.triton_repo.runtime.ort_engine import EngineOptions, OrtEngine
from enginebay.triton_repo.runtime.request import Request, SamplingParams
from enginebay.triton_repo.runtime.scheduler import Scheduler, SchedulerConfig
from enginebay.triton_repo.runtime.sequence import Sequence, Status
from enginebay.triton_repo.runtime.stats import Stats
from enginebay.triton_repo.runtime.tiers import TieredPool, least_blocks, move_batches, sequence_blocks

# The fake engine's moves lose nothing, so tokens must be those of any schedule.
TIERED = replace(SMALL, num_blocks=6, tiers=(Tier(5, 6), Tier(4, 14)))
LARGE = replace(LIMITS, block_size=4, num_blocks=40, tiers=(Tier(40, 8), Tier(40, 24)))


class TieredMachine(SchedulerMachine):
    """Two colder pools behind a first one that hardly holds two sequences' newest tokens."""

    limits = TIERED


class TwoTablesMachine(SchedulerMachine):
    """The same for a model with two RoPE tables."""

    limits = replace(TIERED, rope_switch=20)


class TightMachine(SchedulerMachine):
    """Pools of the least size."""

    limits = replace(TIERED, num_blocks=4, tiers=(Tier(3, 2), Tier(9, 6)))


for _machine in (TieredMachine, TwoTablesMachine, TightMachine):
    _machine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestTieredMachine = TieredMachine.TestCase
TestTwoTablesMachine = TwoTablesMachine.TestCase
TestTightMachine = TightMachine.TestCase


def tiers_of(driver: Driver, sequence: Sequence) -> list[int]:
    pool = driver.scheduler.pool
    assert isinstance(pool, TieredPool)
    return [pool.tier(block) for block in sequence.table.blocks.tolist()]


@pytest.mark.parametrize("budget", [64, 5])
@pytest.mark.parametrize("caching", [True, False])
def test_blocks_are_where_their_age_says(budget: int, caching: bool) -> None:
    driver = Driver(LARGE, SchedulerConfig(max_step_tokens=budget, prefix_caching=caching))
    sequence = driver.add(request("r", range(50), 20))
    while driver.scheduler.live:
        driver.turn()
        if sequence.status is Status.RUNNING:
            ages = [sequence.computed - 4 * (i + 1) for i in range(sequence.table.length)]
            assert tiers_of(driver, sequence) == [(age >= 8) + (age >= 24) for age in ages]
    assert driver.output["r"] == greedy_tokens(range(50), 20)
    assert driver.engine.moved > 10


def test_a_prefix_is_found_in_parts_and_shared_blocks_are_converted_once() -> None:
    driver = Driver(LARGE)
    first = driver.add(request("first", range(64), 20))
    driver.turn()
    driver.turn()
    moved, warm = driver.engine.moved, set(first.table.blocks.tolist())
    second = driver.add(request("second", [*range(64), 1, 2], 20))
    driver.turn()
    assert second.cached_tokens == 64
    assert driver.engine.moved == moved, "its blocks were converted for the first one"
    assert warm & set(second.table.blocks.tolist())
    assert tiers_of(driver, second)[:13] == [2] * 10 + [1] * 3
    driver.run()
    assert driver.output["second"] == greedy_tokens([*range(64), 1, 2], 20)


def test_content_not_to_be_trusted_is_found_in_no_pool() -> None:
    driver = Driver(LARGE)
    sequence = driver.add(request("bad", range(64), 20))
    driver.turn()
    driver.turn()
    digests = list(sequence.table.digests)
    pool = driver.scheduler.pool
    assert isinstance(pool, TieredPool)
    assert all(pool.find(digest) is not None for digest in digests)
    driver.scheduler.finish(sequence, forget=True)
    assert all(pool.find(digest) is None for digest in digests)
    driver.scheduler.check()


def test_full_colder_pools_leave_blocks_where_they_are() -> None:
    limits = replace(LARGE, tiers=(Tier(5, 8), Tier(1, 24)))
    driver = Driver(limits)
    assert driver.scheduler.capacity == 8 + 6 * 4
    first = driver.add(request("first", range(20), 13))
    second = driver.add(request("second", range(40, 60), 13))
    for _ in range(10):
        driver.turn()
    assert sorted(tiers_of(driver, first) + tiers_of(driver, second)).count(0) > 6
    driver.run()
    assert driver.output["first"] == greedy_tokens(range(20), 13)
    assert driver.output["second"] == greedy_tokens(range(40, 60), 13)
    assert driver.scheduler.counters.preemptions == 0


def test_a_sequence_fills_the_pools_to_the_last_block_and_is_preempted_without_loss() -> None:
    limits = replace(LARGE, num_blocks=8, tiers=(Tier(5, 8), Tier(8, 24)), max_sequence=128)
    driver = Driver(limits)
    room = driver.scheduler.capacity
    assert room == 8 + 13 * 4
    for name, start in (("a", 0), ("b", 60)):
        driver.add(request(name, range(start, start + 10), room))
    driver.run()
    for name, start in (("a", 0), ("b", 60)):
        assert driver.output[name] == greedy_tokens(range(start, start + 10), room + 1 - 10)
    assert driver.scheduler.counters.preemptions > 0


def test_pools_too_small_for_one_sequence_are_refused() -> None:
    assert least_blocks(LARGE) == [4, 5, 1]
    assert sequence_blocks(LARGE, 60) == [3, 5, 10]
    assert sequence_blocks(LARGE, 6) == [3, 0, 0]
    for pool, small in enumerate(
        (replace(LARGE, num_blocks=3), replace(LARGE, tiers=(Tier(4, 8), Tier(9, 24))))
    ):
        with pytest.raises(ValueError, match=f"cache pool {pool} has {3 + pool} blocks"):
            Scheduler(small, SchedulerConfig())


def test_moves_are_batched_in_order() -> None:
    """Block 10 (pool 1) is read, then written; block 20 (pool 2) is written twice."""
    moves = [(10, 20), (1, 10), (2, 11), (11, 20), (12, 20)]
    batches = [(a, b, pairs.tolist()) for a, b, pairs in move_batches(moves, [10, 10, 5])]
    assert batches == [
        (1, 2, [[0, 0]]),
        (0, 1, [[1, 0], [2, 1]]),
        (1, 2, [[1, 0]]),
        (1, 2, [[2, 0]]),
    ]
    assert move_batches([(0, 10)], [10, 10, 5])[0][2].dtype == np.int32


@pytest.mark.parametrize("quant", ["fp32", "int4"])
def test_an_engine_serves_while_blocks_move(engine_folder: Callable[..., Path], quant: str) -> None:
    """Preempted and with prefixes found in every pool; the tokens before anything moves are those of fp16."""
    rng = np.random.default_rng(4)
    stem = rng.integers(0, VOCAB, 100).tolist()
    sampling = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=1)
    requests = [Request(f"r{i}", (*stem[: 6 + 15 * i], i, 1, 2), sampling) for i in range(6)]

    def serve(cache: str, blocks: int, *, together: bool) -> tuple[dict[str, list[int]], Stats]:
        engine = OrtEngine(
            engine_folder(quant, cache, wider=True), EngineOptions(threads=2, num_blocks=blocks)
        )
        sink = Collector()
        loop = EngineLoop(engine, None, sink, LoopConfig(scheduler=SchedulerConfig(max_step_tokens=24)))
        for wanted in requests:
            loop.submit(wanted)
            if not together:
                sink.final(wanted.id)
        for wanted in requests:
            assert sink.final(wanted.id, timeout=60).finish_reason == "length"
        stats = loop.stats()
        loop.close()
        return {wanted.id: sink.tokens(wanted.id) for wanted in requests}, stats

    exact, _ = serve("fp16", 64, together=False)
    tiered, stats = serve("tiers", 64, together=False)
    assert stats.prefix_hit_tokens > 0
    assert stats.cache_blocks == 3 * 64
    assert tiered["r0"][:20] == exact["r0"][:20]
    crowded, stats = serve("tiers", 9, together=True)
    assert stats.preemptions > 0
    assert crowded["r0"][:20] == exact["r0"][:20]
    assert all(len(tokens) == 60 for tokens in crowded.values())
